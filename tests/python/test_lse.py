"""The gradient of a loss that uses lse, by autograd and by the package's own functions, against float64 in plain torch.

Tolerances. q, k, v and dO hold BF16 numbers here, so that the recipe bf16 rounds P and dS alone: u = 2^-8 of each at
most. A weight w is P over the sum of its row, both off by u, so 2 u; D is off by 2 u sum w |dP - D|, because weights
add up to 1 whatever their rounding; lse, a logarithm of that sum, by u. dS = scale w (dP - D + dlse) is off by all of
that and its own rounding. Those errors go through the same products as the gradients, with absolute values. A tenth on
top is for products of errors and for FP32's sums.
"""

import math

import numpy as np
import pytest
import torch
from torch import library

import mxflash
from mxflash.torch import attention
from support import assert_same_bits, assert_within

U = 2.0**-8
LENGTHS_Q, LENGTHS_K = (40, 1, 9, 6), (40, 1, 70, 0)
OFFSETS_Q, OFFSETS_K = ([0, 40, 41, 50, 56], [0, 40, 41, 111, 111])
TRAINING = [name for name, recipe in mxflash.recipes().items() if recipe["purpose"] == "training"]


def tensors(heads=4, kv_heads=2, dims=32, value_dims=16, seed=0):
    """q, k, v and dO as float32 that BF16 holds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(56, heads, dims), (111, kv_heads, dims), (111, kv_heads, value_dims), (56, heads, value_dims)]
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def offsets():
    return torch.tensor(OFFSETS_Q, dtype=torch.int32), torch.tensor(OFFSETS_K, dtype=torch.int32)


def visible():
    """[tokens_q, tokens_k]: causal, aligned at the end of each document."""
    seen = torch.zeros(OFFSETS_Q[-1], OFFSETS_K[-1], dtype=torch.bool)
    for q, k, queries, keys in zip(OFFSETS_Q, OFFSETS_K, LENGTHS_Q, LENGTHS_K, strict=False):
        seen[q : q + queries, k : k + keys] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen


def exact(q, k, v):
    """o and lse of float64 tensors, and the weights [heads, tokens_q, tokens_k]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    seen = visible()
    s = s.masked_fill(~seen, -1e30)
    # A row that sees no key has no lse to differentiate.
    lse = torch.where(seen.any(1), torch.logsumexp(s, 2), 0)
    w = torch.where(seen, torch.exp(s - lse[..., None]), 0)
    return torch.einsum("hqk,khd->qhd", w, v), lse.T, w


def finite(lse):
    """lse where a row sees a key; a product with zero would make NaN of -inf."""
    return lse[visible().any(1)]


def allowed_errors(q, k, v, do, dlse, dlse_error):
    """Of dq, dk and dv in float64; dlse_error: what dlse itself may be off."""
    group = q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[2])
    w = exact(q, k, v)[2]
    dp = torch.einsum("qhd,khd->hqk", do, v.repeat_interleave(group, 1))
    delta = (w * dp).sum(2, keepdim=True)
    mean = (w * (dp - delta).abs()).sum(2, keepdim=True)
    difference = (dp - delta + dlse.T[..., None]).abs()
    ds = 1.1 * scale * w * (3 * U * difference + 2 * U * mean + dlse_error)
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, 1).abs())
    dk = torch.einsum("hqk,qhd->khd", ds, q.abs())
    dv = torch.einsum("hqk,qhd->khd", 1.1 * 3 * U * w, do.abs())
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq + 1e-6, dk + 1e-6, dv + 1e-6


LOSSES = {
    "mean": lambda _o, lse: finite(lse).mean(),
    "both": lambda o, lse: o.sum() + finite(lse).square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_c27_loss_of_lse_against_float64(name):
    q, k, v, _ = tensors()
    loss = LOSSES[name]
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    loss(*attention(*own, *offsets(), recipe="bf16", return_lse=True)).backward()
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse, _ = exact(*wide)
    o.retain_grad(), lse.retain_grad()
    loss(o, lse).backward()
    do = torch.zeros_like(o) if o.grad is None else o.grad
    want = [torch.zeros_like(x) if x.grad is None else x.grad for x in wide]
    # d lse^2 = 2 lse, which is off by 2 u.
    errors = allowed_errors(*(x.detach() for x in wide), do, lse.grad, 2 * U if name == "both" else 0)
    for output, mine, its, allowed in zip(("dq", "dk", "dv"), own, want, errors, strict=True):
        assert_within(mine.grad, its, allowed, output)
    # The bounds can tell: dq without dlse is off by far more.
    assert errors[0].mean() < 0.1 * want[0].abs().mean()


def test_lse_alone_leaves_v_alone():
    own = [x.requires_grad_() for x in tensors()[:3]]
    finite(attention(*own, *offsets(), recipe="mxfp8", return_lse=True)[1]).sum().backward()
    assert own[0].grad.abs().sum() > 0 and own[1].grad.abs().sum() > 0
    assert torch.equal(own[2].grad, torch.zeros_like(own[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", TRAINING)
def test_autograd_gives_the_bits_of_attention_backward(recipe, dtype):
    q, k, v, do = (x.to(dtype) for x in tensors())
    dlse = torch.randn(q.shape[:2], generator=torch.Generator().manual_seed(5))
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = attention(*own, *offsets(), recipe=recipe, return_lse=True, seed=7)
    torch.autograd.backward((o, lse), (do, dlse))
    settings = {"recipe": recipe, "cu_seqlens": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "seed": 7}
    want = mxflash.attention_backward(do, q, k, v, dlse=dlse, **settings)
    none = mxflash.attention_backward(do, q, k, v, **settings)
    zero = mxflash.attention_backward(do, q, k, v, dlse=torch.zeros_like(dlse), **settings)
    for name, x, gradient, plain, of_zero in zip(("dq", "dk", "dv"), own, want, none, zero, strict=True):
        assert_same_bits(x.grad, gradient, name)
        assert_same_bits(of_zero, plain, name)
        assert torch.equal(gradient, plain) == (name == "dv"), name


def test_views_of_dlse():
    q, k, v, do = (x.numpy() for x in tensors())
    dlse = np.random.default_rng(3).standard_normal((56, 4)).astype(np.float32)
    settings = {"cu_seqlens": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}
    want = mxflash.attention_backward(do, q, k, v, dlse=dlse, **settings)
    wide = np.full((57, 9), np.nan, np.float32)
    wide[1:, 1::2] = dlse
    for view in (np.asfortranarray(dlse), wide[1:, 1::2], dlse[::-1].copy()[::-1]):
        got = mxflash.attention_backward(do, q, k, v, dlse=view, **settings)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    one = np.broadcast_to(np.float32(0.3), (56, 4))
    got = mxflash.attention_backward(do, q, k, v, dlse=one, **settings)
    want = mxflash.attention_backward(do, q, k, v, dlse=one.copy(), **settings)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_exact_attention_backward_takes_it():
    q, k, v, do = tensors()
    dlse = torch.randn(q.shape[:2], generator=torch.Generator().manual_seed(5))
    got = mxflash.exact_attention_backward(do, q, k, v, OFFSETS_Q, cu_seqlens_k=OFFSETS_K, dlse=dlse)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse, _ = exact(*wide)
    torch.autograd.backward((o, lse), (do.double(), dlse.double()))
    for name, mine, its in zip(("dq", "dk", "dv"), got, wide, strict=True):
        # Both in double: FP32's rounding of the result.
        assert_within(mine, its.grad, 2.0**-24 * its.grad.abs() + 1e-12, name)


def test_refusals():
    q, k, v, do = tensors()
    settings = {"cu_seqlens": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}
    for dlse, words in (
        (torch.zeros(56, 4, dtype=torch.float64), ("float64", "float32")),
        (torch.zeros(56, 4, dtype=torch.bfloat16), ("bfloat16", "float32")),
        (torch.zeros(56, 4, 1), ("[56, 4, 1]", "[tokens, heads]")),
        (torch.zeros(55, 4), ("[55, 4]", "[56, 4]")),
        (torch.zeros(56, 2), ("[56, 2]", "[56, 4]")),
        ("text", ("str", "array")),
    ):
        with pytest.raises(ValueError, match=r"^dlse: ") as caught:
            mxflash.attention_backward(do, q, k, v, dlse=dlse, **settings)
        assert all(word in str(caught.value) for word in words), caught.value


def test_c27_create_graph_raises():
    own = [x.requires_grad_() for x in tensors()[:3]]
    lse = finite(attention(*own, *offsets(), return_lse=True)[1])
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(lse.sum(), own, create_graph=True)


def test_keys_in_two_parts_merged_by_lse():
    """What context parallelism does: each part of the keys alone, merged by its lse.

    Weights, dO of a part and dS round by up to u each, evenly and independently, which is 0.6 u rms each over a tensor:
    1.4 u for the five of them; 2 u is allowed.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(70, 2, 32, generator=generator).bfloat16().float() for _ in range(4))
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [
        attention(own[0], own[1][part], own[2][part], recipe="bf16", causal=False, return_lse=True)
        for part in (slice(0, 30), slice(30, 70))
    ]
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    o = sum(torch.exp(lse - total)[..., None] * part for part, lse in parts)
    o.backward(do)
    want = mxflash.exact_attention_backward(do, q, k, v, causal=False)
    for name, mine, its in zip(("dq", "dk", "dv"), own, want, strict=True):
        error = (mine.grad - its).norm() / its.norm()
        assert error < 2 * U, f"{name}: {error:.3g}"


def test_c25_opcheck_of_the_backward():
    q, k, v, do = (x[:40, :2].clone() for x in tensors(dims=16))
    rest = (q, k, v, None, None, torch.tensor(0), "mxfp8", 2**31 - 1, 0, None, "auto", None, False)
    dlse = q.new_ones(40, 2)
    for arguments in ((do, *rest), (do, *rest, None), (None, *rest, dlse), (do, *rest, dlse)):
        results = library.opcheck(torch.ops.mxflash.attention_backward, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_c25_compiled_gradients_are_eager_ones():
    def gradients(function):
        own = [x.requires_grad_() for x in tensors()[:3]]
        function(*own, *offsets()).backward()
        return [x.grad for x in own]

    def loss(*arguments):
        return finite(attention(*arguments, recipe="mxfp8", return_lse=True)[1]).square().mean()

    compiled = gradients(torch.compile(loss, backend="aot_eager"))
    for name, got, want in zip(("dq", "dk", "dv"), compiled, gradients(loss), strict=True):
        # The same operator, its dlse from the same sums.
        assert_same_bits(got, want, name)
