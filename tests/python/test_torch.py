"""mxflash.torch.attention: the library's bits, autograd, torch.compile, checkpointing."""

import json

import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint

import mxflash
from conftest import CAPTURE
from mxflash.torch import attention
from support import assert_same_bits, assert_within

NAMES = ("q", "k", "v")
RECIPES = [name for name, recipe in mxflash.recipes().items() if recipe["purpose"] == "training"]


def leaves(p):
    return [p[name].detach().clone().requires_grad_() for name in NAMES]


def run(p, **settings):
    """(o, dq, dk, dv)."""
    q, k, v = leaves(p)
    o = attention(q, k, v, p["cu_seqlens"], **settings)
    return o, *torch.autograd.grad(o, (q, k, v), p["do"])


def native(p, **settings):
    o, lse = mxflash.attention(p["q"], p["k"], p["v"], p["cu_seqlens"], **settings)
    return o, *mxflash.attention_backward(p["do"], p["q"], p["k"], p["v"], o, lse, p["cu_seqlens"], **settings)


def assert_all_same(got, want):
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_capture_has_the_command_lines_bits(recipe, capture, command_line):
    folder = command_line("run", CAPTURE, "--recipe", recipe, "--out", "out.safetensors")
    want, _ = mxflash.load(folder / "out.safetensors", "torch")
    assert_all_same(run(capture, recipe=recipe, seed=0), [want[name] for name in ("o", "dq", "dk", "dv")])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types(dtype, problem):
    p = problem([33, 31], dtype=dtype)
    assert_all_same(run(p), native(p))


def softmax_loss(p, o_weight):
    """sum(o * o_weight) of causal attention per document, in float64, and the gradients of q, k, v."""
    q, k, v = (p[name].double().requires_grad_() for name in NAMES)
    group = q.shape[1] // k.shape[1]
    begins, ends = p["cu_seqlens"][:-1].tolist(), p["cu_seqlens"][1:].tolist()
    parts = []
    for begin, end in zip(begins, ends, strict=True):
        at = slice(begin, end)
        logits = torch.einsum("qhd,khd->hqk", q[at], k[at].repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[at].repeat_interleave(group, 1)))
    o = torch.cat(parts)
    return o, *torch.autograd.grad(o, (q, k, v), o_weight.double())


def test_bf16_gradients_are_those_of_float64(problem):
    p = problem([1, 33, 64], dtype=torch.float32)
    for name, got, want in zip(("o", "dq", "dk", "dv"), run(p, recipe="bf16"), softmax_loss(p, p["do"]), strict=True):
        # Both factors of every product are rounded to bfloat16, 2^-9 each; up to 64 of them, errors of random sign, so
        # 2^-8 of a few (4) times a typical element is beyond any row.
        assert_within(got, want, 4 * 2.0**-8 * want.abs().max().item(), name)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp4"])
def test_c13_fused_views_and_their_gradients(recipe, problem):
    p = problem([33, 31, 5])
    want = run(p, recipe=recipe, seed=0)
    qkv = torch.cat((p["q"], p["k"], p["v"]), 1).requires_grad_()
    o = attention(*qkv.split((4, 2, 2), 1), p["cu_seqlens"], recipe=recipe, seed=0)
    (gradient,) = torch.autograd.grad(o, qkv, p["do"])
    assert_all_same((o, *gradient.split((4, 2, 2), 1)), want)


def test_c13_an_expanded_gradient(problem):
    p = problem([33, 31])
    q, k, v = leaves(p)
    attention(q, k, v, p["cu_seqlens"]).sum().backward()  # Its dO is a 1 with strides of 0.
    want = native({**p, "do": torch.ones_like(p["do"])})
    assert_all_same((want[0], q.grad, k.grad, v.grad), want)


def test_c25_compiles_whole_and_once_for_all_lengths(problem):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, offsets: attention(q * 2, k, v, offsets).float().square(), fullgraph=True, dynamic=True
    )
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    counted = torch.compile(
        lambda q, k, v, offsets: attention(q * 2, k, v, offsets), fullgraph=True, dynamic=True, backend=counter
    )
    for lengths in ([64], [33, 31, 5], [2, 2, 2, 2, 90], [130, 1]):
        p = problem(lengths)
        q, k, v = leaves(p)
        want = attention(q * 2, k, v, p["cu_seqlens"]).float().square()
        want_gradients = torch.autograd.grad(want.sum(), (q, k, v))
        got = compiled(q, k, v, p["cu_seqlens"])
        assert_same_bits(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), want_gradients, strict=True):
            assert_same_bits(a, b)
        counted(q, k, v, p["cu_seqlens"])
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", ["fp4", "own"])
def test_c25_compiles_with_seeds_and_own_recipes(recipe, problem):
    torch._dynamo.reset()
    text = json.dumps({**mxflash.recipes()["mxfp8"], "name": "own"}) if recipe == "own" else recipe
    p = problem([33, 31])
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, p["cu_seqlens"], recipe=text), fullgraph=True)
    q, k, v = leaves(p)
    o = compiled(q, k, v)
    assert_same_bits(o, native(p, recipe=text)[0])
    assert torch.autograd.grad(o, q, p["do"])[0].isfinite().all()


def test_c25_fake_tensors_have_the_real_shapes_types_and_strides(problem):
    p = problem([33, 31])
    views = transposed = [p[name].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name in NAMES]
    real = attention(*views, p["cu_seqlens"], return_lse=True)
    real += torch.autograd.grad(real[0], transposed, p["do"])
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(view).requires_grad_() for view in transposed]
        fake = attention(*fakes, mode.from_tensor(p["cu_seqlens"]), return_lse=True)
        fake += torch.autograd.grad(fake[0], fakes, mode.from_tensor(p["do"]))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def opcheck_arguments(p, recipe):
    q, k, v = leaves(p)
    return (q, k, v, p["cu_seqlens"], None, torch.tensor(3), recipe, 2**31 - 1, 0, None, "auto", None, False)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp4"])
def test_c25_opcheck(recipe, problem):
    arguments = opcheck_arguments(problem([10, 54], dtype=torch.float32), recipe)
    results = library.opcheck(torch.ops.mxflash.attention, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_c27_checkpointing_gives_the_same_bits(recipe, reentrant, problem):
    p = problem([33, 31])

    def gradients(through):
        torch.manual_seed(5)  # Of the seed of stochastic rounding, which a checkpoint restores.
        q, k, v = leaves(p)
        through(lambda q, k, v: attention(q * 2, k, v, p["cu_seqlens"], recipe=recipe), q, k, v).backward(p["do"])
        return q.grad, k.grad, v.grad

    plain = gradients(lambda function, *inputs: function(*inputs))
    again = gradients(lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=reentrant))
    for a, b in zip(again, plain, strict=True):
        assert_same_bits(a, b)


def test_c27_second_derivatives_raise(problem):
    p = problem([33])
    q, k, v = leaves(p)
    o = attention(q, k, v, p["cu_seqlens"])
    with pytest.raises(RuntimeError, match="create_graph: True given, False allowed"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
    # The operator by itself, as a compiled backward has it: no derivative either.
    do = p["do"].clone().requires_grad_()
    dq, _, _ = torch.ops.mxflash.attention_backward(do, *opcheck_backward(p, q, k, v))
    with pytest.raises(RuntimeError, match=r"mxflash\.attention_backward"):
        dq.sum().backward()


def opcheck_backward(p, q, k, v):
    return q, k, v, p["cu_seqlens"], None, torch.tensor(0), "mxfp8", 2**31 - 1, 0, None, "auto", None, False


def test_stochastic_rounding_draws_from_torchs_generator(problem):
    p = problem([70])

    def dq(seed):
        torch.manual_seed(seed)
        return run(p, recipe="fp4")[1]

    assert_same_bits(dq(1), dq(1))
    assert not torch.equal(dq(1), dq(2))
    state = torch.get_rng_state()
    run(p, recipe="mxfp8")
    assert torch.equal(torch.get_rng_state(), state)  # A recipe that rounds to nearest draws nothing.


def test_autocast_takes_its_type(problem):
    p = problem([33, 31], dtype=torch.float32)
    q, k, v = leaves(p)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, v.to(torch.bfloat16), p["cu_seqlens"])
    assert o.dtype == torch.bfloat16
    dq, dk = torch.autograd.grad(o, (q, k), p["do"].to(torch.bfloat16))
    assert dq.dtype == dk.dtype == torch.float32
    want = native({name: t if name == "cu_seqlens" else t.to(torch.bfloat16) for name, t in p.items()})
    assert_same_bits(dq.to(torch.bfloat16), want[1])


def test_no_gradient_is_asked_of_what_needs_none(problem):
    p = problem([33])
    o, lse = attention(p["q"], p["k"], p["v"], p["cu_seqlens"], return_lse=True)
    assert not o.requires_grad
    assert lse.shape == (33, 4)
    q = p["q"].clone().requires_grad_()
    attention(q, p["k"], p["v"], p["cu_seqlens"]).backward(p["do"])
    assert_same_bits(q.grad, native(p)[1])


def test_windows_scale_and_own_offsets_of_keys(problem):
    p = problem([20, 44])
    offsets_q = torch.tensor([0, 7, 30], dtype=torch.int32)
    q = p["q"][:30].clone().requires_grad_()
    o = attention(q, p["k"], p["v"], offsets_q, p["cu_seqlens"], window=(5, None), scale=0.5)
    settings = {"cu_seqlens_k": p["cu_seqlens"], "window": (5, None), "scale": 0.5}
    want, _ = mxflash.attention(p["q"][:30], p["k"], p["v"], offsets_q, **settings)
    assert_same_bits(o, want)
    o.backward(p["do"][:30])
    rest = (p["q"][:30], p["k"], p["v"], None, None, offsets_q)
    assert_same_bits(q.grad, mxflash.attention_backward(p["do"][:30], *rest, **settings)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 64])}, "cu_seqlens: type int64 given"),
        ({"k": torch.zeros(64, 2, 32)}, "k: type F32 given"),
        ({"q": torch.zeros(64, 3, 32, dtype=torch.bfloat16)}, "q: 3 heads given"),
    ],
)
def test_bad_tensors_are_refused(change, message, problem):
    with pytest.raises(ValueError, match=message):
        run({**problem([64]), **change})


def test_default_devices_and_seeds_elsewhere(problem):
    p = problem([33, 31])
    want = run(p)
    with torch.device("meta"):
        got = attention(*(p[name] for name in NAMES), p["cu_seqlens"])
    assert_same_bits(got, want[0])
    with pytest.raises(ValueError, match="cu_seqlens_q: on meta given, cpu allowed"):
        attention(*(p[name] for name in NAMES), p["cu_seqlens"].to("meta"))
    for seed in (-1, 2**63, 1.5, torch.tensor(1.5), torch.tensor(1, device="meta")):
        with pytest.raises(ValueError, match="seed: "):
            attention(*(p[name] for name in NAMES), p["cu_seqlens"], seed=seed)
