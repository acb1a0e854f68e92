"""mxflash.attention and its gradients on arrays of numpy and torch: the command line's bits, any strides."""

import json
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy
import pytest
import torch

import mxflash
from conftest import CAPTURE
from support import as_torch, assert_same_bits, assert_within

RECIPES = [name for name, recipe in mxflash.recipes().items() if recipe["purpose"] == "training"]
NUMPY_TYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: numpy.float16, torch.float32: numpy.float32}


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def gradients(p, **more):
    return mxflash.attention_backward(p["do"], p["q"], p["k"], p["v"], None, None, p["cu_seqlens"], **more)


def forward(p, **more):
    return mxflash.attention(p["q"], p["k"], p["v"], p["cu_seqlens"], **more)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_capture_has_the_command_lines_bits(recipe, capture, command_line):
    folder = command_line("run", CAPTURE, "--recipe", recipe, "--out", "out.safetensors")
    want, _ = mxflash.load(folder / "out.safetensors", "torch")
    o, lse = forward(capture, recipe=recipe)
    for name, got in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients(capture, recipe=recipe)), strict=True):
        assert_same_bits(got, want[name], f"{recipe} {name}")


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_numpy_has_the_bits_of_torch(dtype, problem):
    p = problem([1, 33, 0, 64], dtype=dtype)
    n = {name: to_numpy(tensor) for name, tensor in p.items()}
    got = (*forward(n), *gradients(n))
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, (*forward(p), *gradients(p)), strict=True):
        assert isinstance(a, numpy.ndarray)
        assert a.dtype == (numpy.float32 if name == "lse" else NUMPY_TYPES[dtype])
        assert a.flags.writeable
        assert a.flags.c_contiguous
        assert_same_bits(a, b, name)


def test_results_outlive_their_inputs_and_each_other(problem):
    o, lse = forward(problem([40]))
    kept = o.clone()
    del lse
    for _ in range(8):
        forward(problem([40], seed=3))
    assert_same_bits(o, kept)


def fused(p):
    """k and v as slices of one [tokens, 2, heads, dim]."""
    kv = torch.stack((p["k"], p["v"]), 1)
    return {**p, "k": kv[:, 0], "v": kv[:, 1]}


def one_off(p):
    """Every tensor begins one element into its memory."""

    def shift(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        out = memory[1:].view(tensor.shape)
        return out.copy_(tensor)

    return {name: tensor if name == "cu_seqlens" else shift(tensor) for name, tensor in p.items()}


def transposed(p):
    """Heads before tokens in memory."""
    return {
        name: tensor if name == "cu_seqlens" else tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for name, tensor in p.items()
    }


def last_stride_two(p):
    def spread(tensor):
        return torch.stack((tensor, tensor), -1)[..., 0]

    return {name: tensor if name == "cu_seqlens" else spread(tensor) for name, tensor in p.items()}


def backwards(p):
    """numpy arrays whose tokens lie in falling order."""
    return {name: to_numpy(t) if name == "cu_seqlens" else to_numpy(t)[::-1].copy()[::-1] for name, t in p.items()}


def read_only(p):
    out = {name: to_numpy(tensor) for name, tensor in p.items()}
    for array in out.values():
        array.flags.writeable = False
    return out


@pytest.mark.parametrize("view", [fused, one_off, transposed, last_stride_two, backwards, read_only])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_c13_views_give_what_contiguous_tensors_give(view, recipe, problem):
    p = problem([33, 31, 1, 63])
    viewed = view(p)
    for got, want in zip(forward(viewed, recipe=recipe), forward(p, recipe=recipe), strict=True):
        assert_same_bits(got, want, view.__name__)
    for got, want in zip(gradients(viewed, recipe=recipe), gradients(p, recipe=recipe), strict=True):
        assert_same_bits(got, want, view.__name__)


def test_c13_an_expanded_do(problem):
    p = problem([33, 31])
    expanded = {**p, "do": torch.ones(1, 1, 1, dtype=torch.bfloat16).expand_as(p["do"])}
    whole = {**p, "do": torch.ones_like(p["do"])}
    for got, want in zip(gradients(expanded), gradients(whole), strict=True):
        assert_same_bits(got, want)


def test_a_view_with_the_negative_bit_keeps_its_sign(problem):
    p = problem([33, 31], dtype=torch.float32)
    negative = torch.complex(torch.zeros_like(p["v"]), -p["v"]).conj().imag
    assert negative.is_neg()
    for got, want in zip(forward({**p, "v": negative}), forward(p), strict=True):
        assert_same_bits(got, want)


def test_arrays_of_classes_made_from_numpys_and_torchs(problem):
    class Array(numpy.ndarray):
        pass

    class Tensor(torch.Tensor):
        pass

    p = problem([33, 31])
    want = forward(p)
    arrays = {name: to_numpy(tensor).view(Array) for name, tensor in p.items()}
    tensors = {name: tensor.as_subclass(Tensor) for name, tensor in p.items()}
    for theirs in (arrays, tensors):
        for got, right in zip(forward(theirs), want, strict=True):
            assert_same_bits(got, right)


def test_offsets_as_a_list(problem):
    p = problem([5, 60])
    for got, want in zip(forward({**p, "cu_seqlens": [0, 5, 65]}), forward(p), strict=True):
        assert_same_bits(got, want)


def test_no_offsets_are_one_document(problem):
    p = problem([65])
    for got, want in zip(forward({**p, "cu_seqlens": None}), forward(p), strict=True):
        assert_same_bits(got, want)


def test_keys_with_offsets_of_their_own_are_aligned_at_the_end(problem):
    p = problem([5])
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    o, lse = mxflash.attention(p["q"][:2], p["k"], p["v"], offsets, recipe="bf16", cu_seqlens_k=p["cu_seqlens"])
    whole, whole_lse = forward(p, recipe="bf16")
    # Queries 0 and 1 of the two see what 3 and 4 of the five see; only the values of q differ.
    again, again_lse = mxflash.attention(
        torch.cat((p["q"][:3], p["q"][:2])), p["k"], p["v"], p["cu_seqlens"], recipe="bf16"
    )
    assert_same_bits(o, again[3:])
    assert_same_bits(lse, again_lse[3:])
    assert not torch.equal(whole[3:], again[3:])
    assert not torch.equal(whole_lse[3:], again_lse[3:])


def softmax_attention(p, mask, scale):
    """(o, lse) in float64, one document."""
    q, k, v = (p[name].double() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)), lse.T


@pytest.mark.parametrize(
    ("causal", "window", "sees"),
    [
        (True, None, lambda q, k: k <= q),
        (False, None, lambda q, k: (q >= 0) & (k >= 0)),
        (True, (3, None), lambda q, k: (k <= q) & (k >= q - 3)),
        (False, (3, 2), lambda q, k: (k <= q + 2) & (k >= q - 3)),
        (True, (None, 5), lambda q, k: k <= q),
        (False, (None, -2), lambda q, k: k <= q - 2),
        (False, (0, 0), lambda q, k: k == q),
        (False, (7, -8), lambda q, k: (q < 0) & (k < 0)),
    ],
)
def test_masks_and_scale_against_float64(causal, window, sees, problem):
    p = problem([70])
    at = torch.arange(70)
    want, want_lse = softmax_attention(p, sees(at[:, None], at[None, :]), 0.25)
    o, lse = mxflash.exact_attention(p["q"], p["k"], p["v"], None, causal, window, 0.25)
    # Rounded to float32 once.
    assert_within(o, want, 2.0**-22 * want.abs().max().item(), "exact o")
    seen = want_lse.isfinite()
    assert torch.equal(lse == -torch.inf, ~seen)
    assert_within(
        lse[seen], want_lse[seen], 2.0**-22 * want_lse[seen].abs().max().item() if seen.any() else 0.0, "exact lse"
    )
    o, lse = mxflash.attention(p["q"], p["k"], p["v"], None, "bf16", causal, window, 0.25)
    # P and O in bfloat16: two roundings of 2^-9, against the largest |V|.
    assert_within(o, want, 2.0**-8 * p["v"].abs().max().item(), "bf16 o")
    assert torch.equal(lse == -torch.inf, ~seen)


def test_exact_gradients_are_autograds(problem):
    p = problem([40], dtype=torch.float32)
    leaves = {name: p[name].double().requires_grad_() for name in "qkv"}
    at = torch.arange(40)
    o, _ = softmax_attention(leaves, at[None, :] <= at[:, None], 32**-0.5)
    want = torch.autograd.grad(o, list(leaves.values()), p["do"].double())
    got = mxflash.exact_attention_backward(p["do"], p["q"], p["k"], p["v"], p["cu_seqlens"])
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_within(a, b, 2.0**-20 * b.abs().max().item(), name)  # Rounded to float32 once.


def test_every_engine_can_be_forced_and_says_why_not(problem):
    p = problem([40])
    want, _ = forward(p, engine="reference")
    seen = set()
    for engine in mxflash.engines():
        seen.add(engine["name"])
        assert {"runs", "reason", "backward"} == set(engine["recipes"]["mxfp8"])
        if not engine["available"]:
            with pytest.raises(RuntimeError, match=engine["name"]):
                forward(p, engine=engine["name"])
            continue
        got, _ = forward(p, engine=engine["name"])
        # A code of P on the other side of a tie is 2^-4 of its weight, O's rounding 2^-9.
        assert_within(got, want, 2.0**-4 * p["v"].abs().max().item(), engine["name"])
    assert {"cuda", "reference", "cpu:scalar"} <= seen


def test_recipes_of_ones_own(problem, tmp_path):
    p = problem([40, 9])
    recipe = mxflash.recipes()["mxfp8"]
    recipe["name"] = "mine"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    want = forward(p, recipe="mxfp8")
    for given in (recipe, json.dumps(recipe), path, str(path)):
        for got, right in zip(forward(p, recipe=given), want, strict=True):
            assert_same_bits(got, right, str(given))
    assert mxflash.recipe(path) == recipe
    written = path.stat()
    path.write_text(json.dumps(mxflash.recipes()["nvfp4"]), encoding="utf-8")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # Nothing goes by its time.
    assert mxflash.recipe(path)["name"] == "nvfp4"


def test_causality_of_the_backward_is_chosen(problem):
    p = problem([70])
    changed = {**p, "do": p["do"].clone(), "v": p["v"].clone()}
    changed["do"][69] *= 64
    exact, moved = (gradients(x, causality="exact")[0][:64] for x in (p, changed))
    assert_same_bits(moved, exact, "dq of earlier queries")


def test_stochastic_rounding_follows_its_seed(problem):
    p = problem([70])
    first, again, other = (gradients(p, recipe="fp4", seed=seed)[0] for seed in (1, 1, 2))
    assert_same_bits(first, again)
    assert not torch.equal(first, other)


REFUSALS = [
    ({"cu_seqlens": torch.tensor([0, 64])}, "cu_seqlens: type int64 given, int32 allowed"),
    ({"cu_seqlens": torch.tensor([1, 64], dtype=torch.int32)}, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0, 63], dtype=torch.int32)}, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0, 40, 20, 64], dtype=torch.int32)}, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([[0, 64]], dtype=torch.int32)}, r"cu_seqlens: shape \[1, 2\] given, one dimension"),
    ({"cu_seqlens": torch.tensor([0, 9, 64, 9], dtype=torch.int32)[::2]}, "cu_seqlens: stride 2 given"),
    ({"cu_seqlens": [0, 2**40]}, "cu_seqlens: .*int32"),
    ({"cu_seqlens": [0, "a"]}, "cu_seqlens: "),
    ({"cu_seqlens": 64}, "cu_seqlens: a int given"),
    ({"q": torch.zeros(64, 4, 32, dtype=torch.float64)}, "q: type float64 given"),
    ({"k": torch.zeros(64, 2, 32)}, "k: type F32 given, BF16 allowed"),
    ({"q": torch.zeros(64, 128, dtype=torch.bfloat16)}, r"q: shape \[64, 128\] given, three dimensions"),
    ({"q": torch.zeros(64, 3, 32, dtype=torch.bfloat16)}, "q: 3 heads given with 2 heads of k"),
    ({"v": torch.zeros(64, 2, 36, dtype=torch.bfloat16)}, "value_dim: 36 given"),
    ({"q": [[1.0]]}, "q: a list given"),
    ({"q": numpy.zeros((64, 4, 32), ">f4")}, "q: a ndarray of >f4 given"),
    ({"q": numpy.ma.zeros((64, 4, 32), numpy.float32)}, "q: a masked array given"),
    ({"q": torch.zeros(64, 4, 32).to_sparse()}, "q: a Tensor of torch.float32 given"),
    ({"q": torch.zeros(64, 4, 32, device="meta")}, "q: a tensor on meta given"),
    ({"k": torch.zeros(64, 2, 32, dtype=torch.uint16)}, "k: type uint16 given"),
    ({"v": numpy.zeros((64, 2, 32), numpy.uint16)}, "v: type uint16 given"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_c12_bad_arrays_are_refused(change, message, problem):
    with pytest.raises(ValueError, match=message):
        forward({**problem([64]), **change})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "none-such"}, "recipe is .*allowed: bf16, mxfp8"),
        ({"recipe": {"name": "half"}}, "recipe: "),
        ({"recipe": 3}, "recipe: a int given"),
        ({"engine": "none-such"}, "engine: none-such given"),
        ({"engine": 3}, "engine: 3 given"),
        ({"threads": -1}, "threads: -1 given"),
        ({"threads": "two"}, "threads: 'two' given"),
        ({"seed": -1}, "seed: -1 given"),
        ({"scale": float("nan")}, "scale: nan given"),
        ({"scale": "big"}, "scale: 'big' given"),
        ({"window": 3}, "window: 3 given"),
        ({"window": (1, 2, 3)}, "window: "),
        ({"window": (1.5, None)}, "window: "),
        ({"window": (2**40, None)}, "window: 1099511627776 given"),
        ({"causality": "none"}, "none"),
        ({"cu_seqlens_k": [0, 3]}, "cu_seqlens_k"),
    ],
)
def test_bad_settings_are_refused(settings, message, problem):
    with pytest.raises(ValueError, match=message):
        forward(problem([64]), **settings)


def test_gradients_of_an_inference_recipe_are_refused(problem):
    with pytest.raises(ValueError, match="mxattention"):
        gradients(problem([64], head_dim=64), recipe="mxattention")


def test_results_of_the_forward_are_checked_by_shape(problem):
    p = problem([64])
    o, lse = forward(p)
    mxflash.attention_backward(p["do"], p["q"], p["k"], p["v"], o, lse, p["cu_seqlens"])
    with pytest.raises(ValueError, match="o: a list given"):
        mxflash.attention_backward(p["do"], p["q"], p["k"], p["v"], [0, 64])
    with pytest.raises(ValueError, match="lse: shape"):
        mxflash.attention_backward(p["do"], p["q"], p["k"], p["v"], o, lse[:3], p["cu_seqlens"])


def test_other_threads_go_on_during_a_call(problem):
    p = problem([4096], heads=8)
    worker = threading.Thread(target=forward, args=(p,), kwargs={"threads": 1, "engine": "reference"})
    worker.start()
    turns = 0
    while worker.is_alive():
        worker.join(0.01)
        turns += 1
    assert turns > 5  # The call takes a second or more; with Python's lock held there would be one turn.


def test_c29_imports_without_torch_numpy_or_a_gpu_and_leaks_nothing():
    program = """
import sys, array
sys.modules["torch"] = sys.modules["numpy"] = None
import mxflash
assert [e["available"] for e in mxflash.engines() if e["name"] == "reference"] == [True]
q = memoryview(array.array("f", range(32))).cast("B").cast("f", (1, 1, 32))
try:
    mxflash.attention(q, q, q)
except ValueError as error:
    assert "array (numpy, torch, cupy, jax) allowed" in str(error), error
else:
    raise AssertionError
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_nothing_leaks_at_exit():
    program = """
import numpy, mxflash
q = numpy.random.default_rng(0).standard_normal((64, 2, 32)).astype(numpy.float32)
o, lse = mxflash.attention(q, q, q)
mxflash.attention_backward(q, q, q, q)
mxflash.quantize(q)
for bad in ({"recipe": "none-such"}, {"scale": "big"}):
    try:
        mxflash.attention(q, q, q, **bad)
    except ValueError:
        pass
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")  # nanobind reports leaks here.


def test_c29_an_array_on_another_device_is_one_clear_line(problem):
    import ctypes

    p = problem([64])
    array = p["q"].numpy() if p["q"].dtype != torch.bfloat16 else p["q"].float().numpy()

    class OnCuda:
        def __dlpack__(self, **_):
            capsule = array.__dlpack__()
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            # DLTensor: void* data, int32 device_type, ...
            ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = 2
            return capsule

        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(RuntimeError, match=r"^k: an array on a CUDA device given, the host's memory allowed"):
        mxflash.attention(array, OnCuda(), array)


@pytest.mark.parametrize("framework", ["jax", "cupy"])
def test_other_frameworks(framework, problem):
    module = pytest.importorskip(f"{framework}.numpy" if framework == "jax" else framework)
    p = {name: tensor.numpy() for name, tensor in problem([33, 31], dtype=torch.float32).items()}
    theirs = {name: module.asarray(array) for name, array in p.items()}
    for got, want in zip((*forward(theirs), *gradients(theirs)), (*forward(p), *gradients(p)), strict=True):
        assert type(got) is type(theirs["q"])
        assert_same_bits(as_torch(numpy.asarray(got)), want)
