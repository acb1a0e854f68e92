"""What the tests of the command line share: safetensors in and out, runs, and what a refusal has to look like.

The standard library is enough. MXFLASH names the program.
"""

import dataclasses
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM = os.environ.get("MXFLASH", "mxflash")
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1}
CODES = {"F16": "e", "F32": "f", "I32": "i", "I64": "q", "U8": "B"}


@dataclasses.dataclass
class Tensor:
    dtype: str
    shape: list
    values: list

    def __getitem__(self, index):
        flat = 0
        for place, extent in zip(index, self.shape, strict=True):
            flat = flat * extent + place
        return self.values[flat]


def pack(dtype, values):
    if dtype != "BF16":
        return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
    halves = []
    for value in values:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        rounded = bits if not math.isfinite(value) else bits + 0x7FFF + ((bits >> 16) & 1)
        halves.append((rounded >> 16) & 0xFFFF)
    return struct.pack(f"<{len(halves)}H", *halves)


def unpack(dtype, data):
    if dtype != "BF16":
        return list(struct.unpack(f"<{len(data) // SIZES[dtype]}{CODES[dtype]}", data))
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]


def write_safetensors(path, tensors, metadata=None):
    header = {"__metadata__": metadata} if metadata else {}
    blobs = []
    end = 0
    for name, tensor in tensors.items():
        blob = pack(tensor.dtype, tensor.values)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        blob = data[8 + length + begin : 8 + length + end]
        tensors[name] = Tensor(entry["dtype"], entry["shape"], unpack(entry["dtype"], blob))
    return tensors, metadata


def normal(dtype, shape, seed):
    generator = random.Random(seed)
    return Tensor(dtype, list(shape), [generator.gauss(0, 1) for _ in range(math.prod(shape))])


def full(dtype, shape, value):
    return Tensor(dtype, list(shape), [value] * math.prod(shape))


def offsets(*values, dtype="I32"):
    return Tensor(dtype, [len(values)], list(values))


def capture(tokens=48, heads=2, kv_heads=1, head_dim=32, dtype="BF16", cu=None):
    """q, k, v, do of normal values and, where cu is given, cu_seqlens."""
    tensors = {
        "q": normal(dtype, [tokens, heads, head_dim], 1),
        "k": normal(dtype, [tokens, kv_heads, head_dim], 2),
        "v": normal(dtype, [tokens, kv_heads, head_dim], 3),
        "do": normal(dtype, [tokens, heads, head_dim], 4),
    }
    if cu is not None:
        tensors["cu_seqlens"] = offsets(*cu)
    return tensors


class CommandLineTest(unittest.TestCase):
    """Each test has a directory of its own."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def path(self, name):
        return str(self.folder / name)

    def write(self, tensors, name="in.safetensors", metadata=None):
        write_safetensors(self.path(name), tensors, metadata)
        return self.path(name)

    def listing(self):
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in self.folder.rglob("*")}

    def call(self, *arguments):
        return subprocess.run(
            [PROGRAM, *map(str, arguments)], capture_output=True, text=True, cwd=self.folder, timeout=600, check=False
        )

    def succeed(self, *arguments, code=0):
        """Runs, demands the exit code, and nothing on standard error where the code is 0."""
        done = self.call(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        if code == 0:
            self.assertEqual(done.stderr, "", arguments)
        return done

    def results(self, *arguments, code=0):
        """The JSON that `--json -` leaves on standard output: that alone."""
        return json.loads(self.succeed(*arguments, "--json", "-", code=code).stdout)

    def refuse(self, *arguments, words=(), code=2):
        """Exit code, one line with the words on standard error, no other output, no file made or changed."""
        before = self.listing()
        done = self.call(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "", arguments)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, f"{arguments}: {done.stderr}")
        self.assertTrue(lines[0].startswith("mxflash: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0], f"{arguments}")
        self.assertEqual(self.listing(), before, f"{arguments} left files behind")
        return lines[0]


def main():
    """unittest.main, except that no test at all is a failure."""
    program = unittest.main(exit=False)
    sys.exit(not (program.result.wasSuccessful() and program.result.testsRun > 0))
