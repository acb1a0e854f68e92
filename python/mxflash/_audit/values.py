"""Checks of the values themselves: finite, NaN that stays where it belongs, rows that add up, accuracy."""

from typing import Any

import numpy as np

from mxflash._audit.layout import QUERY_SIDE
from mxflash._audit.probes import Probes
from mxflash._audit.report import Check
from mxflash._audit.subject import Subject

_CONSTANT = 1.5
"""Exact in every format, block scales included: 1 is not in NVFP4, whose scale would be 1 / 6."""


def check_finite(subject: Subject, before: dict[str, np.ndarray]) -> Check:
    """Results of the inputs as given; only lse may be infinite, and only where a query sees no key."""
    words = []
    for output, values in before.items():
        rows, place = 0, ""
        for index, document in enumerate(subject.layout.documents):
            bad = ~_finite_rows(values[document.rows(output)])
            first, last = subject.layout.visible(document)
            if output == "lse":
                bad &= (last > first)[:, None]
            if bad.any() and not rows:
                row, head = (int(at) for at in np.argwhere(bad)[0])
                blind = ", which sees no key" if output in QUERY_SIDE and first[row] == last[row] else ""
                side = "query" if output in QUERY_SIDE else "key"
                place = f"document {index}, head {head}, {side} {row}{blind}"
            rows += int(bad.sum())
        if rows:
            words.append(f"{rows} rows of {output} are NaN or Inf (the first: {place})")
    return Check("finite", "fails" if words else "holds", "; ".join(words) or "all results are finite")


def check_spread(
    subject: Subject, before: dict[str, np.ndarray], probes: Probes, overflow: dict[tuple, int], advance: Any
) -> Check:
    """A NaN and an Inf in one token: rows that do not depend on it stay finite, those of other documents too.

    overflow: what other probes have seen of it, {(own document, what changed, output): rows}.
    """
    documents = subject.layout.documents
    order = [index for index, one in enumerate(documents) if one.queries and one.keys]
    if not order:
        return Check("NaN and Inf", "not checked", "no document has queries and keys")
    order.sort(key=lambda index: -documents[index].queries)
    chosen = {order[0], order[len(order) // 2]}  # The longest and a middling one.
    worst = dict(overflow)  # (own document, tensor, output): rows
    for tensor in ("q", "k", "v", "do") if subject.differentiates else ("q", "k", "v"):
        for value in (np.nan, np.inf):
            for index in sorted(chosen):
                for own, output, rows in _spread(subject, before, probes, tensor, value, index):
                    key = (own, tensor, output)
                    worst[key] = max(worst.get(key, 0), rows)
                advance()
    figures = {
        "spread": [
            {"tensor": tensor, "output": output, "documents": "own" if own else "other", "rows": rows}
            for (own, tensor, output), rows in worst.items()
        ]
    }
    if not worst:
        return Check("NaN and Inf", "holds", "they reach only rows that depend on their token", figures)
    words = []
    for own, where in ((True, "its document that do not depend on it"), (False, "other documents")):
        outputs: dict[str, list[str]] = {}
        for of_own, tensor, output in worst:
            if of_own is own:
                outputs.setdefault(tensor, []).append(output)
        if outputs:
            pairs = "; ".join(f"{tensor} into {', '.join(reached)}" for tensor, reached in outputs.items())
            rows = max(count for (of_own, *_), count in worst.items() if of_own is own)
            words.append(f"up to {rows} rows of {where} are lost (from {pairs})")
    return Check("NaN and Inf", "fails", ", and ".join(words), figures)


def _spread(
    subject: Subject, before: dict, probes: Probes, tensor: str, value: float, index: int
) -> list[tuple[bool, str, int]]:
    """(own document, output, rows) that turned NaN or Inf with one token and do not depend on it."""
    document = subject.layout.documents[index]
    part = document.rows(tensor)
    length = part.stop - part.start
    token = min(length // 32 * 16 + 9, length - 1)  # With others before and after it in any tile of 16 or more.
    queries, keys = np.zeros(document.queries, bool), np.zeros(document.keys, bool)
    (queries if tensor in QUERY_SIDE else keys)[token] = True
    tensors = probes.copy()
    tensors[tensor][part.start + token] = value
    after = subject.run(tensors)
    rows, columns = subject.layout.may_move(document, queries, keys)
    found = []
    for output, values in before.items():
        lost = _finite_rows(values) & ~_finite_rows(after[output])
        own = lost[document.rows(output)]
        outside = int(lost.sum() - own.sum())
        inside = int((own & ~(rows if output in QUERY_SIDE else columns)[:, None]).sum())
        found += [(True, output, inside)] * (inside > 0) + [(False, output, outside)] * (outside > 0)
    return found


def _finite_rows(values: np.ndarray) -> np.ndarray:
    """[tokens, heads]."""
    finite = np.isfinite(values)
    return finite if finite.ndim == 2 else finite.all(axis=2)


def check_row_sum(subject: Subject, probes: Probes, advance: Any) -> Check:
    """With a constant V every row that sees a key is that constant, whatever its weights, if they add up to 1."""
    o = subject.run(probes.copy() | {"v": np.full_like(subject.inputs["v"], _CONSTANT)}, forward_only=True)["o"]
    advance()
    worst, place = -1.0, {}
    for index, document in enumerate(subject.layout.documents):
        first, last = subject.layout.visible(document)
        sees = np.nonzero(last > first)[0]
        error = np.abs(o[document.q][sees].astype(np.float64) / _CONSTANT - 1)
        error = np.where(np.isfinite(error), error, np.inf)
        if error.max(initial=-1) > worst:
            row, head, _ = np.unravel_index(int(np.argmax(error)), error.shape)
            worst = float(error[row, head].max())
            place = {"document": index, "position": int(sees[row]), "head": int(head)}
    if worst < 0:
        return Check("row sum", "not checked", "no query sees a key")
    # Weights rounded to the type against an unrounded sum of them; o rounded to the type; float32 sums of all keys.
    longest = max(document.keys for document in subject.layout.documents)
    tolerance = 2 * subject.roundoff + 2 * (longest + 8) * 2.0**-24
    figures = {"error": worst, "tolerance": tolerance, "worst": place}
    if worst <= tolerance:
        return Check("row sum", "holds", f"o of a constant V is that constant within {worst:.2g}", figures)
    at = f"document {place['document']}, query {place['position']}, head {place['head']}"
    return Check("row sum", "fails", f"o of a constant V is off that constant by {worst:.2g} ({at})", figures)


def check_accuracy(subject: Subject, before: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Check:
    """Against exact attention in float64; no verdict."""
    figures, words = {}, []
    for output, values in before.items():
        truth = exact[output].astype(np.float64)
        used = np.isfinite(truth)
        error = np.where(used, values, 0) - np.where(used, truth, 0)
        norm = float(np.sqrt(np.square(truth[used]).sum()))
        relative = float(np.sqrt(np.square(error).sum())) / norm if norm else 0.0
        figures[output] = {"relative_l2": relative}
        words.append(f"{output} {relative:.2g}")
        if error.size:
            at = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, np.abs(error)))), error.shape)
            figures[output] |= {"largest_error": float(np.abs(error[at])), "worst": _place(subject, output, at)}
    return Check("accuracy", "measured", "relative L2 error against exact attention: " + ", ".join(words), figures)


def _place(subject: Subject, output: str, at: tuple) -> dict[str, int]:
    for index, document in enumerate(subject.layout.documents):
        part = document.rows(output)
        if part.start <= at[0] < part.stop:
            return {"document": index, "position": int(at[0]) - part.start, "head": int(at[1])}
    return {}
