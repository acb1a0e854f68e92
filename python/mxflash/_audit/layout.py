"""Where documents lie in the pack, and what each query may see."""

from typing import NamedTuple

import numpy as np

from mxflash._attention import Mask

QUERY_SIDE = ("q", "do", "o", "lse", "dq")
"""Inputs and results that have a row a query; the others have one a key."""


class Document(NamedTuple):
    """Its rows in q and in k."""

    q: slice
    k: slice

    @property
    def queries(self) -> int:
        return self.q.stop - self.q.start

    @property
    def keys(self) -> int:
        return self.k.stop - self.k.start

    def rows(self, name: str) -> slice:
        """Its rows in an input or a result."""
        return self.q if name in QUERY_SIDE else self.k


class Layout:
    """Documents of a pack under a mask."""

    def __init__(self, cu_q: np.ndarray, cu_k: np.ndarray, mask: Mask):
        self.cu_q, self.cu_k, self.mask = cu_q, cu_k, mask
        ends = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        self.documents = [Document(slice(int(a), int(b)), slice(int(c), int(d))) for a, b, c, d in ends]

    def moved(self, order: list[int]) -> "Layout":
        """The same documents in another order."""
        queries = [self.documents[index].queries for index in order]
        keys = [self.documents[index].keys for index in order]
        return Layout(np.cumsum([0, *queries]), np.cumsum([0, *keys]), self.mask)

    def visible(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        """First and past-the-last visible key of each query; the same number twice where there is none."""
        own = np.arange(document.queries) + document.keys - document.queries
        left, right = self.mask
        first = np.zeros_like(own) if left is None else np.clip(own - left, 0, document.keys)
        last = np.full_like(own, document.keys) if right is None else np.clip(own + right + 1, 0, document.keys)
        return np.minimum(first, last), last

    def may_move(self, document: Document, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of queries and of keys depend on the changed ones (masks of the document's length).

        A row of o, lse and dq depends on its query and on the keys it sees; a row of dk and dv on its key and on all
        that the queries that see it depend on.
        """
        first, last = self.visible(document)
        before = np.concatenate(([0], np.cumsum(keys)))
        rows = queries | (before[last] > before[first])
        touched = np.zeros(document.keys + 1, np.int64)
        np.add.at(touched, first[rows], 1)
        np.add.at(touched, last[rows], -1)
        return rows, keys | (np.cumsum(touched)[:-1] > 0)
