"""How far rounding alone can move each result: the line between noise and a leak.

Two right implementations, or one at two places in the pack, differ by their roundings. With u the unit roundoff of the
coarser of the inputs' type and o's, and e = 2^-24 that of float32, to first order and with all signs at their worst:

    logit        s_ij  float32 sum of D products, and rounded to the type (matrix products in it are):
                       u |s| + D e scale |q|.|k|
    weight       p_ij  that much relatively; rounded to the type before it meets V; the exponential, and a sum of n
                       weights, in float32:                                      E = d(s) + u + (n + 8) e
    output       o_i   sum_j p E |v_j - o_i|, and o rounded:                     <= (p E) |v| + |o| sum(p E) + u |o|
    lse                sum_j p d(s), the sum, and lse rounded to its own type:   sum(p d(s)) + (n + 8) e + e |lse|
    dP_ij              F = u |dP| + Dv e |dO|.|v|
    D_i                sum_j p (E |dP| + F) where it is sum p dP; |dO|.d(o) more where it is dO.o
    dS_ij              H = scale p (E |dP - D| + F + d(D)) + u |dS|
    dq, dk, dv         H |k|, H^T |q|, (p E)^T |dO|, each with n e of its own sum and rounded to the type

Below the type's normal numbers an error is not relative: whatever is rounded to the type may be off by `tiny` besides.

Both of two results may be off by that, so the tolerance is twice it. It is a bound and not an estimate: real noise is
far below, and a change beyond it has another cause. What it does not cover is coarser storage inside (weights in 8
bits whose codes flip where sums differ): such an implementation is not the same computation at every place.
"""

import numpy as np

from mxflash._audit.layout import Layout

_SINGLE = 2.0**-24
_PAIRS = 2**22
"""At a time, about: the tables are [queries, keys]."""


def tolerances(
    inputs: dict[str, np.ndarray],
    exact: dict[str, np.ndarray],
    layout: Layout,
    scale: float,
    roundoff: float,
    tiny: float,
) -> dict[str, np.ndarray]:
    """The largest difference that rounding explains, of each element of o, lse and, where exact has them, gradients."""
    bounds = {name: np.zeros(values.shape) for name, values in exact.items()}
    group = inputs["q"].shape[1] // inputs["k"].shape[1]
    for document in layout.documents:
        first, last = layout.visible(document)
        count = max(_PAIRS // max(document.keys, 1), 1)
        for head in range(inputs["q"].shape[1]):
            for begin in range(0, document.queries, count):
                part = slice(begin, min(begin + count, document.queries))
                rows = slice(document.q.start + part.start, document.q.start + part.stop)
                keys = np.arange(document.keys)
                seen = (keys >= first[part, None]) & (keys < last[part, None])
                where = (rows, head), (document.k, head // group)
                _add(bounds, inputs, exact, where, seen, (scale, roundoff, tiny))
    for name, bound in bounds.items():
        if name != "lse":
            bound += roundoff * np.abs(exact[name])
        bound += tiny
        bound *= 2
    return bounds


def _add(bounds: dict, inputs: dict, exact: dict, where: tuple, seen: np.ndarray, units: tuple) -> None:
    """Of some queries of a document and head."""
    scale, roundoff, tiny = units
    queries, keys = where
    q, k, v = inputs["q"][queries], inputs["k"][keys], inputs["v"][keys]
    o, lse = exact["o"][queries], exact["lse"][queries][:, None]
    visible = seen.sum(axis=1, keepdims=True)
    logits = np.where(seen, scale * (q @ k.T), 0)
    weights = np.where(seen, np.exp(np.minimum(logits - np.where(np.isfinite(lse), lse, 0), 0)), 0)
    of_logit = roundoff * np.abs(logits) + q.shape[1] * _SINGLE * abs(scale) * (np.abs(q) @ np.abs(k).T)
    of_sum = (visible + 8) * _SINGLE
    relative = weights * (of_logit + roundoff + of_sum) + seen * tiny
    of_o = relative @ np.abs(v) + np.abs(o) * relative.sum(axis=1, keepdims=True)
    bounds["o"][queries] += of_o
    of_lse = (weights * of_logit).sum(axis=1, keepdims=True) + of_sum + _SINGLE * np.abs(np.nan_to_num(lse, neginf=0))
    bounds["lse"][queries] += of_lse[:, 0]
    if "dq" not in bounds:
        return
    do = inputs["do"][queries]
    dp = do @ v.T
    of_dp = roundoff * np.abs(dp) + v.shape[1] * _SINGLE * (np.abs(do) @ np.abs(v).T) + tiny
    delta = (weights * dp).sum(axis=1, keepdims=True)
    of_delta = (relative * np.abs(dp) + weights * of_dp).sum(axis=1, keepdims=True)
    of_delta += (np.abs(do) * (of_o + roundoff * np.abs(o))).sum(axis=1, keepdims=True)
    ds = abs(scale) * weights * np.abs(dp - delta)
    of_ds = (
        abs(scale) * (relative * np.abs(dp - delta) + weights * (of_dp + of_delta))
        + (roundoff + of_sum) * ds
        + seen * tiny
    )
    bounds["dq"][queries] += of_ds @ np.abs(k)
    longest = len(q) * _SINGLE
    bounds["dk"][keys] += (of_ds + longest * ds).T @ np.abs(q)
    bounds["dv"][keys] += (relative + longest * weights).T @ np.abs(do)
