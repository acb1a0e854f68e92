"""mxflash.audit on attentions that are right, and on those that are wrong in one known way."""

import json

import ml_dtypes
import numpy as np
import pytest

import attentions
import mxflash

LENGTHS = (1, 19, 70, 2, 23)
UNEQUAL = ((7, 12), (5, 5), (9, 30), (1, 4))
CHECKS = (
    "finite",
    "later tokens, forward",
    "later tokens, backward",
    "other documents",
    "place in the pack",
    "determinism",
    "NaN and Inf",
    "row sum",
    "mask",
    "accuracy",
)


def offsets(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def arrays(tokens, tokens_k=None, heads=2, kv_heads=1, dims=16, dtype=np.float32):
    random = np.random.default_rng(3)
    tokens_k = tokens if tokens_k is None else tokens_k
    shapes = ((tokens, heads), (tokens_k, kv_heads), (tokens_k, kv_heads))
    return [random.standard_normal((*shape, dims)).astype(dtype) for shape in shapes]


def packed(fn, dtype=np.float32, **options):
    """The audit of fn on a pack of five documents."""
    return mxflash.audit(fn, *arrays(sum(LENGTHS), dtype=dtype), offsets(LENGTHS), probes=20, **options)


def unequal(fn, **options):
    """The same with other numbers of queries than of keys."""
    queries, keys = zip(*UNEQUAL, strict=True)
    tensors = arrays(sum(queries), sum(keys))
    return mxflash.audit(fn, *tensors, offsets(queries), cu_seqlens_k=offsets(keys), probes=20, **options)


def failing(report):
    return {check.name for check in report.checks if check.result == "fails"}


def test_right_attention_has_no_finding():
    report = packed(attentions.attention)
    assert report.holds, report.findings
    assert tuple(check.name for check in report.checks) == CHECKS
    for name in ("later tokens, forward", "other documents", "place in the pack"):
        assert report.check(name).result == "exact", report.check(name)
    assert report.check("later tokens, backward").result == "not checked"
    # Both are float64: what is left is that the exact one is rounded to float32.
    assert report.check("accuracy").figures["o"]["relative_l2"] < 2**-24


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_right_attention_in_16_bits(dtype):
    def rounded(q, k, v, cu_seqlens):
        assert q.dtype == k.dtype == v.dtype == dtype
        o, lse = attentions.attention(q, k, v, cu_seqlens)
        return o.astype(dtype), lse

    report = packed(rounded, dtype)
    assert report.holds, report.findings


def test_c5_c7_right_with_unequal_lengths_and_empty_documents():
    report = unequal(attentions.attention)
    assert report.holds, report.findings
    tensors = arrays(9, 12)
    cu_q, cu_k = offsets((4, 5, 0)), offsets((2, 0, 10))
    report = mxflash.audit(attentions.attention, *tensors, cu_q, cu_seqlens_k=cu_k, probes=10)
    assert report.holds, report.findings


def test_one_document_of_one_token():
    report = mxflash.audit(attentions.attention, *arrays(1), probes=1)
    assert report.holds, report.findings
    assert report.check("later tokens, forward").result == "not checked"
    assert report.check("place in the pack").result == "not checked"


def test_documents_of_one_token_and_no_tokens_at_all():
    report = mxflash.audit(attentions.attention, *arrays(6), offsets([1] * 6), probes=3)
    assert report.holds, report.findings
    report = mxflash.audit(attentions.without_documents, *arrays(6), offsets([1] * 6), probes=3)
    assert failing(report) == {"other documents", "place in the pack", "NaN and Inf", "mask"}, str(report)
    report = mxflash.audit(attentions.attention, *arrays(0), probes=3)
    assert report.holds, report.findings
    assert report.check("mask").result == "not checked"


def test_windows_and_full():
    assert packed(attentions.window_of(5), window=(5, 0)).holds
    assert packed(attentions.full, causal=False).holds
    report = packed(attentions.attention, window=(5, 0))
    assert "left bound is ignored" in report.check("mask").seen
    report = packed(attentions.window_of(4), window=(5, 0))
    assert "a key too few on the left" in report.check("mask").seen


# What is wrong, the checks that must fail (and no others), and what the mask check calls it.
WRONG = {
    "one_too_many": ({"later tokens, forward", "NaN and Inf", "mask"}, "one key too many"),
    "full": ({"later tokens, forward", "NaN and Inf", "mask"}, "not causal"),
    "reversed_order": ({"later tokens, forward", "NaN and Inf", "mask"}, "reversed"),
    "strict": ({"finite", "row sum", "mask"}, "the diagonal is missing"),
    "skips_fifth_key": ({"mask"}, "that the mask allows have no weight (the first: document 1, query 5, key 0)"),
    "without_documents": ({"other documents", "place in the pack", "NaN and Inf", "mask"}, "no document mask"),
    "shrunk": ({"row sum"}, "as asked for"),
    "masked": ({"NaN and Inf"}, "as asked for"),
    "depends_on_place": ({"place in the pack"}, "as asked for"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_found_by_its_check_and_no_other(name):
    report = packed(getattr(attentions, name))
    expected, words = WRONG[name]
    assert failing(report) == expected, str(report)
    assert words in report.check("mask").seen, report.check("mask")
    assert len(report.findings) == len(expected)


def test_documents_of_one_parity_that_share_a_scale():
    """Two buffers in turn, each with one scale: neighbours never meet."""

    def shared(q, k, v, cu_seqlens):
        v = v.copy()
        document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
        for parity in (0, 1):
            own = v[document % 2 == parity]
            step = np.abs(own).max(initial=1e-30) / 8
            v[document % 2 == parity] = np.round(own / step) * step
        return attentions.full(q, k, v, cu_seqlens)

    report = packed(shared, causal=False)
    assert "other documents" in failing(report), str(report)


def test_top_left_alignment_is_named():
    report = unequal(attentions.top_left)
    assert "aligned top-left" in report.check("mask").seen
    assert "mask" in failing(report)
    # Top-left sees fewer keys than allowed: nothing leaks.
    assert "later tokens, forward" not in failing(report)


def test_rows_without_keys_must_be_finite():
    tensors = arrays(9, 6)
    report = mxflash.audit(attentions.empty_is_nan, *tensors, offsets((5, 4)), cu_seqlens_k=offsets((2, 4)), probes=10)
    assert failing(report) == {"finite"}, str(report)
    assert (
        "6 rows of o are NaN or Inf (the first: document 0, head 0, query 0, which sees no key)" in report.findings[0]
    )


def test_noise_of_summation_order_is_rounding_and_no_finding():
    report = packed(attentions.other_order)
    assert report.holds, report.findings
    assert report.check("place in the pack").result == "rounding"
    assert report.check("later tokens, forward").result == "exact"


def test_nondeterminism_is_found_and_not_taken_for_a_leak():
    report = packed(attentions.noisy(0.01))
    assert failing(report) == {"determinism", "row sum"}, str(report)
    assert "beyond what rounding explains" in report.check("determinism").seen
    assert any("that noise" in note for note in report.notes)
    # 2^-30 of o is far below what float32 sums may differ by: still other bits, but no more than rounding.
    report = packed(attentions.noisy(2.0**-30))
    assert failing(report) == {"determinism"}, str(report)
    assert "within rounding" in report.check("determinism").seen
    assert report.check("place in the pack").result == "rounding"


def test_lists_and_strided_inputs():
    q, k, v = arrays(sum(LENGTHS))
    fused = np.stack([k, v], axis=1)
    assert not fused[:, 0].flags.c_contiguous
    call = {"cu_seqlens": offsets(LENGTHS).tolist(), "probes": 5}
    report = mxflash.audit(attentions.attention, q[:, ::-1], fused[:, 0], fused[:, 1], **call)
    assert report.holds, report.findings


def test_gradients_of_a_function_of_their_own():
    def backward(do, q, k, v, cu_seqlens):
        return mxflash.exact_attention_backward(do, q, k, v, cu_seqlens)

    def backward_without_mask(do, q, k, v, cu_seqlens):
        return mxflash.exact_attention_backward(do, q, k, v, cu_seqlens, causal=False)

    report = packed(attentions.attention, backward=backward)
    # Exact attention, too, multiplies masked weights of 0: nothing but NaN may be said of it.
    assert failing(report) <= {"NaN and Inf"}, str(report)
    assert report.check("later tokens, backward").result == "exact"
    report = packed(attentions.attention, backward=backward_without_mask)
    assert "later tokens, backward" in failing(report)
    assert report.check("later tokens, forward").result == "exact"


RECIPES = ("bf16", "mxfp8", "mxfp8-tokenblock", "nvfp4", "mxfp4-diagonal", "fp8-tensor", "mxfp8-1x32", "naive-fp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_keep_their_claims_and_the_command_lines_audit_agrees(recipe, command_line, tmp_path):
    tensors = arrays(sum(LENGTHS), dims=32)

    def attend(q, k, v, cu_seqlens):
        return mxflash.attention(q, k, v, cu_seqlens, recipe=recipe, threads=1)

    report = mxflash.audit(attend, *tensors, offsets(LENGTHS), probes=50)
    claim = mxflash.recipe(recipe)["claims"]["forward"]
    later = report.check("later tokens, forward")
    assert (later.result == "exact") == (claim == "exact"), later
    assert report.check("other documents").result == ("fails" if recipe == "fp8-tensor" else "exact")
    assert report.check("mask").result == report.check("finite").result == "holds"
    assert report.check("NaN and Inf").result == "holds", report.check("NaN and Inf")
    if claim == "exact":
        assert report.holds, report.findings
    if claim == "block":
        assert later.figures["reach_tokens"] <= 31, later
        assert "inside a block of" in later.seen
    if recipe == "naive-fp4":
        assert report.check("row sum").result == "fails"

    q, k, v = tensors
    mxflash.save(tmp_path / "in.safetensors", {"q": q, "k": k, "v": v, "cu_seqlens": offsets(LENGTHS)})
    # Exit code 1 is a recipe that breaks its own claim: none does.
    folder = command_line(
        "audit", tmp_path / "in.safetensors", "--recipe", recipe, "--probes", "250", "--json", "a.json"
    )
    compiled = json.loads((folder / "a.json").read_text(encoding="utf-8"))["recipes"][0]
    assert (compiled["forward"]["leaks"] > 0) == (later.result != "exact"), compiled["forward"]["worst"]
    assert (compiled["documents"]["leaks"] > 0) == (report.check("other documents").result != "exact")


def test_what_fn_raises_goes_through():
    class OddError(Exception):
        pass

    def broken(*_):
        raise OddError("mine")

    with pytest.raises(OddError, match="mine"):
        packed(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fn": 3}, "fn: 3 given, a function of"),
        ({"fn": lambda q, *_: q[:-1]}, r"o: fn returned shape \[114, 2, 16\], \[115, 2, 16\] allowed"),
        ({"fn": lambda q, *_: (q, q[0])}, r"lse: fn returned shape \[2, 16\], \[115, 2\] allowed"),
        ({"fn": lambda q, *_: (q, q, q)}, r"fn: a tuple of 3 returned, o or \(o, lse\) allowed"),
        ({"fn": lambda *_: None}, "o: fn returned a NoneType, an array allowed"),
        ({"probes": 0}, "probes: 0 given, an integer from 1 allowed"),
        ({"k": arrays(115, dtype=np.float16)[1]}, r"k: type float16 given, float32 allowed \(q's\)"),
        ({"v": arrays(114)[2]}, "v: "),
        ({"q": arrays(115, dtype=np.float64)[0]}, "q: type float64 given, bfloat16, float16, float32 allowed"),
        ({"cu_seqlens": offsets(LENGTHS).astype(np.int64)}, "cu_seqlens: type int64 given, int32 allowed"),
        ({"backward": True}, "backward: True given, None, False or a function"),
        ({"backward": 7}, "backward: 7 given, None, True, False or a function allowed"),
        ({"do": np.zeros((115, 2, 8), np.float32)}, r"do: shape \[115, 2, 8\] given, \[115, 2, 16\] allowed"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens"),
        ({"progress": 1}, "progress: 1 given"),
        ({"q": np.full((115, 2, 16), np.nan, np.float32)}, "q: NaN or Inf given, finite values allowed"),
    ],
)
def test_what_the_arguments_have_wrong(change, message):
    call = dict(zip("qkv", arrays(115), strict=True)) | {"fn": attentions.attention, "cu_seqlens": offsets(LENGTHS)}
    with pytest.raises(ValueError, match=message):
        mxflash.audit(**(call | change))


def test_the_report_is_a_table_and_json():
    done = []
    report = packed(attentions.full, name="theirs", progress=done.append)
    assert done[-1] == 1 and done == sorted(done)
    assert str(report).startswith(
        "audit of theirs: does not hold\n5 documents, 115 queries and 115 keys, 2 heads on 1,"
    )
    assert max(len(line) for line in str(report).splitlines()) <= 130
    read = json.loads(report.to_json())
    assert read["holds"] is False and read["name"] == "theirs" and len(read["checks"]) == len(CHECKS)
    worst = next(check for check in read["checks"] if check["name"] == "later tokens, forward")["figures"]["worst"]
    assert worst["position"] < worst["perturbed"]
    assert json.loads(report.to_json()) == json.loads(packed(attentions.full, name="theirs").to_json())
    with pytest.raises(KeyError):
        report.check("nothing")


def test_what_fn_keeps_or_overwrites_changes_nothing():
    kept = []

    def greedy(q, k, v, cu_seqlens):
        o, lse = attentions.attention(q, k, v, cu_seqlens)
        kept.append((q, o))
        q[...], k[...], v[...], cu_seqlens[...] = 0, 0, 0, 0
        return o, lse

    assert packed(greedy).holds
    for _, o in kept[1:3]:  # The repeats of the first.
        np.testing.assert_array_equal(o, kept[0][1])
