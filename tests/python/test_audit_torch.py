"""mxflash.audit on torch: gradients by autograd, our recipes, and attention as others write it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mxflash import audit
from mxflash._attention import mask_of
from mxflash._audit.rounding import tolerances
from mxflash._audit.subject import Subject

torch = pytest.importorskip("torch")
attention = pytest.importorskip("mxflash.torch").attention
flex_attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "foreign_attention.py"
LENGTHS = (1, 33, 70, 17)


@pytest.fixture(scope="module")
def foreign():
    spec = importlib.util.spec_from_file_location("foreign_attention", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._flex = lambda: flex_attention  # Compiling it takes longer than all tests.
    return module


def inputs(dtype=torch.float32, heads=2, kv_heads=1, dims=32):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    tokens = int(offsets[-1])
    return *(torch.randn(tokens, n, dims, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)), offsets


def failing(report):
    return {check.name for check in report.checks if check.result == "fails"}


def spread(report):
    """(tensor, output, whose document) of every NaN and Inf that spread."""
    entries = report.check("NaN and Inf").figures["spread"]
    return {(entry["tensor"], entry["output"], entry["documents"]) for entry in entries}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp4"])
def test_exact_recipes_hold_forward_and_backward(recipe, dtype):
    causality = "exact" if recipe == "mxfp8" else None
    report = audit(
        # seed: fp4 rounds stochastically, from torch's generator where none is given.
        lambda q, k, v, cu: attention(q, k, v, cu, recipe=recipe, causality=causality, seed=1),
        *inputs(dtype),
        backward=True,
        probes=40,
    )
    assert report.holds, str(report)
    for name in ("later tokens, forward", "later tokens, backward", "other documents", "place in the pack"):
        assert report.check(name).result == "exact", report.check(name)
    assert set(report.check("accuracy").figures) == {"o", "dq", "dk", "dv"}


def test_block_causality_of_the_backward_is_seen_as_such():
    report = audit(lambda q, k, v, cu: attention(q, k, v, cu, recipe="mxfp8"), *inputs(), probes=60)
    assert failing(report) == {"later tokens, backward"}, str(report)
    check = report.check("later tokens, backward")
    assert check.figures["reach_tokens"] <= 31
    assert "inside a block of 32 counted from the document's start" in check.seen, check


def test_what_stays_in_reach_is_no_finding():
    def fn(q, k, v, cu):
        return attention(q, k, v, cu, recipe="mxfp8")

    seen = audit(fn, *inputs(), probes=60).check("later tokens, backward").figures["reach_tokens"]
    allowed = audit(fn, *inputs(), probes=60, reach=seen)
    assert allowed.holds, str(allowed)
    assert allowed.check("later tokens, backward").result == "in reach"
    assert failing(audit(fn, *inputs(), probes=60, reach=seen - 1)) == {"later tokens, backward"}


def test_stochastic_rounding_without_a_seed_is_not_deterministic():
    report = audit(lambda q, k, v, cu: attention(q, k, v, cu, recipe="fp4"), *inputs(), probes=10)
    assert "determinism" in failing(report), str(report)
    # Whatever else moved is no more than that noise; the forward has none.
    assert failing(report) == {"determinism"}, str(report)
    assert report.check("later tokens, forward").result == "exact"
    assert report.check("later tokens, backward").result == "noise"


# Of each implementation: the checks that must fail, and no others.
IN_A_BLOCK = {"later tokens, forward", "later tokens, backward", "other documents", "place in the pack", "NaN and Inf"}
VERDICTS = {
    "sdpa": {"NaN and Inf"},
    "sdpa_padded": {"NaN and Inf"},
    "flex": {"NaN and Inf"},
    "nested": set(),
    "naive_fp8": IN_A_BLOCK - {"place in the pack"},
    "mx_plain": IN_A_BLOCK,
    "sdpa_without_documents": {"other documents", "place in the pack", "NaN and Inf", "mask"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VERDICTS)
def test_foreign_attention_has_its_faults_and_no_others(foreign, name):
    report = audit(getattr(foreign, name), *inputs(), probes=120, name=name, **foreign.FOREIGN[name])
    assert failing(report) == VERDICTS[name], str(report)
    if name == "nested":
        assert report.problem["backward"] and report.check("later tokens, forward").result == "not checked"
    if name == "mx_plain":
        for direction in ("forward", "backward"):
            check = report.check(f"later tokens, {direction}")
            assert check.figures["reach_tokens"] <= 31, check
            assert "inside a block of 32 counted from the pack's start" in check.seen, check
    if name == "naive_fp8":
        assert report.check("later tokens, forward").figures["reach_tokens"] > 31
    if name == "sdpa":
        # A masked weight of 0 times NaN is NaN: o through V, dQ through K, dK through Q and dO, dV through dO.
        # Documents have calls of their own, so that nothing gets out of them.
        found = spread(report)
        assert ("v", "o", "own") in found and ("k", "dq", "own") in found and ("q", "dk", "own") in found
        assert not any(documents == "other" for _, _, documents in found), found
        assert ("q", "o", "own") not in found, found
    if name == "flex":
        # One product for the whole pack: its zeros meet the NaN of other documents too.
        assert spread(report) == {("v", "o", "own"), ("v", "o", "other")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_counted_through_the_pack_are_rounding(foreign, dtype):
    """A running softmax over tiles of 32 keys: weights meet another maximum at another place, and no more than that."""

    def tiled(q, k, v, cu_seqlens):
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        mask = foreign._same_document(cu_seqlens, q.shape[1])[1].tril()
        largest, total, o = torch.tensor(-1e30), torch.tensor(0.0), torch.tensor(0.0)
        for begin in range(0, q.shape[1], 32):
            tile = slice(begin, begin + 32)
            logits = q.float() @ k[:, tile].float().mT * q.shape[-1] ** -0.5
            logits = logits.masked_fill(~mask[:, tile], float("-inf"))
            now = torch.maximum(largest, logits.amax(-1, keepdim=True))
            weights, shrink = torch.exp(logits - now), torch.exp(largest - now)
            total = total * shrink + weights.sum(-1, keepdim=True)
            o = o * shrink + weights.to(q.dtype).float() @ v[:, tile].float()
            largest = now
        return (o / total).transpose(0, 1).to(q.dtype)

    q, k, v, offsets = inputs(dtype)
    report = audit(tiled, 4 * q, 4 * k, v, offsets, probes=10)
    # Weights below float16's normal numbers, and products of its outliers that overflow, are no leaks.
    assert failing(report) == {"NaN and Inf"}, str(report)
    assert report.check("place in the pack").result == "rounding", str(report)
    overflow = {entry[1] for entry in spread(report) if entry[0] == "outliers that overflow"}
    assert "dq" in overflow if dtype == torch.float16 else not overflow, spread(report)


def test_a_wrong_alignment_is_named(foreign):
    q, k, v, _ = inputs()
    cu_q = torch.tensor([0, 20, 50], dtype=torch.int32)
    cu_k = torch.tensor([0, 31, 121], dtype=torch.int32)
    report = audit(foreign.sdpa_top_left, q[:50], k, v, cu_q, cu_seqlens_k=cu_k, probes=10)
    assert report.check("mask").seen.startswith("aligned top-left"), str(report)


def test_a_leak_in_the_backward_alone(foreign):
    class Leaky(torch.autograd.Function):
        """The right o; the gradient of q is scaled by the largest of all of do."""

        @staticmethod
        def forward(ctx, q, k, v, cu_seqlens):
            ctx.save_for_backward(q, k, v, cu_seqlens)
            return foreign.sdpa(q, k, v, cu_seqlens)

        @staticmethod
        def backward(ctx, do):
            q, k, v, cu_seqlens = ctx.saved_tensors
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                gradients = torch.autograd.grad(foreign.sdpa(*leaves, cu_seqlens), leaves, do)
            scale = do.abs().max() / 448
            return (gradients[0] / scale).to(torch.float8_e4m3fn).float() * scale, *gradients[1:], None

    report = audit(Leaky.apply, *inputs(), probes=30)
    assert report.check("later tokens, forward").result == "exact"
    assert {"later tokens, backward", "other documents"} <= failing(report), str(report)


def test_gradients_demanded_of_what_has_none():
    with pytest.raises(ValueError, match="backward: True given, but o of fn has no grad_fn"):
        audit(lambda q, *_: q.detach().clone(), *inputs(), backward=True)
    report = audit(lambda q, k, v, cu: attention(q, k, v, cu).detach(), *inputs(), probes=10)
    assert not report.problem["backward"] and report.holds, str(report)


def test_backward_left_out_makes_no_graph(foreign):
    def watch(q, k, v, cu_seqlens):
        assert not q.requires_grad and not torch.is_grad_enabled()
        return foreign.naive_fp8(q, k, v, cu_seqlens)

    report = audit(watch, *inputs(), probes=10, backward=False)
    assert report.check("later tokens, backward").result == "not checked"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_tolerance_bounds_the_rounding_of_torch(foreign, dtype):
    """The tolerance is for two results, so that one is off by half of it at most. As a bound with all signs at their
    worst it is far above what happens; a hundred times more would hide leaks."""
    subject = Subject(
        foreign.sdpa, *inputs(dtype)[:3], None, inputs(dtype)[3], None, mask_of(True, None), None, True, 0
    )
    results, exact = subject.run(subject.inputs), subject.exact()
    bounds = tolerances(subject.inputs, exact, subject.layout, subject.scale, subject.roundoff, subject.tiny)
    for name in ("o", "dq", "dk", "dv"):
        share = abs(results[name] - exact[name]) / (bounds[name] / 2)
        worst = np.unravel_index(share.argmax(), share.shape)
        assert share.max() <= 1, (name, worst, share.max())
        assert share.max() >= 1 / 256, (name, worst, share.max())
