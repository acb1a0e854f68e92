"""Which documents a call of attention holds: padding, positions, offsets and dense masks become cu_seqlens (torch)."""

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """One call's tensors [batch, heads, tokens, dim] as packed documents."""

    key_length: int  # Keys from here on hold nothing yet (a cache of fixed size).
    queries: torch.Tensor | None  # Rows of [batch * tokens_q] that are kept, int64; None: all.
    keys: torch.Tensor | None
    offsets_q: torch.Tensor | None  # int32 [documents + 1]; None: one document.
    offsets_k: torch.Tensor | None  # None: as offsets_q.


def rows(tensor: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, heads, tokens, dim] as [rows, heads, dim]: a view where the strides allow one."""
    packed = tensor.transpose(1, 2).flatten(0, 1)
    return packed if kept is None else packed.index_select(0, kept)


def lengths_to_offsets(lengths: torch.Tensor) -> torch.Tensor:
    """[n] lengths as int32 offsets [n + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def plain(batch: int, tokens_q: int, tokens_k: int, device: torch.device) -> Documents:
    """Every row of the batch is a document."""
    if batch == 1:
        return Documents(tokens_k, None, None, None, None)
    count = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Documents(tokens_k, None, None, count * tokens_q, None if tokens_q == tokens_k else count * tokens_k)


def of_padding(
    mask: torch.Tensor, tokens_q: int, tokens_k: int, positions: torch.Tensor | None, causal: bool, windowed: bool
) -> Documents:
    """Documents of a padding mask [batch, keys], non-zero where a key is there; queries are the last of its columns.

    Where queries and keys are the same tokens, a position that does not rise begins another document.
    """
    mask = mask.bool()
    batch, length = mask.shape
    if length > tokens_k:
        raise ValueError(f"attention_mask: {length} keys given, at most {tokens_k} allowed (those of key)")
    packed = positions if tokens_q == length and tokens_q > 1 else None
    if not torch.compiler.is_compiling() and bool(mask.all()):
        offsets = None if packed is None else of_positions(packed, batch)
        return plain(batch, tokens_q, length, mask.device) if offsets is None else all_of(length, offsets)
    if windowed:
        _no_holes(mask)
    keys = mask.flatten().nonzero().squeeze(1)
    offsets_k = lengths_to_offsets(mask.sum(1))
    if not causal and not windowed:
        # Nothing is aligned, and the queries may be other tokens than the keys (cross-attention): all are kept.
        count = torch.arange(batch + 1, dtype=torch.int32, device=mask.device)
        return Documents(length, None, keys, count * tokens_q, offsets_k)
    if tokens_q > length:
        raise ValueError(f"attention_mask: {length} keys for {tokens_q} queries given, one a query or more allowed")
    if packed is not None:
        offsets = _of_kept(packed.expand(batch, -1).flatten()[keys], keys // length)
        return Documents(length, keys, keys, offsets, None)
    own = mask[:, length - tokens_q :]
    return Documents(length, own.flatten().nonzero().squeeze(1), keys, lengths_to_offsets(own.sum(1)), offsets_k)


def all_of(length: int, offsets: torch.Tensor) -> Documents:
    """All tokens, queries and keys alike."""
    return Documents(length, None, None, offsets, None)


def _no_holes(mask: torch.Tensor) -> None:
    """A window counts kept keys, so that it would reach further over a hole."""
    runs = mask[:, 0].int() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    words = "attention_mask: padding between tokens given with a sliding window, padding at the ends allowed"
    if torch.compiler.is_compiling():
        torch._assert_async((runs <= 1).all(), words)
    elif bool((runs > 1).any()):
        raise ValueError(words)


def _of_kept(positions: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Offsets of documents among kept tokens: a new one at every row, and where a position does not rise."""
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = (row[1:] != row[:-1]) | (positions[1:] <= positions[:-1])
    # The end as a tensor: while compiling, how many are kept is data.
    end = torch.ones_like(row).sum(0, keepdim=True)
    return torch.cat((starts.nonzero().squeeze(1), end)).to(torch.int32)


def _offsets(begins: torch.Tensor, end: int) -> torch.Tensor:
    return torch.nn.functional.pad(begins, (0, 1), value=end).to(torch.int32)


def of_positions(positions: torch.Tensor, batch: int) -> torch.Tensor | None:
    """Offsets of documents: a new one at every row, and where a position does not follow the one before it.

    positions [batch or 1, tokens]; None where every row is one document. It reads the values, except while compiling:
    there each token gives an offset, that of its document's start, so that no shape depends on data; documents that are
    empty cost next to nothing and change no bit of the others.
    """
    if positions.ndim != 2:
        raise ValueError(f"position_ids: {positions.ndim} dimensions given, 2 allowed (batch, tokens)")
    starts = torch.diff(positions, prepend=positions[:, :1], dim=1) != 1
    if not torch.compiler.is_compiling() and not bool(starts[:, 1:].any()):
        return None
    starts[:, 0] = True
    starts = starts.expand(batch, -1).flatten()
    if not torch.compiler.is_compiling():
        return _offsets(starts.nonzero().squeeze(1), starts.numel())
    index = torch.arange(starts.numel(), device=starts.device)
    return _offsets(torch.where(starts, index, 0).cummax(0).values, starts.numel())


def of_call(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    offsets_k: torch.Tensor | None,
    positions: torch.Tensor | None,
    causal: bool,
    windowed: bool,
) -> Documents:
    """Documents as transformers passes them: a padding mask and positions, or cu_seq_lens, or positions, or rows."""
    batch, _, tokens_q, _ = query.shape
    tokens_k = key.shape[2]
    if (offsets_q is None) != (offsets_k is None):
        missing = "cu_seq_lens_q" if offsets_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing}: None given, an int32 tensor allowed (the other one is given)")
    if mask is not None:
        if mask.ndim != 2:
            raise ValueError(
                f"attention_mask: {mask.ndim} dimensions given, 2 (padding: batch, keys) or None allowed; "
                "documents come as cu_seq_lens_q and cu_seq_lens_k, or as position_ids"
            )
        if offsets_q is not None:
            raise ValueError("attention_mask: a padding mask and cu_seq_lens_q given, one of them allowed")
        return of_padding(mask, tokens_q, tokens_k, positions, causal, windowed)
    if offsets_q is not None:
        same = offsets_k is offsets_q
        offsets_q = offsets_q.to(torch.int32)
        return Documents(tokens_k, None, None, offsets_q, None if same else offsets_k.to(torch.int32))
    if positions is not None and tokens_q == tokens_k and tokens_q > 1:
        offsets = of_positions(positions, batch)
        if offsets is not None:
            return all_of(tokens_k, offsets)
    return plain(batch, tokens_q, tokens_k, query.device)


def in_backward() -> bool:
    """Whether autograd runs this (activation checkpointing computes a forward again)."""
    return torch._C._current_graph_task_id() != -1


class Dense(NamedTuple):
    """What a dense mask says."""

    documents: Documents
    causal: bool
    window: tuple[int | None, int | None] | None


def of_dense(mask: torch.Tensor, batch: int, tokens_q: int, tokens_k: int) -> Dense:
    """Documents, padding, causality and window of a dense mask, bool or additive, [..., tokens_q, tokens_k].

    The reading is checked: built again from it, the mask must be the same, else ValueError.
    """
    visible = _visible(mask, batch, tokens_q, tokens_k)
    if 1 < tokens_q < tokens_k and not bool(visible[:, :, tokens_q:].any()):
        tokens_k = tokens_q  # A cache of fixed size: the rest of it holds nothing yet.
        visible = visible[:, :, :tokens_k]
    if tokens_q == 1:  # One new token per row on a cache: it sees the keys that it sees, wherever they lie.
        seen = visible[:, 0]
        count = torch.arange(batch + 1, dtype=torch.int32, device=mask.device)
        keys = seen.flatten().nonzero().squeeze(1)
        return Dense(Documents(tokens_k, None, keys, count, lengths_to_offsets(seen.sum(1))), True, None)
    if tokens_q != tokens_k:
        raise ValueError(f"attention_mask: {tokens_q} queries on {tokens_k} keys given, as many or one query allowed")
    kept = visible.diagonal(dim1=1, dim2=2)
    index = kept.flatten().nonzero().squeeze(1)
    row = torch.arange(batch, device=mask.device).repeat_interleave(kept.sum(1))
    column = index - row * tokens_k
    link = torch.zeros_like(index, dtype=torch.bool)
    link[1:] = (row[1:] == row[:-1]) & visible[row[1:], column[1:], column[:-1]]
    starts = (~link).nonzero().squeeze(1)
    offsets = torch.nn.functional.pad(starts, (0, 1), value=index.numel()).to(torch.int32)
    causal = not bool((visible[row[1:], column[:-1], column[1:]] & link[1:]).any())
    left = right = 0
    cut_left = cut_right = False
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = visible[row[first], column[first:last]][:, column[first:last]]
        place = torch.arange(last - first, device=mask.device)
        reach = (place[:, None] - place).masked_fill(~own, 0)
        left, right = max(left, int(reach.max())), max(right, -int(reach.min()))
        # The first row that sees the document's start no more, or the last that sees its end not yet: a window.
        cut_left |= not bool(own[:, 0].all())
        cut_right |= not causal and not bool(own[:, -1].all())
    window = (left if cut_left else None, right if cut_right else None)
    _check(visible, row, column, offsets, causal, window)
    documents = Documents(tokens_k, index, index, offsets, None)
    if index.numel() == batch * tokens_q:
        documents = documents._replace(queries=None, keys=None)
    return Dense(documents, causal, None if window == (None, None) else window)


def _visible(mask: torch.Tensor, batch: int, tokens_q: int, tokens_k: int) -> torch.Tensor:
    """The mask as bool [batch, tokens_q, tokens_k]."""
    if mask.dtype != torch.bool:
        hidden = mask <= -1e4  # What masks are filled with: -inf, or the least number of a type, float16's -65504.
        if bool((~hidden & (mask != 0)).any()):
            raise ValueError("attention_mask: a bias on the logits given, a mask (0 and -inf, or bool) allowed")
        mask = ~hidden
    if mask.ndim > 4 or mask.ndim < 2:
        raise ValueError(f"attention_mask: {mask.ndim} dimensions given, 2 to 4 allowed")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if bool((mask != mask[:, :1]).any()):
        raise ValueError("attention_mask: one that differs between heads given, the same for all heads allowed")
    return mask[:, 0].expand(batch, tokens_q, tokens_k)


def _check(visible, row, column, offsets, causal, window) -> None:
    document = torch.repeat_interleave(offsets.diff())
    for b in range(visible.shape[0]):
        own = row == b
        place = column[own]
        order = torch.arange(place.numel(), device=place.device)
        distance = order[:, None] - order
        expected = document[own][:, None] == document[own]
        left, right = window
        if causal:
            expected &= distance >= 0
        if left is not None:
            expected &= distance <= left
        if right is not None:
            expected &= distance >= -right
        built = torch.zeros((place.numel(), visible.shape[2]), dtype=torch.bool, device=place.device)
        built[:, place] = expected
        wrong = (built != visible[b, place]).nonzero()
        if wrong.numel():
            query, key = int(place[wrong[0, 0]]), int(wrong[0, 1])
            raise ValueError(
                f"attention_mask: a pattern given that is no documents with padding, causality or a window (row {b}, "
                f"query {query}, key {key}), those allowed"
            )
