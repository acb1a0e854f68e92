"""What a probe changes, and how."""

import numpy as np

from mxflash._audit.layout import Document

KINDS = ("outlier", "resample", "raise", "lower", "denormal")
TARGETS = ("all", "v", "k", "q", "do")
ALONE = frozenset(("outlier", "raise"))
"""Kinds that change one token; the others change all later ones too."""
_RESIDUES = 256


class Probes:
    """Changed copies of the inputs, drawn from one seed."""

    def __init__(self, inputs: dict[str, np.ndarray], largest: float, smallest_normal: float, seed: int):
        self._inputs = inputs
        self._largest = largest
        self._smallest_normal = smallest_normal
        self._sizes = {
            name: (float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0, values)
            for name, values in inputs.items()
        }
        self.random = np.random.default_rng([seed, 1])
        self._step = 0

    def copy(self) -> dict[str, np.ndarray]:
        """The inputs, to be changed."""
        return {name: values.copy() for name, values in self._inputs.items()}

    def position(self, length: int) -> int:
        """The next token to change, 1 or later: all residues modulo 256 in turn (97 is odd), at random multiples."""
        self._step += 1
        residue = 97 * self._step % _RESIDUES
        periods = max((length - 1 - residue) // _RESIDUES + 1, 1)
        position = residue + _RESIDUES * int(self.random.integers(periods))
        return position if 0 < position < length else 1 + position % (length - 1)

    def change(self, tensors: dict, target: str, kind: str, queries: slice, keys: slice) -> None:
        """Changes rows of q and do (queries of the pack) and of k and v (keys of the pack), in all heads."""
        for name, rows in (("q", queries), ("k", keys), ("v", keys), ("do", queries)):
            if name in tensors and target in ("all", name):
                tensors[name][rows] = self._changed(name, tensors[name][rows], kind)

    def change_later(self, tensors: dict, target: str, kind: str, document: Document, token: int) -> tuple:
        """Changes token `token` of a document, alone or with all later ones; masks of its changed queries and keys."""
        key = min(max(token + document.keys - document.queries, 0), document.keys)
        alone = kind in ALONE
        queries = np.zeros(document.queries, bool)
        keys = np.zeros(document.keys, bool)
        queries[token : token + 1 if alone else None] = True
        keys[key : key + 1 if alone else None] = True
        changed = [
            slice(whole.start + start, whole.start + start + int(mask.sum()))
            for whole, start, mask in ((document.q, token, queries), (document.k, key, keys))
        ]
        self.change(tensors, target, kind, *changed)
        return queries, keys

    def _changed(self, name: str, values: np.ndarray, kind: str) -> np.ndarray:
        rms, original = self._sizes[name]
        if kind == "lower":
            return np.zeros_like(values)
        if kind == "raise":
            return np.clip(values * 64.0, -self._largest, self._largest)
        if kind == "resample":
            return (rms * self.random.standard_normal(values.shape)).astype(np.float32)
        signs = np.where(self.random.random(values.shape) < 0.5, -1.0, 1.0).astype(np.float32)
        if kind == "denormal":
            return signs * np.float32(self._smallest_normal)
        return signs * np.float32(min(2.0**20 * float(np.abs(original).max(initial=0)), self._largest))
