"""`mxflash quantize`: codes, scales and values, checked against each other by tables of the formats."""

import math

import command_line
from command_line import Tensor, capture, normal, offsets, read_safetensors

# exponent bits, mantissa bits, bias, largest value
FORMATS = {
    "e4m3": (4, 3, 7, 448),
    "e5m2": (5, 2, 15, 57344),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28),
    "e2m1": (2, 1, 1, 6),
}


def decode(name, code):
    exponent_bits, mantissa_bits, bias, _ = FORMATS[name]
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    field = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << mantissa_bits) - 1)
    if field:
        fraction += 1 << mantissa_bits
    return sign * fraction * 2.0 ** (max(field, 1) - bias - mantissa_bits)


class Quantize(command_line.CommandLineTest):
    def quantize(self, source, *arguments, tensor="q"):
        self.succeed("quantize", source, "--tensor", tensor, "--out", self.path("out"), *arguments)
        return read_safetensors(self.path("out"))

    def blocks(self, shape, block, documents):
        """The blocks of [tokens, heads, dims] as (scale place, elements)."""
        kind, _, size = block.partition(":")
        rows = {"token": 1, "tokens": int(size or 1), "dims": 1, "channel": int(size or 1), "square": 32}[kind]
        columns = {"token": shape[2], "tokens": shape[2], "dims": int(size or 1), "channel": 1, "square": 32}[kind]
        scale_row = 0
        for begin, end in documents:
            for first in range(begin, end, rows):
                for head in range(shape[1]):
                    for column in range(0, shape[2], columns):
                        elements = [
                            (token, head, dim)
                            for token in range(first, min(first + rows, end))
                            for dim in range(column, min(column + columns, shape[2]))
                        ]
                        yield (scale_row, head, column // columns), elements
                scale_row += 1

    def test_every_format_and_block(self):
        tensors = capture(tokens=75, heads=2, head_dim=64, dtype="F32", cu=[0, 35, 35, 75])
        source = self.write(tensors)
        documents = [(0, 35), (35, 75)]
        for name, (_, mantissa_bits, bias, largest) in FORMATS.items():
            for block in ["token", "tokens:32", "dims:32", "channel:32", "square:32"]:
                with self.subTest(format=name, block=block):
                    out, metadata = self.quantize(source, "--format", name, "--block", block)
                    self.assertEqual((metadata["format"], metadata["block"]), (name, block))
                    self.assertEqual(out["codes"].shape, [75, 2, 64])
                    self.assertEqual((out["codes"].dtype, out["scales"].dtype), ("U8", "U8"))
                    self.assertEqual(out["dequantized"].dtype, "F32")
                    count = 0
                    for place, elements in self.blocks([75, 2, 64], block, documents):
                        count += 1
                        scale = 2.0 ** (out["scales"][place] - 127)
                        maximum = max(abs(tensors["q"][element]) for element in elements)
                        maximum32 = command_line.struct.unpack("f", command_line.struct.pack("f", maximum))[0]
                        self.assertEqual(scale, 2.0 ** math.ceil(math.log2(maximum32 / largest)), place)
                        for element in elements:
                            value = decode(name, out["codes"][element]) * scale
                            self.assertEqual(out["dequantized"][element], value, element)
                            exact = tensors["q"][element]
                            step = max(abs(exact) * 2.0**-mantissa_bits, scale * 2.0 ** (1 - bias - mantissa_bits))
                            self.assertLessEqual(abs(value - exact), step / 2 * 1.0001, element)
                    self.assertEqual(count, math.prod(out["scales"].shape))

    def test_nvfp4(self):
        tensors = capture(tokens=40, heads=2, head_dim=64, cu=[0, 3, 40])
        source = self.write(tensors)
        for block in ["dims:16", "channel:16"]:
            out, metadata = self.quantize(source, "--format", "nvfp4", "--block", block)
            self.assertEqual(metadata["format"], "nvfp4")
            self.assertIn("UE4M3", metadata["scale_layout"])
            for place, elements in self.blocks([40, 2, 64], block, [(0, 3), (3, 40)]):
                scale = decode("e4m3", out["scales"][place])
                maximum = max(abs(tensors["q"][element]) for element in elements)
                self.assertLess(abs(scale - maximum / 6), maximum / 6 * 0.07 + 2**-9, place)
                for element in elements:
                    self.assertEqual(
                        out["dequantized"][element], decode("e2m1", out["codes"][element]) * scale, element
                    )

    def test_c18_scale_rules(self):
        cases = [
            ("e4m3", "floor", 957, 896),
            ("e4m3", "ceil", 957, 960),
            ("e4m3", "floor", 449, 448),
            ("e4m3", "ceil", 449, 448),
            ("e4m3", "floor", 511, 448),
            ("e4m3", "ceil", 511, 512),
            ("e2m1", "floor", 7, 6),
            ("e2m1", "ceil", 7, 8),
            ("e2m1", "floor", 7.99, 6),
            ("e2m1", "ceil", 7.99, 8),
            ("e2m1", "uos", 7.25, 6),
            ("e2m1", "uos", 7.26, 8),
            ("e2m1", "ceil", 2.7, 3),
            ("e2m1", "ceil", 5.5, 6),
            ("e2m1", "ceil", 1.2, 1),
        ]
        for name, rule, value, expected in cases:
            with self.subTest(format=name, rule=rule, value=value):
                source = self.write({"q": Tensor("F32", [1, 1, 8], [value] + [0.0] * 7)})
                out, metadata = self.quantize(source, "--format", name, "--block", "token", "--scale-rule", rule)
                self.assertEqual(out["dequantized"].values, [expected] + [0] * 7)
                self.assertEqual(metadata["scale_rule"], rule)

    def test_c15_zero_blocks(self):
        source = self.write({"q": Tensor("F32", [2, 1, 32], [0.0] * 32 + [6.0] * 32)})
        for name, block in [("e4m3", "token"), ("e2m1", "dims:32"), ("nvfp4", "dims:16")]:
            out, _ = self.quantize(source, "--format", name, "--block", block)
            self.assertEqual(out["dequantized"].values, [0.0] * 32 + [6.0] * 32)
            self.assertEqual(out["codes"].values[:32], [0] * 32)

    def test_key_side_offsets(self):
        tensors = {
            "q": normal("F32", [40, 1, 32], 1),
            "k": normal("F32", [50, 1, 32], 2),
            "cu_seqlens_q": offsets(0, 1, 40),
            "cu_seqlens_k": offsets(0, 33, 50),
        }
        source = self.write(tensors)
        out, _ = self.quantize(source, "--format", "e4m3", "--block", "tokens:32", tensor="k")
        self.assertEqual(out["scales"].shape, [3, 1, 1])
        out, _ = self.quantize(source, "--format", "e4m3", "--block", "tokens:32", tensor="q")
        self.assertEqual(out["scales"].shape, [3, 1, 1])

    def test_tensor_block(self):
        source = self.write(capture(dtype="F32"))
        out, metadata = self.quantize(source, "--format", "e4m3", "--block", "tensor")
        self.assertEqual((out["scales"].dtype, out["scales"].shape), ("F32", [1]))
        self.assertIn("F32", metadata["scale_layout"])
        scale = out["scales"].values[0]
        for code, value in zip(out["codes"].values, out["dequantized"].values, strict=True):
            self.assertAlmostEqual(value, decode("e4m3", code) * scale, delta=abs(value) * 1e-6)

    def test_hadamard_keeps_norms_up_to_a_power_of_two(self):
        source = self.write(capture(tokens=4, head_dim=64, dtype="F32"))
        out, metadata = self.quantize(source, "--format", "e4m3", "--block", "token", "--hadamard")
        self.assertEqual(metadata["hadamard"], "true")
        original = command_line.capture(tokens=4, head_dim=64, dtype="F32")["q"].values
        for row in range(8):
            before = sum(value**2 for value in original[row * 64 : row * 64 + 64])
            after = sum(value**2 for value in out["dequantized"].values[row * 64 : row * 64 + 64])
            ratio = after / before
            self.assertAlmostEqual(ratio, 2.0 ** round(math.log2(ratio)), delta=0.05 * ratio, msg=row)
        self.refuse(
            *["quantize", self.write(capture(head_dim=96)), "--tensor", "q", "--format", "e4m3", "--block", "token"],
            *["--hadamard", "--out", self.path("out")],
            words=["96"],
        )

    def test_stochastic_rounding(self):
        source = self.write({"q": command_line.full("F32", [64, 1, 64], 4.8)})
        arguments = ["--format", "e2m1", "--block", "token", "--rounding", "stochastic"]
        first, _ = self.quantize(source, *arguments, "--seed", "1")
        same, _ = self.quantize(source, *arguments, "--seed", "1")
        other, _ = self.quantize(source, *arguments, "--seed", "2")
        self.assertEqual(first, same)
        self.assertNotEqual(first["codes"].values, other["codes"].values)
        values = first["dequantized"].values
        self.assertEqual(set(values), {4.0, 6.0})
        self.assertAlmostEqual(sum(values) / len(values), 4.8, delta=0.1)

    def test_nan_and_inf_are_in_the_scale(self):
        for bad in [math.nan, math.inf, -math.inf]:
            tensor = Tensor("F32", [2, 1, 32], [1.0] * 64)
            tensor.values[5] = bad
            out, _ = self.quantize(self.write({"q": tensor}), "--format", "e4m3", "--block", "token")
            self.assertEqual(out["scales"].values[0], 0xFF)
            self.assertEqual(out["codes"].values[:32], [0] * 32)
            self.assertTrue(all(math.isnan(value) for value in out["dequantized"].values[:32]))
            self.assertEqual(out["dequantized"].values[32:], [1.0] * 32)

    def test_zero_tokens(self):
        out, _ = self.quantize(self.write({"q": Tensor("F32", [0, 1, 32], [])}), "--format", "e4m3", "--block", "token")
        self.assertEqual(out["codes"].shape, [0, 1, 32])

    def test_refusals(self):
        source = self.write(capture())
        base = {"--tensor": "q", "--format": "e4m3", "--block": "token", "--out": self.path("out")}
        cases = [
            ({"--tensor": "w"}, ["--tensor", "'w'", "do, k, q, v"]),
            ({"--format": "e4m4"}, ["--format", "e4m4", "nvfp4"]),
            ({"--format": "f32"}, ["--format", "f32"]),
            ({"--block": "token:3"}, ["--block", "token:3"]),
            ({"--block": "rows"}, ["--block", "rows", "tokens:32"]),
            ({"--format": "nvfp4"}, ["--block", "nvfp4", "dims:16"]),
            ({"--format": "nvfp4", "--block": "dims:16", "--scale-rule": "ceil"}, ["--scale-rule", "nvfp4"]),
            ({"--block": "dims:16"}, ["block", "dims:16", "nvfp4"]),
            ({"--scale-rule": "uos"}, ["--scale-rule", "uos", "e2m1"]),
            ({"--scale-rule": "round"}, ["--scale-rule", "round", "floor"]),
            ({"--rounding": "up"}, ["--rounding", "up", "nearest"]),
            ({"--seed": "-1"}, ["--seed", "-1"]),
            ({"--out": source}, ["--out", "input"]),
            ({"--out": self.path("none/out")}, ["--out", "directory"]),
        ]
        for change, words in cases:
            with self.subTest(change=change):
                arguments = [part for pair in {**base, **change}.items() for part in pair]
                self.refuse("quantize", source, *arguments, words=words)
        arguments = [part for pair in base.items() for part in pair]
        self.refuse("quantize", self.path("none"), *arguments, words=["none"])
        self.refuse("quantize", self.write({"q": offsets(0, 1)}), *arguments, words=["q: ", "I32"])
        bad = {**capture(), "cu_seqlens": offsets(0, 47)}
        self.refuse("quantize", self.write(bad), *arguments, words=["cu_seqlens"])
        for name in base:
            kept = [part for pair in base.items() if pair[0] != name for part in pair]
            self.refuse("quantize", source, *kept, words=[f"{name}: none given"])


if __name__ == "__main__":
    command_line.main()
