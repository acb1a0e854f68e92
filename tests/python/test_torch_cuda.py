"""mxflash.torch.attention on CUDA tensors: the engine's bits on torch's device, stream and memory; refusals.

Its gradients: test_torch_cuda_training.py.
"""

import re

import pytest
import torch
from torch import library

import mxflash
from conftest import CAPTURE
from cuda_support import (
    ENGINE,
    LENGTHS,
    MISSING,
    NAMES,
    NO_DEVICE,
    assert_same,
    beside_device_0,
    cuda,
    cycles,
    in_threads,
    on_device,
    on_two_devices,
    strided,
)
from mxflash import _native
from mxflash.torch import attention
from support import assert_same_bits, assert_within


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def run(p, **settings):
    """(o, lse)."""
    return attention(*(p[name] for name in NAMES), p["cu_seqlens"], return_lse=True, **settings)


def of_host(p, engine="cuda", **settings):
    """(o, lse) of a copy on the host by an engine of the library, which copies to the device and back if it is cuda."""
    host = {name: tensor.cpu() for name, tensor in p.items()}
    return mxflash.attention(*(host[name] for name in NAMES), host["cu_seqlens"], engine=engine, **settings)


def assert_like_reference(got, p, **settings):
    """mxfp8 against the reference: the bounds of tests/unit/cuda_support.hpp, for the largest |V| of all keys."""
    o, lse = of_host(p, "reference", **settings)
    assert got[0].dtype == o.dtype
    assert_within(got[0].cpu(), o, 2.0**-4 * p["v"].abs().max().item(), "o")
    difference = got[0].cpu().double() - o.double()
    assert difference.norm() <= 1e-2 * o.double().norm()
    seen = lse.isfinite()
    assert torch.equal(got[1].cpu().isfinite(), seen)
    assert_within(got[1].cpu()[seen], lse[seen], 0.12, "lse")


@on_device
@pytest.mark.parametrize("recipe", mxflash.recipes())
def test_every_recipe_has_the_engines_bits_or_its_reason(recipe, problem):
    p = cuda(problem(LENGTHS, head_dim=64, value_dim=64))
    if ENGINE["recipes"][recipe]["runs"]:
        assert_same(run(p, recipe=recipe), of_host(p, recipe=recipe))
        return
    with pytest.raises(RuntimeError, match=re.escape(ENGINE["recipes"][recipe]["reason"])):
        run(p, recipe=recipe)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"), [(2, 2, 128, 128), (4, 1, 64, 64), (6, 3, 96, 40)]
)
def test_types_shapes_and_groups_like_the_reference(dtype, heads, kv_heads, head_dim, value_dim, problem):
    p = cuda(problem(LENGTHS, heads, kv_heads, head_dim, value_dim, dtype))
    got = run(p)
    assert (got[0].device, got[1].device) == (p["q"].device, p["q"].device)
    assert got[0].is_contiguous()
    assert_same(got, of_host(p))
    assert_like_reference(got, p)


@on_device
def test_a_capture_like_the_reference(capture):
    p = cuda({name: capture[name] for name in (*NAMES, "cu_seqlens")})
    assert_like_reference(run(p), p)


@on_device
@pytest.mark.parametrize("mask", [{"causal": False}, {"window": (40, None)}, {"causal": False, "window": (7, 50)}])
def test_masks_and_scales(mask, problem):
    p = cuda(problem(LENGTHS))
    got = run(p, **mask, scale=0.3)
    assert_same(got, of_host(p, **mask, scale=0.3))
    assert_like_reference(got, p, **mask, scale=0.3)


@on_device
def test_own_offsets_of_keys_and_none(problem):
    p = cuda(problem([20, 44]))
    q, offsets_q = p["q"][:30], torch.tensor([0, 7, 30], dtype=torch.int32)
    got = attention(q, p["k"], p["v"], offsets_q.cuda(), p["cu_seqlens"], return_lse=True)
    host = [tensor.cpu() for tensor in (q, p["k"], p["v"])]
    want = mxflash.attention(*host, offsets_q, cu_seqlens_k=p["cu_seqlens"].cpu(), engine="cuda")
    assert_same(got, want)
    got = attention(q, p["k"], p["v"], return_lse=True)
    assert_same(got, mxflash.attention(*host, engine="cuda"))


@on_device
def test_no_tokens_and_no_keys(problem):
    p = cuda(problem([0, 0]))
    o, lse = run(p, validate=True)
    assert (o.shape, lse.shape) == ((0, 4, 32), (0, 4))
    assert attention(*(p[name] for name in NAMES), validate=True).shape == (0, 4, 32)
    p = cuda(problem([5]))
    offsets = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
    none = torch.zeros_like(offsets)
    o, lse = attention(p["q"], p["k"][:0], p["v"][:0], offsets, none, return_lse=True, validate=True)
    assert not o.any()
    assert lse.isneginf().all()


@on_device
@pytest.mark.parametrize("kind", ["fused", "heads first", "odd address", "every other element"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c13_strides(kind, dtype, problem):
    p = cuda(problem(LENGTHS, dtype=dtype))
    want = run(p)
    views = strided(kind, p)
    assert not all(view.is_contiguous() for view in views)
    assert_same(attention(*views, p["cu_seqlens"], return_lse=True), want)


@on_device
def test_c13_expanded_and_negated_views(problem):
    p = cuda(problem([33, 31]))
    row = p["k"][:, :1]
    want = run({**p, "k": row.repeat(1, 2, 1), "q": -p["q"]})
    negated = torch._neg_view(p["q"])
    assert negated.is_neg()
    got = attention(negated, row.expand(-1, 2, -1), p["v"], p["cu_seqlens"], return_lse=True)
    assert_same(got, want)


@on_device
def test_autocast_takes_its_type(problem):
    p = cuda(problem([33, 31], dtype=torch.float32))
    with torch.autocast("cuda", torch.float16):
        got = run(p)
    half = {name: tensor if name == "cu_seqlens" else tensor.half() for name, tensor in p.items()}
    assert_same(got, run(half))


# ---- Streams, devices, memory ----


@on_device
def test_c26_the_current_stream_and_no_other(problem):
    p = cuda(problem(LENGTHS))
    want = run(p)
    stream = torch.cuda.Stream()
    late = {name: torch.zeros_like(tensor) for name, tensor in p.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles(0.1))  # On another stream the call would read zeros.
        for name, tensor in late.items():
            tensor.copy_(p[name])
        got = run(late)
    stream.synchronize()
    assert_same(got, want)


@on_device
def test_nothing_waits(problem):
    p = cuda(problem(LENGTHS))
    with_offsets, without = run(p), attention(*(p[name] for name in NAMES))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(cycles(0.2))
        slept = torch.cuda.Event()
        slept.record()
        got = run(p)
        again = attention(*(p[name] for name in NAMES))
        assert not slept.query()  # Both calls are back while the device has begun neither.
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, with_offsets)
    assert_same_bits(again.cpu(), without.cpu())


@on_device
def test_memory_is_outputs_and_a_workspace_of_torchs(problem):
    p = cuda(problem([700, 1300], heads=8, head_dim=128, value_dim=128))
    run(p)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    before = torch.cuda.memory_stats()
    o, lse = run(p)
    after = torch.cuda.memory_stats()
    torch.cuda.synchronize()
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 3
    assert after["allocation.all.freed"] - before["allocation.all.freed"] == 1
    kept = after["requested_bytes.all.current"] - before["requested_bytes.all.current"]
    assert kept == o.nbytes + lse.nbytes
    workspace = after["requested_bytes.all.freed"] - before["requested_bytes.all.freed"]
    # Codes of a byte an element for q, k and v, rounded up to tiles, and scales.
    codes = sum(p[name].numel() for name in NAMES)
    assert codes < workspace < 1.5 * codes
    assert torch.cuda.mem_get_info()[0] == free  # None of the driver's either.


@on_two_devices
def test_c26_tensors_of_another_device(problem):
    p = problem(LENGTHS)
    want = run(cuda(p, "cuda:0"))
    there = cuda(p, "cuda:1")

    got = beside_device_0(lambda: run(there, validate=True))
    assert got[0].device == torch.device("cuda:1")
    assert_same(got, want)
    with pytest.raises(ValueError, match="k: on cuda:0 given, cuda:1 allowed"):
        run({**there, "k": p["k"].to("cuda:0")})


@on_two_devices
def test_c26_another_devices_own_stream(problem):
    p = cuda(problem(LENGTHS), "cuda:1")
    want = run(p)
    stream = torch.cuda.Stream("cuda:1")
    late = {name: torch.zeros_like(tensor) for name, tensor in p.items()}
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device("cuda:0"):
        with torch.cuda.device("cuda:1"):
            torch.cuda._sleep(cycles(0.1))  # On another stream the call would read zeros.
        for name, tensor in late.items():
            tensor.copy_(p[name])
        got = run(late)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert_same(got, want)


@on_two_devices
def test_c26_two_devices_at_once(problem):
    packs = [problem(LENGTHS, seed=seed) for seed in range(2)]
    want = [run(cuda(p)) for p in packs]
    there = [cuda(p, f"cuda:{i}") for i, p in enumerate(packs)]
    for p in there:
        torch.cuda.synchronize(p["q"].device)
    # By one thread, in turns.
    for got in zip(*[[run(p) for p in there] for _ in range(10)], strict=True):
        for one in got:
            assert_same(one, want[one[0].device.index])
    # By two.
    for got in in_threads(lambda i: [run(there[i]) for _ in range(20)], 2):
        for one in got:
            assert_same(one, want[one[0].device.index])


# ---- Graphs ----

PACKINGS = [[200, 200, 200], [600, 0, 0], [1, 598, 1], [0, 129, 471]]


@on_device
def test_c24_one_graph_serves_every_packing_of_the_same_totals(problem):
    first = cuda(problem(PACKINGS[0]))
    run(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(first)
    for seed, lengths in enumerate(PACKINGS):
        p = cuda(problem(lengths, seed=seed))
        for name, tensor in first.items():
            tensor.copy_(p[name])
        graph.replay()
        assert_same(captured, run(p))
    first["cu_seqlens"].copy_(torch.tensor([0, 300, 200, 600]))
    graph.replay()
    assert captured[0].isnan().all()
    first["cu_seqlens"].copy_(p["cu_seqlens"])
    graph.replay()
    assert_same(captured, run(p))


@on_device
def test_c24_a_graph_of_one_document_without_offsets(problem):
    p = cuda(problem([90]))
    want = run(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*(p[name] for name in NAMES), return_lse=True)
    graph.replay()
    assert_same(captured, want)


@on_device
def test_c24_nothing_can_be_validated_in_a_graph(problem):
    p = cuda(problem([90]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="validate: True given while a graph is captured"):
            run(p, validate=True)
        captured = run(p)
    graph.replay()
    assert_same(captured, run(p))


# ---- Compilation ----


@on_device
def test_c25_compiles_whole_and_once_for_all_lengths(problem):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def function(q, k, v, offsets):
        o, lse = attention(q * 2, k, v, offsets, return_lse=True)
        return o.float().square(), lse

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    # No size is another's at first: torch would take them for the same one.
    for lengths in ([30, 20, 10, 5, 2], [64], [33, 31, 5]):
        p = cuda(problem(lengths))
        arguments = *(p[name] for name in NAMES), p["cu_seqlens"]
        assert_same(compiled(*arguments), function(*arguments))
    assert counter.frame_count == 1


@on_device
def test_c25_compiled_calls_make_cuda_graphs(problem):
    torch._dynamo.reset()
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(lambda q, k, v, offsets: attention(q * 2, k, v, offsets) + 1, mode="reduce-overhead")
    p = cuda(problem([33, 31]))
    q, *rest = *(p[name] for name in NAMES), p["cu_seqlens"]
    for _ in range(3):  # Warms up, records, replays.
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(q, *rest).clone()
    assert_same_bits(got.cpu(), (attention(q * 2, *rest) + 1).cpu())
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips


@on_device
def test_c25_opcheck(problem):
    p = cuda(problem([10, 54]))
    arguments = (*(p[name] for name in NAMES), p["cu_seqlens"], None, None)
    settings = ("mxfp8", 2**31 - 1, 0, None, "auto", None, False)
    results = library.opcheck(torch.ops.mxflash.attention, (*arguments, *settings))
    assert set(results.values()) == {"SUCCESS"}


# ---- What is refused ----


@on_device
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 33, 64], "starts elsewhere than at 0"),
        ([0, 70, 64], "decreases"),
        ([0, 33, 63], "ends elsewhere than at the rows of"),
        ([0, 33, 65], "ends elsewhere than at the rows of"),
        ([0, -5, 64], "decreases"),
        ([0, 2**31 - 1, 64], "decreases"),
        ([-(2**31), 33, 64], "starts elsewhere than at 0"),
    ],
)
def test_c12_malformed_offsets(side, offsets, message, problem):
    p = cuda(problem([33, 31]))
    tensors = [p[name] for name in NAMES]
    bad = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    pair = (bad, p["cu_seqlens"]) if side == "q" else (p["cu_seqlens"], bad)
    o, lse = attention(*tensors, *pair, return_lse=True)
    assert o.isnan().all()
    assert lse.isnan().all()
    with pytest.raises(ValueError, match=f"^cu_seqlens_{side}: {message}"):
        attention(*tensors, *pair, validate=True)
    assert_same(run(p, validate=True), run(p))  # Nothing is left of it.


@on_device
@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        (
            {"cu_seqlens": torch.tensor([0, 64], dtype=torch.int32)},
            {},
            ValueError,
            "cu_seqlens_q: on cpu given, cuda:0",
        ),
        ({"cu_seqlens": torch.tensor([0, 64]).cuda}, {}, ValueError, "cu_seqlens_q: type int64 given, int32 allowed"),
        ({"cu_seqlens": torch.tensor([[0, 64]]).int().cuda}, {}, ValueError, r"cu_seqlens_q: shape \[1, 2\] given"),
        ({"cu_seqlens": torch.tensor([0, 0, 64, 0]).int().cuda, "stride": 2}, {}, ValueError, "cu_seqlens_q: stride 2"),
        ({"cu_seqlens": torch.zeros(0).int().cuda}, {}, ValueError, "cu_seqlens_q: 0 entries given"),
        ({"k": torch.zeros(64, 2, 32)}, {}, ValueError, "k: on cpu given, cuda:0 allowed"),
        ({"k": torch.zeros(64, 2, 32).cuda}, {}, ValueError, "k: type F32 given, BF16 allowed"),
        ({"q": torch.zeros(64, 4, 32).double().cuda}, {}, ValueError, "q: type float64 given, bfloat16, float16 or"),
        ({"q": torch.zeros(64, 3, 32).bfloat16().cuda}, {}, ValueError, "q: 3 heads given"),
        ({"q": torch.zeros(64, 32).bfloat16().cuda}, {}, ValueError, r"q: shape \[64, 32\] given, three dimensions"),
        ({"v": torch.zeros(64, 2, 12).bfloat16().cuda}, {}, ValueError, "value_dim: 12 given"),
        ({}, {"engine": "cpu"}, ValueError, "engine: 'cpu' given, 'auto' or 'cuda' allowed"),
        ({}, {"engine": "reference"}, ValueError, "engine: 'reference' given, 'auto' or 'cuda' allowed"),
        ({}, {"recipe": "mxfp9"}, ValueError, 'recipe is "mxfp9"; allowed: '),
        ({}, {"causality": "some"}, ValueError, 'causality is "some"; allowed: '),
        ({}, {"scale": float("nan")}, ValueError, "scale: nan given, a finite number allowed"),
        ({}, {"seed": -1}, ValueError, "seed: -1 given"),
    ],
)
def test_c12_bad_arguments_are_refused(change, settings, error, message, problem):
    change = dict(change)
    step = change.pop("stride", 1)
    change = {name: tensor() if callable(tensor) else tensor for name, tensor in change.items()}
    p = {**cuda(problem([64])), **change}
    p["cu_seqlens"] = p["cu_seqlens"][::step]
    with pytest.raises(error, match=message):
        run(p, **settings)


@on_device
def test_offsets_of_another_number_of_documents(problem):
    p = cuda(problem([33, 31]))
    one = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"cu_seqlens_k: 2 entries given, 3 allowed \(cu_seqlens_q's\)"):
        attention(*(p[name] for name in NAMES), p["cu_seqlens"], one)
    with pytest.raises(ValueError, match="cu_seqlens_q: none given"):
        attention(*(p[name] for name in NAMES), None, one)


@on_device
def test_c29_the_other_functions_take_the_hosts_arrays(problem):
    p = cuda(problem([64]))
    with pytest.raises(RuntimeError, match=r"^q: an array on a CUDA device given, the host's memory allowed \(mxflash"):
        mxflash.attention(*(p[name] for name in NAMES), p["cu_seqlens"])


@pytest.mark.skipif(NO_DEVICE is not None or MISSING is None, reason=NO_DEVICE or "the CUDA engine runs here")
def test_c29_a_build_without_cuda_says_so(problem):
    p = cuda(problem([64]))
    with pytest.raises(RuntimeError, match=f"^{re.escape(MISSING)}"):
        run(p)


def test_c29_the_compiled_part_says_what_is_missing(problem):
    p = problem([64])
    arguments = _native.Arguments(*(p[name] for name in NAMES))
    arguments.documents(p["cu_seqlens"], None)
    settings = _native.Settings()
    settings.recipe = "mxfp8"
    on_host = "cu_seqlens_q: an array on the host given, a CUDA device's memory allowed"
    with pytest.raises(RuntimeError, match=f"^{re.escape(ENGINE['reason'] or on_host)}"):
        _native.cuda_workspace_bytes(arguments, settings, _native.Device())
    with pytest.raises(RuntimeError, match=f"^{re.escape(ENGINE['reason'] or on_host)}"):
        _native.cuda_backward_workspace_bytes(arguments, settings, _native.Device())
    for function in (_native.cuda_forward, _native.cuda_backward):
        with pytest.raises(RuntimeError, match=f"^{on_host}"):
            function(arguments, settings, _native.Device())


@pytest.mark.parametrize("offsets", [True, False])
def test_fake_cuda_tensors_need_no_device(offsets, problem):
    host = problem([33, 31])
    with torch._subclasses.FakeTensorMode():
        p = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in host.items()}
        fake = attention(*(p[name] for name in NAMES), p["cu_seqlens"] if offsets else None, return_lse=True)
    assert [(t.shape, t.dtype, t.device.type) for t in fake] == [
        ((64, 4, 32), torch.bfloat16, "cuda"),
        ((64, 4), torch.float32, "cuda"),
    ]


# ---- The proof that nothing leaks, through torch ----


@on_device
def test_the_audit_holds_on_the_device():
    tensors, _ = mxflash.load(CAPTURE, "torch")
    tensors = cuda({name: tensors[name] for name in (*NAMES, "cu_seqlens")})
    report = mxflash.audit(
        lambda q, k, v, offsets: attention(q, k, v, offsets, return_lse=True, validate=True),
        *tensors.values(),
        backward=False,
        probes=24,
    )
    assert report.holds, str(report)
