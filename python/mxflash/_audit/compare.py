"""Comparing results bit for bit, and counting what moved."""

from typing import Any, NamedTuple

import numpy as np

from mxflash._audit.layout import QUERY_SIDE, Document

_EXAMPLES = 4096
_BLOCKS = (16, 32, 64, 128)


class Difference(NamedTuple):
    """Of each row, [tokens, heads]."""

    moved: np.ndarray
    """Other bits."""
    excess: np.ndarray
    """The change over what rounding explains: above 1 it has another cause."""
    size: np.ndarray
    """The change over the row's largest value."""
    lost: np.ndarray
    """It was finite, and is not any more."""

    def where(self, rows: np.ndarray) -> "Difference":
        """The same with nothing moved in the other rows."""
        return Difference(*(np.where(rows, part, 0).astype(part.dtype) for part in self))


def difference(before: np.ndarray, after: np.ndarray, tolerance: np.ndarray) -> Difference:
    """Row by row; a value that was finite and is not any more, or the other way round, changed without bound."""
    if before.ndim == 2:
        before, after, tolerance = before[..., None], after[..., None], tolerance[..., None]
    same = (before == after) & (np.signbit(before) == np.signbit(after)) | np.isnan(before) & np.isnan(after)
    bounded = np.isfinite(before) & np.isfinite(after)
    with np.errstate(over="ignore"):
        change = np.abs(np.where(bounded, after, 0).astype(np.float64) - np.where(bounded, before, 0))
    change = np.where(same, 0, np.where(bounded, change, np.inf))
    largest = np.abs(np.where(np.isfinite(before), before, 0)).max(axis=2)
    size = change.max(axis=2) / np.where(largest > 0, largest, 1)
    # A new sign of a zero is a change of 0: the bits moved, the value did not.
    lost = (np.isfinite(before) & ~np.isfinite(after)).any(axis=2)
    return Difference(~same.all(axis=2), (change / tolerance).max(axis=2), size, lost)


class Tally:
    """What moved that must not, over all probes of one check."""

    def __init__(self) -> None:
        self.probes = self.moved = self.leaks = 0
        self.reach = 0
        self.worst: dict[str, Any] = {}
        self.examples: list[dict[str, Any]] = []
        self._blocks = [(origin, size) for origin in ("document", "pack") for size in _BLOCKS]
        self._longest = 0
        self._flags = (False, False)

    def begin(self) -> None:
        """A probe that has a result to compare."""
        self.probes += 1
        self._flags = (False, False)

    def add(self, output: str, found: Difference, document: Document, place: dict[str, Any], noise: float) -> None:
        """The rows of one document that must not have moved: found, from the document's first row on."""
        if not found.moved.any():
            return
        beyond = found.excess > noise
        leaks = bool(beyond.any())
        if leaks and not self.leaks:  # What was only rounding is not what counts any more.
            self.worst, self.reach = {}, 0
        self.moved += not self._flags[0]
        self.leaks += leaks and not self._flags[1]
        self._flags = (True, self._flags[1] or leaks)
        rows, heads = np.nonzero(beyond if leaks else found.moved)
        if "perturbed" in place:
            self._note_blocks(np.nonzero(found.moved)[0], document, place)
            self._note_pairs(rows, place, found.size[rows, heads], leaks)
        if self.leaks and not leaks:
            return
        largest = int(np.argmax(found.excess[rows, heads]))
        row, head = int(rows[largest]), int(heads[largest])
        excess = float(found.excess[row, head])
        if not self.worst or excess > self.worst["times_rounding"]:
            at = {"position": row, "head": head, "output": output}
            self.worst = {**place, **at, "change": float(found.size[row, head]), "times_rounding": excess}

    def _note_blocks(self, rows: np.ndarray, document: Document, place: dict) -> None:
        self._longest = max(self._longest, document.queries)
        shift = document.keys - document.queries
        for origin, size in list(self._blocks):
            start = shift + (document.k.start if origin == "pack" else 0)
            if ((rows + start) // size != (place["perturbed"] + start) // size).any():
                self._blocks.remove((origin, size))

    def _note_pairs(self, rows: np.ndarray, place: dict, sizes: np.ndarray, leaks: bool) -> None:
        if leaks or not self.leaks:
            self.reach = max(self.reach, int(place["perturbed"] - rows.min()))
        for row in np.unique(rows):
            if len(self.examples) < _EXAMPLES:
                change = float(sizes[rows == row].max())
                self.examples.append({**place, "position": int(row), "change": change, "leak": leaks})

    @property
    def result(self) -> str:
        """exact, rounding, noise or fails; not checked where nothing was compared."""
        if not self.probes:
            return "not checked"
        if self.leaks or not self.moved:
            return "fails" if self.leaks else "exact"
        return "rounding" if self.worst["times_rounding"] <= 1 else "noise"

    def inside(self) -> str:
        """The smallest block that all that moved stayed in, in words; a document must be twice as long to show it."""
        blocks = [block for block in self._blocks if 2 * block[1] <= self._longest]
        if not self.leaks or not blocks:
            return ""
        origin, size = min(blocks, key=lambda block: (block[1], block[0]))
        return f", always inside a block of {size} counted from the {origin}'s start"

    def worst_words(self, cause: str) -> str:
        """The largest change, with what it came from."""
        worst = self.worst
        side = "query" if worst["output"] in QUERY_SIDE else "key"
        bounded = np.isfinite(worst["change"])
        how = f"by {worst['change']:.2g} of its row" if bounded else "to or from NaN or Inf"
        words = f"{worst['output']} of document {worst['document']}, {side} {worst['position']}, head {worst['head']}, "
        words += f"changed {how} {cause}"
        if "perturbed" in worst:
            tensor = "all inputs" if worst["tensor"] == "all" else worst["tensor"]
            words += f" ({worst['perturbation']} of {tensor} at token {worst['perturbed']})"
        elif "perturbation" in worst:
            words += f" ({worst['perturbation']})"
        return words

    def figures(self) -> dict[str, Any]:
        """For Check.figures."""
        return {
            "probes": self.probes,
            "moved": self.moved,
            "leaks": self.leaks,
            "reach_tokens": self.reach,
            "worst": self.worst,
            "examples": self.examples,
        }
