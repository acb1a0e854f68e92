"""Attention as others write it, to be audited: each is fn(q, k, v, cu_seqlens), causal, of packed documents.

    mxflash-audit foreign_attention:sdpa            # in this folder
    python examples/foreign_attention.py            # all of them: a Markdown table
    python examples/foreign_attention.py --picture docs/pictures/audit_pairs.png

q [tokens, heads, dims]; k, v [tokens, kv_heads, dims]; o like q.
"""

import argparse
import functools
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mxflash
import mxflash.torch


def _documents(cu_seqlens):
    return list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))


def _batched(x):
    """[tokens, heads, dims] as the [1, heads, tokens, dims] of torch."""
    return x.transpose(0, 1).unsqueeze(0)


def _packed(o):
    return o.squeeze(0).transpose(0, 1)


def sdpa(q, k, v, cu_seqlens, causal=True):
    """torch's scaled_dot_product_attention, a call a document."""
    outputs = []
    for begin, end in _documents(cu_seqlens):
        arrays = (_batched(x[begin:end]) for x in (q, k, v))
        outputs.append(_packed(functional.scaled_dot_product_attention(*arrays, is_causal=causal, enable_gqa=True)))
    return torch.cat(outputs)


def sdpa_padded(q, k, v, cu_seqlens):
    """The same on a padded batch, with the mask as a tensor."""
    documents = _documents(cu_seqlens)
    longest = max(end - begin for begin, end in documents)

    def padded(x):
        rows = [functional.pad(x[begin:end], (0, 0, 0, 0, 0, longest - (end - begin))) for begin, end in documents]
        return torch.stack(rows).transpose(1, 2)

    places = torch.arange(longest)
    lengths = cu_seqlens.diff()
    mask = (places[:, None] >= places) & (places < lengths[:, None, None])
    o = functional.scaled_dot_product_attention(
        padded(q), padded(k), padded(v), attn_mask=mask[:, None], enable_gqa=True
    )
    return torch.cat([o[i, :, : end - begin].transpose(0, 1) for i, (begin, end) in enumerate(documents)])


def sdpa_without_documents(q, k, v, cu_seqlens):
    """Wrong: the pack as one sequence."""
    return sdpa(q, k, v, cu_seqlens[[0, -1]])


def sdpa_top_left(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """Wrong where a document has more keys than queries: is_causal aligns both at their first, not at their last."""
    pairs = zip(_documents(cu_seqlens_q), _documents(cu_seqlens_k), strict=True)
    outputs = []
    for (begin, end), (begin_k, end_k) in pairs:
        arrays = (_batched(q[begin:end]), _batched(k[begin_k:end_k]), _batched(v[begin_k:end_k]))
        outputs.append(_packed(functional.scaled_dot_product_attention(*arrays, is_causal=True, enable_gqa=True)))
    return torch.cat(outputs)


def _same_document(cu_seqlens, tokens):
    owner = torch.bucketize(torch.arange(tokens), cu_seqlens[1:].long(), right=True)
    return owner, owner[:, None] == owner


def flex(q, k, v, cu_seqlens):
    """torch's FlexAttention with a document mask. It has no backward on the CPU."""
    owner, _ = _same_document(cu_seqlens, len(q))

    def visible(_batch, _head, query, key):
        return (owner[query] == owner[key]) & (query >= key)

    block_mask = create_block_mask(visible, None, None, len(q), len(k), device=str(q.device))
    return _packed(_flex()(_batched(q), _batched(k), _batched(v), block_mask=block_mask, enable_gqa=True))


@functools.cache
def _flex():
    return torch.compile(flex_attention)


def nested(q, k, v, cu_seqlens):
    """torch's nested tensors. Not causal: torch refuses is_causal for them on the CPU."""
    group = q.shape[1] // k.shape[1]
    arrays = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    jagged = (torch.nested.nested_tensor_from_jagged(x, cu_seqlens.long()).transpose(1, 2) for x in arrays)
    return functional.scaled_dot_product_attention(*jagged).transpose(1, 2).values()


def _masked_attention(q, k, v, cu_seqlens):
    """Plain softmax over a causal document mask, in float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    _, same = _same_document(cu_seqlens, q.shape[1])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~same.tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _straight_through(x, rounded):
    """`rounded` forward, the gradient of x backward."""
    return x + (rounded - x).detach()


def naive_fp8(q, k, v, cu_seqlens):
    """FP8 E4M3 with one scale a tensor, from its largest value; a straight-through backward."""

    def quantized(x):
        scale = x.float().abs().amax().clamp(min=1e-30) / 448
        return _straight_through(x.float(), (x.float() / scale).to(torch.float8_e4m3fn).float() * scale)

    return _masked_attention(quantized(q), quantized(k), quantized(v), cu_seqlens).to(q.dtype)


def mx_plain(q, k, v, cu_seqlens):
    """MXFP8 in blocks of 32 along the dimension that each product adds up over: dims of q and k, keys of v.

    V's blocks are counted through the pack, as in a tensor quantized once for all documents.
    """

    def quantized(x, axis):
        x = x.float().movedim(axis, -1)
        length = x.shape[-1]
        blocks = functional.pad(x, (0, -length % 32)).unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True)
        # The power of two that brings the largest value to E4M3's top octave.
        scale = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 8)
        rounded = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return _straight_through(x, rounded.flatten(-2)[..., :length]).movedim(-1, axis)

    return _masked_attention(quantized(q, -1), quantized(k, -1), quantized(v, 0), cu_seqlens).to(q.dtype)


FOREIGN = {
    "sdpa": {},
    "sdpa_padded": {},
    "flex": {"backward": False},
    "nested": {"causal": False},
    "naive_fp8": {},
    "mx_plain": {},
    "sdpa_without_documents": {},
}
"""And what the audit has to know of each."""

_CHECKS = {
    "later tokens, forward": "later tokens, o",
    "later tokens, backward": "later tokens, dQ",
    "other documents": "other documents",
    "place in the pack": "place in the pack",
    "NaN and Inf": "NaN and Inf",
    "row sum": "row sum",
    "mask": "mask",
}


def _inputs(lengths, heads, kv_heads, dims, dtype):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(offsets[-1])
    q, k, v = (torch.randn(tokens, count, dims).to(dtype) for count in (heads, kv_heads, kv_heads))
    return q, k, v, offsets


def _table(dtype):
    """Audits all of them and two recipes of mxflash; prints a Markdown table."""
    arrays = _inputs((1, 33, 64, 100, 17, 2, 130), 4, 2, 64, dtype)
    exact = functools.partial(mxflash.torch.attention, recipe="mxfp8", causality="exact")
    ours = {
        "mxflash bf16": (functools.partial(mxflash.torch.attention, recipe="bf16"), {}),
        "mxflash mxfp8, causality exact": (exact, {}),
    }
    theirs = {name: (globals()[name], known) for name, known in FOREIGN.items()}
    print(f"| implementation | {' | '.join(_CHECKS.values())} | error of o | holds |")
    print(f"|{'---|' * (len(_CHECKS) + 3)}")
    for name, (fn, known) in (theirs | ours).items():
        report = mxflash.audit(fn, *arrays, name=name, **known)
        cells = [_cell(report.check(check)) for check in _CHECKS]
        error = report.check("accuracy").figures["o"]["relative_l2"]
        print(f"| `{name}` | {' | '.join(cells)} | {error:.1e} | {'yes' if report.holds else 'no'} |", flush=True)


def _cell(check):
    if check.result == "not checked":
        return "-"
    if check.result != "fails":
        return check.result
    if check.figures.get("reach_tokens"):
        return f"**leaks**, {check.figures['reach_tokens']} tokens back"
    if check.name == "NaN and Inf":
        other = any(entry["documents"] == "other" for entry in check.figures["spread"])
        return "**spread**, to other documents" if other else "**spread** in the document"
    return "**fails**"


def _picture(path):
    """For each token of a pack: which queries move when it becomes an outlier, and which of them cannot see it."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap

    q, k, v, offsets = _inputs((50, 78), 2, 2, 32, torch.float32)
    tokens = len(q)
    sees = _same_document(offsets, tokens)[1].tril()
    shown = {
        "mx_plain: MX blocks of 32 along keys": mx_plain,
        "naive_fp8: one scale a tensor": naive_fp8,
        "mxflash, recipe mxfp8": functools.partial(mxflash.torch.attention, recipe="mxfp8"),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), sharey=True, layout="constrained")
    for axis, (title, fn) in zip(axes, shown.items(), strict=True):
        before = fn(q, k, v, offsets)
        moved = torch.zeros(tokens, tokens, dtype=torch.bool)
        for token in range(tokens):
            k_changed, v_changed = k.clone(), v.clone()
            k_changed[token] *= 2**20
            v_changed[token] *= 2**20
            moved[:, token] = (fn(q, k_changed, v_changed, offsets) != before).flatten(1).any(1)
        axis.imshow(
            moved.int() * (2 - sees.int()), cmap=ListedColormap(["white", "#b8c4d0", "#c0392b"]), vmin=0, vmax=2
        )
        for edge in offsets[1:-1].tolist():
            axis.axhline(edge - 0.5, color="black", linewidth=0.7)
            axis.axvline(edge - 0.5, color="black", linewidth=0.7)
        axis.set_xticks(range(0, tokens + 1, 32))
        axis.set_yticks(range(0, tokens + 1, 32))
        axis.set_xlabel("token that changed (k and v)")
        axis.set_title(f"{title}\n{int((moved & ~sees).sum())} pairs that must not", fontsize=10)
    axes[0].set_ylabel("query whose o moved")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})


def main():
    """The table, or the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", metavar="FILE.png", help="draw which pairs move, instead of the table")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if options.picture:
        _picture(options.picture)
    else:
        _table(getattr(torch, options.dtype))


if __name__ == "__main__":
    main()
