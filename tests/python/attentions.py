"""Attention in float64 numpy, right and wrong in one way each, for the audit to tell apart."""

import itertools

import numpy as np


def plan(cu_seqlens_q, cu_seqlens_k):
    """(rows of q, rows of k) of each document."""
    pairs = zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in pairs]


def causal(query, keys, _queries):
    """Past-the-last key of a query, aligned at the last of both."""
    return min(max(query + 1 + keys - _queries, 0), keys)


def attention(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, first=None, last=causal, empty=0.0):
    """(o, lse). A row reads only the keys it sees, so that a NaN elsewhere cannot reach it."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    group = q.shape[1] // k.shape[1]
    o = np.full((*q.shape[:2], v.shape[2]), empty)
    lse = np.full(q.shape[:2], -np.inf)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for queries, keys in plan(cu_seqlens_q, cu_seqlens_k):
        lengths = queries.stop - queries.start, keys.stop - keys.start
        for query in range(lengths[0]):
            begin = 0 if first is None else first(query, lengths[1], lengths[0])
            end = last(query, lengths[1], lengths[0])
            if end <= begin:
                continue
            for head in range(q.shape[1]):
                seen = slice(keys.start + begin, keys.start + end)
                with np.errstate(invalid="ignore"):
                    logits = k[seen, head // group] @ q[queries.start + query, head] * q.shape[2] ** -0.5
                    weights = np.exp(logits - logits.max())
                    row = queries.start + query, head
                    o[row] = weights @ v[seen, head // group] / weights.sum()
                    lse[row] = logits.max() + np.log(weights.sum())
    return o, lse


def masked(q, k, v, cu_seqlens):
    """As most write it: a full product, with masked weights of 0, and 0 times NaN is NaN."""
    owner = np.searchsorted(cu_seqlens, np.arange(len(q)), side="right")
    mask = (owner[:, None] == owner) & np.tri(len(q), dtype=bool)
    o = np.empty((*q.shape[:2], v.shape[2]))
    for head in range(q.shape[1]):
        of = head * k.shape[1] // q.shape[1]
        with np.errstate(invalid="ignore"):
            logits = q[:, head].astype(np.float64) @ k[:, of].astype(np.float64).T * q.shape[2] ** -0.5
            logits = np.where(mask, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            o[:, head] = weights @ v[:, of].astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return o


def strict(q, k, v, *offsets):
    return attention(q, k, v, *offsets, last=lambda i, keys, queries: max(causal(i, keys, queries) - 1, 0))


def one_too_many(q, k, v, *offsets):
    return attention(q, k, v, *offsets, last=lambda i, keys, queries: min(causal(i, keys, queries) + 1, keys))


def full(q, k, v, *offsets):
    return attention(q, k, v, *offsets, last=lambda _i, keys, _queries: keys)


def top_left(q, k, v, *offsets):
    return attention(q, k, v, *offsets, last=lambda i, keys, _queries: min(i + 1, keys))


def reversed_order(q, k, v, *offsets):
    return attention(q, k, v, *offsets, first=lambda i, *_: i, last=lambda _i, keys, _queries: keys)


def skips_fifth_key(q, k, v, *offsets):
    """No name for it: every query from the fifth on misses the first five keys."""
    return attention(q, k, v, *offsets, first=lambda i, *_: 5 if i >= 5 else 0)


def window_of(left):
    def windowed(q, k, v, *offsets):
        return attention(q, k, v, *offsets, first=lambda i, keys, queries: max(i + keys - queries - left, 0))

    return windowed


def without_documents(q, k, v, cu_seqlens):
    return attention(q, k, v, cu_seqlens[[0, -1]])


def shrunk(q, k, v, *offsets):
    """Rows add up to 0.99 of their normalizer."""
    o, lse = attention(q, k, v, *offsets)
    return 0.99 * o, lse


def empty_is_nan(q, k, v, *offsets):
    return attention(q, k, v, *offsets, empty=np.nan)


def noisy(size):
    """Other noise every time."""
    random = np.random.default_rng(0)

    def attend(q, k, v, *offsets):
        o, lse = attention(q, k, v, *offsets)
        return o * (1 + size * random.standard_normal(o.shape)), lse

    return attend


def other_order(q, k, v, cu_seqlens):
    """Right, in float32, adding up in an order that depends on the place in the pack: noise, and no fault."""
    o, lse = np.empty((*q.shape[:2], v.shape[2]), np.float32), np.empty(q.shape[:2], np.float32)
    for begin, end in itertools.pairwise(cu_seqlens):
        for query in range(begin, end):
            for head in range(q.shape[1]):
                of = head * k.shape[1] // q.shape[1]
                order = np.roll(np.arange(begin, query + 1), begin % 7)
                with np.errstate(invalid="ignore"):
                    logits = (k[order, of] * q[query, head]).sum(axis=1) * np.float32(q.shape[2] ** -0.5)
                    weights = np.exp(logits - logits.max())
                    total = np.float32(0)
                    row = np.zeros(v.shape[2], np.float32)
                    for weight, value in zip(weights, v[order, of], strict=True):
                        total += weight
                        row += weight * value
                    o[query, head] = row / total
                    lse[query, head] = logits.max() + np.log(total)
    return o, lse


def depends_on_place(q, k, v, cu_seqlens):
    """Weights bent by where the token lies in the pack: nothing leaks, but the place matters."""
    places = 1 + 0.01 * np.sin(np.arange(len(q)))[:, None, None]
    return attention((q * places).astype(np.float32), k, v, cu_seqlens)
