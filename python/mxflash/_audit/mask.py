"""Which pairs of query and key have weight, seen through one-hot values, against what the mask says."""

from typing import Any, NamedTuple

import numpy as np

from mxflash._attention import Mask
from mxflash._audit.layout import Layout
from mxflash._audit.report import Check

_RUNS = 24
"""Calls at most."""


class Seen(NamedTuple):
    """What one call showed of some keys of one document."""

    document: int
    keys: slice
    some: np.ndarray
    """[queries, keys] of the document: has weight in a head."""
    every: np.ndarray
    """The same in all heads."""
    others: list[int]
    """Other documents in which a query has weight."""


def check_mask(subject: Any, random: np.random.Generator, advance: Any) -> tuple[Check, str]:
    """The check and a note on what was covered.

    All of q and k are 1, so that every visible pair has the same weight and none is lost to rounding; V is one-hot in
    as many keys as it has dims, whose columns of o are then the weights.
    """
    layout: Layout = subject.layout
    inputs = subject.inputs
    width = inputs["v"].shape[2]
    least = 0.25 / max(inputs["k"].shape[0], 1)
    """A visible key has 1 / (number of visible keys); a key that is not has nothing."""
    seen, lost = [], 0
    for index, keys in _plan(layout, width, random):
        document = layout.documents[index]
        v = np.zeros_like(inputs["v"])
        count = keys.stop - keys.start
        begin = document.k.start + keys.start
        v[np.arange(begin, begin + count), :, np.arange(count)] = 1
        tensors = {"q": np.ones_like(inputs["q"]), "k": np.ones_like(inputs["k"]), "v": v, "do": inputs["do"]}
        o = subject.run(tensors, forward_only=True)["o"][:, :, :count]
        first, last = layout.visible(document)
        lost += int((~np.isfinite(o[document.q][last > first])).any(axis=(1, 2)).sum())
        weights = o > least
        reached = [other for other, one in enumerate(layout.documents) if other != index and weights[one.q].any()]
        own = weights[document.q]
        seen.append(Seen(index, keys, own.any(axis=1), own.all(axis=1), reached))
        advance()
    seen.sort(key=lambda one: (one.document, one.keys.start))
    total = sum(document.queries * document.keys for document in layout.documents)
    covered = sum(layout.documents[one.document].queries * (one.keys.stop - one.keys.start) for one in seen)
    documents = len({one.document for one in seen})
    figures = {"pairs": total, "pairs_covered": covered, "documents_covered": documents, "runs": len(seen)}
    wrong = [f"{lost} rows of o are not finite where q = k = 1 and V is one-hot"] if lost else []
    wrong += _own(layout, seen) + _others(seen)
    share = f"{covered} of {total} pairs of query and key, in {documents} of {len(layout.documents)} documents"
    if not seen:
        return Check("mask", "not checked", "no document has queries and keys", figures), ""
    result = Check("mask", "fails" if wrong else "holds", "; ".join(wrong) or f"as asked for in {share}", figures)
    return result, "" if covered == total else f"the mask was looked at in {share}."


def _plan(layout: Layout, width: int, random: np.random.Generator) -> list[tuple[int, slice]]:
    """Documents and keys, at most _RUNS: first where queries and keys differ in number, then the longest."""
    order = [index for index, one in enumerate(layout.documents) if one.queries and one.keys]
    order.sort(
        key=lambda index: (layout.documents[index].queries == layout.documents[index].keys, -_keys(layout, index))
    )
    plan = []
    for index in order:
        keys = _keys(layout, index)
        starts = list(range(0, keys, width))
        if len(starts) > 6:  # The first, the last and some between.
            starts = sorted({0, starts[-1], *(int(start) for start in random.choice(starts, 4, replace=False))})
        plan += [(index, slice(start, min(start + width, keys))) for start in starts]
    return plan[:_RUNS]


def planned_runs(layout: Layout, width: int) -> int:
    """How many calls check_mask makes, about."""
    return len(_plan(layout, width, np.random.default_rng(0)))


def _keys(layout: Layout, index: int) -> int:
    return layout.documents[index].keys


def _pairs(layout: Layout, seen: list[Seen], mask: Mask, top_left: bool) -> list[np.ndarray]:
    """For each call, [queries, keys] that a mask lets see each other."""
    results = []
    for one in seen:
        document = layout.documents[one.document]
        away = np.arange(one.keys.start, one.keys.stop) - np.arange(document.queries)[:, None]
        if not top_left:
            away = away - (document.keys - document.queries)
        allowed = np.ones_like(away, bool)
        if mask.left is not None:
            allowed &= away >= -mask.left
        if mask.right is not None:
            allowed &= away <= mask.right
        results.append(allowed)
    return results


def _own(layout: Layout, seen: list[Seen]) -> list[str]:
    """What is wrong inside documents."""
    asked = _pairs(layout, seen, layout.mask, False)
    some, every = [one.some for one in seen], [one.every for one in seen]

    def fits(pairs: list[np.ndarray]) -> bool:
        return all(np.array_equal(a, b) and np.array_equal(c, b) for a, b, c in zip(some, pairs, every, strict=True))

    if fits(asked):
        return []
    for words, mask, top_left in _known(layout.mask):
        if fits(_pairs(layout, seen, mask, top_left)):
            return [words]
    wrong = []
    for words, tables in (
        ("have weight that the mask forbids", [a & ~b for a, b in zip(some, asked, strict=True)]),
        ("that the mask allows have no weight", [b & ~a for a, b in zip(every, asked, strict=True)]),
    ):
        count = sum(int(table.sum()) for table in tables)
        if count:
            one, table = next((one, table) for one, table in zip(seen, tables, strict=True) if table.any())
            query, key = np.argwhere(table)[0]
            where = f"document {one.document}, query {query}, key {one.keys.start + key}"
            wrong.append(f"{count} pairs {words} (the first: {where})")
    return wrong


def _known(mask: Mask) -> list[tuple[str, Mask, bool]]:
    """Masks that are mistaken for the one asked for: (words, mask, aligned top-left)."""
    left, right = mask
    known = [("aligned top-left: query i and key i meet at the first of both, not at the last", mask, True)]
    if right == 0:
        known.append(("the diagonal is missing: no query sees its own key", Mask(left, -1), False))
        known.append(("one key too many: each query sees the key after its own", Mask(left, 1), False))
        known.append(("reversed: each query sees its own and later keys", Mask(0, None), False))
    if left is not None:
        known.append(("the window's left bound is ignored", Mask(None, right), False))
        known.append(("the window has a key too few on the left", Mask(left - 1, right), False))
        known.append(("the window has a key too many on the left", Mask(left + 1, right), False))
    if right is None:
        known.append(("causal, where every later key was to be seen", Mask(left, 0), False))
    known.append(("not causal: every query sees every key of its document", Mask(None, None), False))
    known.append(("no query sees any key", Mask(0, -1), False))
    return known


def _others(seen: list[Seen]) -> list[str]:
    """What is wrong between documents."""
    pairs = {(other, one.document) for one in seen for other in one.others}
    if not pairs:
        return []
    query, key = min(pairs)
    order = "earlier ones" if all(a > b for a, b in pairs) else "others"
    return [f"no document mask: queries see keys of other documents, {order} (document {query} those of {key})"]
