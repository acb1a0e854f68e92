"""Text files as packs: files are documents, documents are cut into pieces, pieces fill packs without padding."""

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

BOUNDARY = 256  # The symbol before the first byte and after the last one of a document.
SYMBOLS = 257


class Piece(NamedTuple):
    """Positions start to stop of a document; position i reads symbol i and predicts symbol i + 1."""

    document: bytes
    start: int
    stop: int


class Pack(NamedTuple):
    tokens: Tensor  # int64 [tokens]
    targets: Tensor  # int64 [tokens]
    places: Tensor  # int64 [tokens], counted anew in each piece
    cu_seqlens: Tensor  # int32 [pieces + 1]

    def to(self, device: str) -> "Pack":
        return Pack(*(tensor.to(device) for tensor in self))


def default_paths() -> list[Path]:
    """Text that most machines have: licenses, perl's library and python's."""
    paths = [Path("/usr/share/common-licenses"), Path("/usr/share/perl"), Path(sysconfig.get_path("stdlib"))]
    return [path for path in paths if path.exists()]


def read_documents(paths: Iterable[Path]) -> tuple[list[bytes], list[bytes]]:
    """(training, validation) documents: every text file below the paths, each content once.

    A document's own hash decides where it goes, about one in sixteen to validation: no seed and no other file can
    move it. What holds a NUL byte is no text.
    """
    documents: dict[bytes, bytes] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data: {path} given, which does not exist; files or directories allowed")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            content = file.read_bytes() if file.is_file() and "site-packages" not in file.parts else b""
            if content and b"\0" not in content:
                documents[hashlib.sha256(content).digest()] = content
    split: tuple[list[bytes], list[bytes]] = ([], [])
    for digest in sorted(documents):
        split[digest[0] < 16].append(documents[digest])
    if not all(split):
        raise ValueError(f"--data: {len(documents)} text files given, at least one to train and one to validate needed")
    return split


def cut(documents: Iterable[bytes], context: int) -> list[Piece]:
    """Every position of every document once, in pieces of at most `context`."""
    return [
        Piece(document, start, min(start + context, len(document) + 1))
        for document in documents
        for start in range(0, len(document) + 1, context)
    ]


def fill(pieces: Iterable[Piece], tokens: int) -> Iterator[Pack]:
    """Packs of `tokens` positions without padding: a piece that meets the end of a pack goes on in the next one,
    as a piece of its own. Only the last pack may be shorter."""
    row: list[Piece] = []
    room = tokens
    for document, start, stop in pieces:
        while start < stop:
            middle = min(stop, start + room)
            row.append(Piece(document, start, middle))
            room -= middle - start
            start = middle
            if room == 0:
                yield _pack(row)
                row, room = [], tokens
    if row:
        yield _pack(row)


def _pack(row: list[Piece]) -> Pack:
    tokens, targets, places, ends = [], [], [], [0]
    for document, start, stop in row:
        symbols = list(document[max(0, start - 1) : stop])
        symbols = [BOUNDARY] * (start == 0) + symbols + [BOUNDARY] * (stop > len(document))
        tokens += symbols[:-1]
        targets += symbols[1:]
        places += range(stop - start)
        ends.append(ends[-1] + stop - start)
    return Pack(*map(torch.tensor, (tokens, targets, places)), torch.tensor(ends, dtype=torch.int32))


def endless(pieces: list[Piece], seed: int) -> Iterator[Piece]:
    """Epoch after epoch, each in an order of its own."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(pieces, len(pieces))
