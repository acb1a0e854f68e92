"""Gradients of mxflash.torch.attention on CUDA tensors: the engine's bits, autograd, graphs, compilation, memory."""

import re

import pytest
import torch
import torch._dynamo.testing
from torch import library
from torch.testing._internal.optests import aot_autograd_check
from torch.utils.checkpoint import checkpoint

import mxflash
from conftest import CAPTURE
from cuda_support import (
    ENGINE,
    LENGTHS,
    NAMES,
    assert_same,
    beside_device_0,
    cuda,
    cycles,
    in_threads,
    on_device,
    on_two_devices,
    strided,
)
from mxflash import _cuda, _native
from mxflash.torch import attention
from support import assert_same_bits

GRADIENTS = ("dq", "dk", "dv")
UNBOUNDED = 2**31 - 1
# As kGradientL2 of tests/unit/cuda_backward_support.hpp.
OF_REFERENCE = 3e-2


def leaves(p):
    return [p[name].detach().clone().requires_grad_() for name in NAMES]


def run(p, dlse=None, **settings):
    """(o, dq, dk, dv)."""
    q, k, v = leaves(p)
    o, lse = attention(q, k, v, p["cu_seqlens"], return_lse=True, **settings)
    losses, of_losses = ((o,), (p["do"],)) if dlse is None else ((o, lse), (p["do"], dlse))
    return o.detach(), *torch.autograd.grad(losses, (q, k, v), of_losses)


def of_host(p, engine="cuda", dlse=None, **settings):
    """(dq, dk, dv) of copies on the host by an engine of the library; cuda copies to the device and back."""
    host = {name: tensor.cpu() for name, tensor in p.items()}
    tensors = host["do"], *(host[name] for name in NAMES), None, None, host["cu_seqlens"]
    dlse = None if dlse is None else dlse.cpu()
    return mxflash.attention_backward(*tensors, engine=engine, dlse=dlse, **settings)


def exact(p, dlse=None, **settings):
    host = {name: tensor.cpu() for name, tensor in p.items()}
    tensors = host["do"], *(host[name] for name in NAMES), host["cu_seqlens"]
    return mxflash.exact_attention_backward(*tensors, dlse=None if dlse is None else dlse.cpu(), **settings)


def distance(got, want):
    """Relative L2."""
    want = want.cpu().double()
    return ((got.cpu().double() - want).norm() / want.norm()).item()


def assert_gradients(got, p, dlse=None, **settings):
    """The engine's bits; near the reference; no further from float64 than the reference is, but for a tenth."""
    assert_same(got, of_host(p, dlse=dlse, **settings), GRADIENTS)
    reference = of_host(p, "reference", dlse=dlse, **settings)
    masks = {name: settings[name] for name in ("causal", "window", "scale") if name in settings}
    for name, a, b, c in zip(GRADIENTS, got, reference, exact(p, dlse, **masks), strict=True):
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, True), name
        assert distance(a, b) <= OF_REFERENCE, name
        assert distance(a, c) <= 1.1 * distance(b, c) + 1e-3, name


@on_device
@pytest.mark.parametrize("recipe", mxflash.recipes())
def test_every_recipe_has_the_engines_bits_or_its_reason(recipe, problem):
    p = cuda(problem(LENGTHS, head_dim=64, value_dim=64))
    backward = ENGINE["recipes"][recipe]["backward"]
    if backward["runs"]:
        _, *got = run(p, recipe=recipe, seed=0)
        assert_same(got, of_host(p, recipe=recipe), GRADIENTS)
        return
    with pytest.raises((RuntimeError, ValueError), match=re.escape(backward["reason"])):
        attention(*leaves(p), p["cu_seqlens"], recipe=recipe)


@on_device
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_exact_causality(recipe, problem):
    p = cuda(problem(LENGTHS, head_dim=64, value_dim=64))
    _, *got = run(p, recipe=recipe, causality="exact")
    assert_same(got, of_host(p, recipe=recipe, causality="exact"), GRADIENTS)


@on_device
def test_stochastic_rounding_draws_from_torchs_generator(problem):
    if not ENGINE["recipes"]["fp4"]["backward"]["runs"]:
        pytest.skip(ENGINE["recipes"]["fp4"]["backward"]["reason"])
    p = cuda(problem([70], head_dim=64, value_dim=64))

    def dq(seed):
        torch.manual_seed(seed)
        return run(p, recipe="fp4")[1]

    assert_same_bits(dq(1).cpu(), dq(1).cpu())
    assert not torch.equal(dq(1), dq(2))
    state = torch.get_rng_state()
    run(p)
    with torch.no_grad():
        attention(*(p[name] for name in NAMES), p["cu_seqlens"], recipe="fp4")
    assert torch.equal(torch.get_rng_state(), state)  # Nothing is drawn where nothing is rounded so.


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(2, 2, 128, 128), (4, 1, 64, 64), (6, 3, 32, 40), (2, 1, 256, 256)],
)
def test_types_shapes_and_groups(dtype, heads, kv_heads, head_dim, value_dim, problem):
    p = cuda(problem(LENGTHS, heads, kv_heads, head_dim, value_dim, dtype))
    o, *got = run(p)
    with torch.no_grad():
        assert_same_bits(attention(*(p[name] for name in NAMES), p["cu_seqlens"]), o)
    assert_gradients(got, p)


@on_device
def test_a_capture(capture):
    p = cuda({name: capture[name] for name in (*NAMES, "do", "cu_seqlens")})
    assert_gradients(run(p)[1:], p)


@on_device
@pytest.mark.parametrize("mask", [{"causal": False}, {"window": (40, None)}, {"causal": False, "window": (7, 50)}])
def test_masks_and_scales(mask, problem):
    p = cuda(problem(LENGTHS))
    assert_gradients(run(p, **mask, scale=0.3)[1:], p, **mask, scale=0.3)


@on_device
def test_c27_losses_that_use_lse(problem):
    p = cuda(problem(LENGTHS))
    dlse = torch.randn(p["q"].shape[:2], generator=torch.Generator().manual_seed(1)).cuda()
    assert_gradients(run(p, dlse)[1:], p, dlse)
    apart = dlse.t().contiguous().t()  # Other strides.
    assert_same(run(p, apart)[1:], run(p, dlse)[1:], GRADIENTS)
    assert_same(run(p, torch.zeros_like(dlse))[1:], run(p)[1:], GRADIENTS)
    q, k, v = leaves(p)
    _, lse = attention(q, k, v, p["cu_seqlens"], return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), dlse)
    assert_same((dq, dk, dv), of_host({**p, "do": torch.zeros_like(p["do"])}, dlse=dlse), GRADIENTS)
    assert dq.any()
    assert not dv.any()


@on_device
def test_own_offsets_of_keys_and_none(problem):
    p = cuda(problem([20, 44]))
    q, k, v = leaves(p)
    offsets_q = torch.tensor([0, 7, 30], dtype=torch.int32)
    o = attention(q[:30], k, v, offsets_q.cuda(), p["cu_seqlens"])
    got = torch.autograd.grad(o, (q, k, v), p["do"][:30])
    host = [p[name].cpu() for name in ("do", *NAMES)]
    shared = {"cu_seqlens_k": p["cu_seqlens"].cpu(), "engine": "cuda"}
    want = mxflash.attention_backward(host[0][:30], host[1][:30], *host[2:], None, None, offsets_q, **shared)
    assert not got[0][30:].any()
    assert_same((got[0][:30], *got[1:]), want, GRADIENTS)
    got = torch.autograd.grad(attention(q, k, v), (q, k, v), p["do"])
    assert_same(got, mxflash.attention_backward(*host, engine="cuda"), GRADIENTS)


@on_device
def test_c5_no_tokens_no_keys_no_queries(problem):
    p = cuda(problem([0, 0]))
    assert [gradient.shape for gradient in run(p)[1:]] == [p[name].shape for name in NAMES]
    p = cuda(problem([5]))
    offsets = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
    none = torch.zeros_like(offsets)
    q, k, v = leaves(p)
    o = attention(q, k[:0], v[:0], offsets, none)
    assert not torch.autograd.grad(o, q, p["do"])[0].any()
    o = attention(q[:0], k, v, none, offsets)
    dk, dv = torch.autograd.grad(o, (k, v), p["do"][:0])
    assert not dk.any()
    assert not dv.any()


@on_device
@pytest.mark.parametrize("kind", ["fused", "heads first", "odd address", "every other element"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c13_strides(kind, dtype, problem):
    p = cuda(problem(LENGTHS, dtype=dtype))
    want = run(p)[1:]
    views = [view.detach().requires_grad_() for view in strided(kind, p)]
    o = attention(*views, p["cu_seqlens"])
    do = torch.nn.functional.pad(p["do"], (1, 0))[..., 1:] if kind == "odd address" else p["do"].mT.contiguous().mT
    assert_same(torch.autograd.grad(o, views, do), want, GRADIENTS)


@on_device
def test_c13_fused_views_and_expanded_gradients(problem):
    p = cuda(problem([33, 31, 5]))
    qkv = torch.cat([p[name] for name in NAMES], 1).requires_grad_()
    attention(*qkv.split((4, 2, 2), 1), p["cu_seqlens"]).sum().backward()  # Its dO is a 1 with strides of 0.
    want = of_host({**p, "do": torch.ones_like(p["do"])})
    assert_same(qkv.grad.split((4, 2, 2), 1), want, GRADIENTS)


@on_device
def test_autocast_takes_its_type(problem):
    p = cuda(problem([33, 31], dtype=torch.float32))
    q, k, v = leaves(p)
    with torch.autocast("cuda", torch.bfloat16):
        o = attention(q, k, v, p["cu_seqlens"])
    got = torch.autograd.grad(o, (q, k, v), p["do"].bfloat16())
    want = of_host({name: tensor if name == "cu_seqlens" else tensor.bfloat16() for name, tensor in p.items()})
    assert_same(got, [gradient.float() for gradient in want], GRADIENTS)


# ---- Autograd ----


@on_device
def test_one_input_alone_may_want_a_gradient(problem):
    p = cuda(problem(LENGTHS))
    want = run(p)[1:]
    for i in range(3):
        tensors = [p[name].clone() for name in NAMES]
        tensors[i].requires_grad_()
        attention(*tensors, p["cu_seqlens"]).backward(p["do"])
        assert_same_bits(tensors[i].grad.cpu(), want[i].cpu())


@on_device
def test_changes_in_place_are_noticed_where_they_matter(problem):
    p = cuda(problem([33, 31]))
    want = run(p)[1:]
    q, k, v = leaves(p)
    for spoiled in ("o", "cu_seqlens"):
        offsets = p["cu_seqlens"].clone()
        o = attention(q, k, v, offsets)
        with torch.no_grad():
            (o if spoiled == "o" else offsets).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.backward(p["do"])
    views = [leaf * 1 for leaf in (q, k, v)]
    o = attention(*views, p["cu_seqlens"])
    for view in views:  # Their codes are what is kept.
        view.detach().zero_()
    assert_same(torch.autograd.grad(o, (q, k, v), p["do"]), want, GRADIENTS)


@on_device
def test_c27_second_derivatives_raise(problem):
    p = cuda(problem([33]))
    q, k, v = leaves(p)
    o = attention(q, k, v, p["cu_seqlens"])
    with pytest.raises(RuntimeError, match="create_graph: True given, False allowed"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


@on_device
@pytest.mark.parametrize("reentrant", [True, False])
def test_c27_checkpointing_gives_the_same_bits(reentrant, problem):
    p = cuda(problem(LENGTHS))
    q, k, v = leaves(p)
    o = checkpoint(lambda q, k, v: attention(q, k, v, p["cu_seqlens"]), q, k, v, use_reentrant=reentrant)
    o.backward(p["do"])
    assert_same((o.detach(), q.grad, k.grad, v.grad), run(p), ("o", *GRADIENTS))


@on_device
def test_c23_the_same_bits_every_time(problem):
    p = cuda(problem([700, 1300, 3], heads=8, head_dim=64, value_dim=64))
    want = run(p)
    for _ in range(10):
        assert_same(run(p), want, ("o", *GRADIENTS))
    loose = run(p, deterministic=False)
    assert_same(loose[2:], want[2:], ("dk", "dv"))
    assert distance(loose[1], want[1]) < 2.0**-8  # Sums in FP32 in another order, then rounded to BF16.
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(run(p, deterministic=False), want, ("o", *GRADIENTS))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- Streams, threads, memory ----


@on_device
def test_c26_the_forwards_stream(problem):
    p = cuda(problem(LENGTHS))
    want = run(p)[1:]
    stream = torch.cuda.Stream()
    late = leaves({name: torch.zeros_like(p[name]) for name in NAMES})
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles(0.1))  # On another stream the call would read zeros.
        with torch.no_grad():
            for leaf, name in zip(late, NAMES, strict=True):
                leaf.copy_(p[name])
        o = attention(*late, p["cu_seqlens"])
    got = torch.autograd.grad(o, late, p["do"])  # Autograd goes back to that stream, and lets this one wait for it.
    assert_same(got, want, GRADIENTS)


@on_device
def test_nothing_waits(problem):
    p = cuda(problem(LENGTHS))
    want = run(p)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(cycles(0.3))
        slept = torch.cuda.Event()
        slept.record()
        got = run(p)
        assert not slept.query()  # Both passes are back while the device has begun neither.
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want, ("o", *GRADIENTS))


@on_device
def test_two_threads(problem):
    packs = [cuda(problem(LENGTHS, seed=seed)) for seed in range(2)]
    want = [run(p) for p in packs]
    torch.cuda.synchronize()

    def train(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = run(packs[i])
            torch.cuda.current_stream().synchronize()
        return got

    for a, b in zip(in_threads(train, 2), want, strict=True):
        assert_same(a, b, ("o", *GRADIENTS))


@on_two_devices
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_c26_gradients_on_another_device(recipe, problem):
    p = problem(LENGTHS)
    want = run(cuda(p), recipe=recipe)
    there = cuda(p, "cuda:1")

    got = beside_device_0(lambda: run(there, recipe=recipe))
    assert all(tensor.device == torch.device("cuda:1") for tensor in got)
    assert_same(got, want, ("o", *GRADIENTS))


@on_two_devices
def test_c26_two_devices_train_at_once(problem):
    packs = [problem(LENGTHS, seed=seed) for seed in range(2)]
    want = [run(cuda(p)) for p in packs]
    there = [cuda(p, f"cuda:{i}") for i, p in enumerate(packs)]
    for p in there:
        torch.cuda.synchronize(p["q"].device)

    def train(i):
        with torch.cuda.stream(torch.cuda.Stream(f"cuda:{i}")):
            got = [run(there[i]) for _ in range(20)]
            torch.cuda.current_stream(i).synchronize()
        return got

    for i, got in enumerate(in_threads(train, 2)):
        for one in got:
            assert_same(one, want[i], ("o", *GRADIENTS))
    # One graph of autograd over both.
    tensors = [leaves(p) for p in there]
    loss = sum(
        (attention(*qkv, p["cu_seqlens"]).float() * p["do"].float()).sum().to("cuda:0")
        for qkv, p in zip(tensors, there, strict=True)
    )
    loss.backward()
    for qkv, of in zip(tensors, want, strict=True):
        assert_same([tensor.grad for tensor in qkv], of[1:], GRADIENTS)


def kept_bytes(function):
    """Of torch's allocator: what a call leaves allocated while its result is held."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function()
    return torch.cuda.memory_stats()["requested_bytes.all.current"] - before, result


@on_device
def test_what_is_kept_and_what_is_not(problem):
    p = cuda(problem([700, 1300], heads=8, head_dim=128, value_dim=128))
    tensors = leaves(p)
    run(p)
    room = _cuda.saved_bytes(tensors, p["cu_seqlens"], "mxfp8", None)

    def forward():
        return attention(*tensors, p["cu_seqlens"])

    with torch.no_grad():
        kept, o = kept_bytes(forward)
    assert kept == o.nbytes
    kept, o = kept_bytes(forward)
    assert kept == o.nbytes + room
    kept, o = kept_bytes(lambda: attention(*(tensor * 1 for tensor in tensors), p["cu_seqlens"]))
    assert kept == o.nbytes + room  # And not q, k and v.


def documented_bytes(p):
    """(kept by the forward, the most beside inputs and dO), as docs/training.md says: BF16, 128 dims."""
    queries, keys = p["q"].shape[0] * p["q"].shape[1], p["k"].shape[0] * p["k"].shape[1]
    kept = 664 * queries + 265 * keys
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return kept, kept + (256 + 925) * queries + (512 + 256) * keys + processors * 2**17


@on_device
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_the_peak_is_what_the_documentation_says(kv_heads, problem):
    p = cuda(problem([3000, 9000, 4384], 16, kv_heads, 128, 128))
    tensors = leaves(p)
    run(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attention(*tensors, p["cu_seqlens"])
    kept = torch.cuda.memory_allocated() - before
    gradients = torch.autograd.grad(o, tensors, p["do"])
    peak = torch.cuda.max_memory_allocated() - before
    del gradients
    want_kept, want_peak = documented_bytes(p)
    assert kept == pytest.approx(want_kept, rel=0.05)
    assert peak == pytest.approx(want_peak, rel=0.05)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("lengths", "head_dim", "value_dim"),
    [
        ([4096], 128, 128),
        ([1] * 4096, 128, 128),
        ([0] * 300 + [70], 64, 64),
        ([3000, 1096], 96, 40),
        ([129], 32, 256),
        ([1000], 256, 64),
        ([100_000] + [37] * 1000, 64, 64),
    ],
)
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", "nvfp4", "fp4"])
def test_the_room_for_what_is_kept(recipe, dtype, lengths, head_dim, value_dim):
    if not ENGINE["recipes"][recipe]["backward"]["runs"]:
        pytest.skip(ENGINE["recipes"][recipe]["backward"]["reason"])
    tokens = sum(lengths)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    shapes = (4, head_dim), (2, head_dim), (2, value_dim)
    q, k, v = (torch.empty(tokens, *shape, dtype=dtype, device="cuda") for shape in shapes)
    arguments = _native.Arguments(q, k, v)
    arguments.documents(offsets, offsets)
    settings = _native.Settings()
    settings.recipe = recipe
    device = _native.Device()
    device.o = q.data_ptr()
    device.lse = q.data_ptr()
    device.training = True
    needed = _native.cuda_workspace_bytes(arguments, settings, device)
    slots = tokens // 128 + len(lengths)
    # Of the sort's scratch alone only a bound is known, whatever the number of documents.
    assert needed <= _cuda.saved_bytes((q, k, v), offsets, recipe, None) <= needed + 40 * 2**10 + 13 * slots


# ---- Graphs ----

PACKINGS = [[200, 200, 200], [600, 0, 0], [1, 598, 1], [0, 129, 471]]


def warm_up(function):
    """On a stream of its own, as torch's graphs ask for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@on_device
def test_c24_one_graph_of_both_passes_serves_every_packing_of_the_same_totals(problem):
    first = cuda(problem(PACKINGS[0]))
    tensors = leaves(first)
    offsets, do = first["cu_seqlens"], first["do"]

    def step():
        o = attention(*tensors, offsets)
        return o.detach(), *torch.autograd.grad(o, tensors, do)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    def load(p):
        with torch.no_grad():
            for tensor, name in zip((*tensors, do, offsets), (*NAMES, "do", "cu_seqlens"), strict=True):
                tensor.copy_(p[name])

    for seed, lengths in enumerate(PACKINGS):
        p = cuda(problem(lengths, seed=seed))
        load(p)
        graph.replay()
        assert_same(captured, run(p), ("o", *GRADIENTS))
    offsets.copy_(torch.tensor([0, 300, 200, 600]))
    graph.replay()
    assert all(result.isnan().all() for result in captured)
    load(p)
    graph.replay()
    assert_same(captured, run(p), ("o", *GRADIENTS))


@on_device
def test_c24_graphed_callables(problem):
    first = cuda(problem(PACKINGS[0]))
    sample = *leaves(first), first["cu_seqlens"]
    graphed = torch.cuda.make_graphed_callables(lambda q, k, v, offsets: attention(q, k, v, offsets), sample)
    for seed, lengths in enumerate(PACKINGS):
        p = cuda(problem(lengths, seed=seed))
        tensors = leaves(p)
        o = graphed(*tensors, p["cu_seqlens"])
        o.backward(p["do"])
        got = o.detach(), *(tensor.grad for tensor in tensors)
        assert_same(got, run(p), ("o", *GRADIENTS))


# ---- Compilation ----


def scored(q, k, v, offsets):
    o, lse = attention(q * 2, k, v, offsets, return_lse=True)
    return o.float().square().sum() + lse.sin().sum()


@on_device
def test_c25_compiles_whole_and_once_for_all_lengths(problem):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(scored, fullgraph=True, dynamic=True, backend=counter)
    # No size is another's at first: torch would take them for the same one. No tokens without a visible key: their LSE
    # has no sine.
    for lengths in ([30, 20, 10, 5, 2], [64], [33, 31, 5]):
        p = cuda(problem(lengths))
        got, want = (torch.autograd.grad(f(*(x := leaves(p)), p["cu_seqlens"]), x) for f in (compiled, scored))
        for name, a, b in zip(GRADIENTS, got, want, strict=True):
            # The loss's own kernels are others.
            assert distance(a, b) <= OF_REFERENCE, name
    assert counter.frame_count == 1


@on_device
def test_c25_compiled_gradients_are_the_eager_bits(problem):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: attention(*tensors), fullgraph=True)
    p = cuda(problem(LENGTHS))
    want = run(p)[1:]
    tensors = leaves(p)
    assert_same(torch.autograd.grad(compiled(*tensors, p["cu_seqlens"]), tensors, p["do"]), want, GRADIENTS)


@on_device
def test_c25_compiled_training_makes_cuda_graphs(problem):
    torch._dynamo.reset()
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(lambda *tensors: attention(*tensors) + 1, mode="reduce-overhead", fullgraph=True)
    p = cuda(problem([33, 31]))
    want = run(p)[1:]
    for _ in range(3):  # Warms up, records, replays.
        torch.compiler.cudagraph_mark_step_begin()
        tensors = leaves(p)
        got = [x.clone() for x in torch.autograd.grad(compiled(*tensors, p["cu_seqlens"]), tensors, p["do"])]
        assert_same(got, want, GRADIENTS)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips


def settings_of_operators(deterministic=True):
    return "mxfp8", UNBOUNDED, 0, None, "auto", None, deterministic


@on_device
def test_c25_opcheck(problem):
    p = cuda(problem([10, 54]))
    arguments = *leaves(p), p["cu_seqlens"], None, None, *settings_of_operators()
    operator = torch.ops.mxflash.attention_training
    # The fourth test compares results, and the third result has bytes that nobody wrote: below, without that.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = library.opcheck(operator, arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}
    for dynamic in (False, True):
        aot_autograd_check(lambda *given: operator(*given)[:2], arguments, {}, dynamic, check_gradients="auto")
    with torch.no_grad():
        o, _, saved = operator(*arguments)
    sizes = p["k"].shape[0], p["k"].shape[1], p["q"].shape[2]
    rest = p["cu_seqlens"], None, None, None, None, None
    arguments = p["do"], o, saved, *rest, *sizes, *settings_of_operators()
    results = library.opcheck(torch.ops.mxflash.attention_training_backward, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("offsets", [True, False])
def test_fake_cuda_tensors_need_no_device(offsets, problem):
    host = problem([33, 31])
    # Below autograd, which asks the device for its stream.
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        p = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in host.items()}
        packed = p["cu_seqlens"] if offsets else None
        tensors = [p[name] for name in NAMES]
        o, lse, saved = torch.ops.mxflash.attention_training(*tensors, packed, None, None, *settings_of_operators())
        given = p["do"], o, saved, packed, None, None, *tensors, 64, 2, 32, *settings_of_operators()
        gradients = torch.ops.mxflash.attention_training_backward(*given)
    assert [(t.shape, t.dtype, t.device.type) for t in (o, lse)] == [
        ((64, 4, 32), torch.bfloat16, "cuda"),
        ((64, 4), torch.float32, "cuda"),
    ]
    assert (saved.dtype, saved.ndim) == (torch.uint8, 1)
    assert [t.shape for t in gradients] == [p[name].shape for name in NAMES]


# ---- What is refused ----


@on_device
@pytest.mark.parametrize("offsets", [[1, 33, 64], [0, 70, 64], [0, 33, 63], [0, 33, 65], [0, 2**31 - 1, 64]])
def test_c12_malformed_offsets(offsets, problem):
    p = cuda(problem([33, 31]))
    bad = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    for result in run({**p, "cu_seqlens": bad}):
        assert result.isnan().all()
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: "):
        run({**p, "cu_seqlens": bad}, validate=True)
    assert_same(run(p, validate=True), run(p), ("o", *GRADIENTS))  # Nothing is left of it.


@on_device
def test_c12_bad_arguments_are_refused_in_the_forward(problem):
    p = cuda(problem([64]))
    q, k, v = leaves(p)
    for tensors, message in (
        ((q[:, 0], k, v), r"q: shape \[64, 32\] given, three dimensions"),
        ((q, k.float(), v), "k: type F32 given, BF16 allowed"),
        ((q, k, v[..., :12]), "value_dim: 12 given"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*tensors, p["cu_seqlens"])
    for engine in ("cpu", "reference"):
        with pytest.raises(ValueError, match=f"engine: '{engine}' given, 'auto' or 'cuda' allowed"):
            attention(q, k, v, p["cu_seqlens"], engine=engine)


@on_device
def test_the_operators_by_themselves_refuse_what_is_anothers(problem):
    p = cuda(problem([64]))
    tensors = [p[name] for name in NAMES]
    o, _, saved = torch.ops.mxflash.attention_training(*tensors, p["cu_seqlens"], None, None, *settings_of_operators())
    rest = p["cu_seqlens"], None, None, None, None, None, 64, 2, 32, *settings_of_operators()
    with pytest.raises(ValueError, match=r"saved: \d+ bytes given, \d+ allowed \(those of the forward\)"):
        torch.ops.mxflash.attention_training_backward(p["do"], o, saved[:-256], *rest)
    with pytest.raises(ValueError, match="do: type F32 given, BF16 allowed"):
        torch.ops.mxflash.attention_training_backward(p["do"].float(), o, saved, *rest)
    given = p["cu_seqlens"], None, torch.tensor(0), *settings_of_operators()
    with pytest.raises(RuntimeError, match="mxflash::attention keeps nothing for a backward on cuda"):
        torch.ops.mxflash.attention_backward(p["do"], *tensors, *given)


# ---- The proof that nothing leaks, through torch ----


@on_device
@pytest.mark.parametrize(("causality", "reach"), [("exact", 0), ("block", 31)])
def test_the_audit_holds_on_the_device(causality, reach):
    tensors, _ = mxflash.load(CAPTURE, "torch")
    tensors = cuda({name: tensors[name] for name in (*NAMES, "cu_seqlens")})
    report = mxflash.audit(
        lambda q, k, v, offsets: attention(q, k, v, offsets, return_lse=True, causality=causality),
        *tensors.values(),
        backward=True,
        probes=24,
        reach=reach,
    )
    assert report.holds, str(report)
