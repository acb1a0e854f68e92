"""`mxflash compare`: bits, tolerance, and what cannot be compared."""

import json
import math

import command_line
from command_line import Tensor, capture, normal, offsets


class Compare(command_line.CommandLineTest):
    def pair(self, a, b):
        return self.write(a, "a"), self.write(b, "b")

    def entry(self, a, b, *arguments, code):
        result = self.results("compare", *self.pair({"x": a}, {"x": b}), *arguments, code=code)
        self.assertEqual(len(result["tensors"]), 1)
        return result["tensors"][0]

    def test_equal_files(self):
        tensors = capture(cu=[0, 48])
        result = self.results("compare", *self.pair(tensors, tensors))
        self.assertTrue(result["equal"])
        self.assertEqual([entry["name"] for entry in result["tensors"]], sorted(tensors))
        for entry in result["tensors"]:
            self.assertTrue(entry["equal"])
            self.assertEqual((entry["cosine"], entry["max_abs"], entry["worst"]), (1, 0, None))
        self.assertIn("equal", self.succeed("compare", *self.pair(tensors, tensors)).stdout)

    def test_a_difference_and_its_place(self):
        a = normal("F32", [5, 2, 8], 1)
        b = Tensor("F32", [5, 2, 8], list(a.values))
        b.values[3 * 16 + 1 * 8 + 6] += 0.5
        entry = self.entry(a, b, code=1)
        self.assertFalse(entry["equal"])
        self.assertEqual(entry["worst"]["index"], [3, 1, 6])
        self.assertAlmostEqual(entry["max_abs"], 0.5, places=6)
        self.assertAlmostEqual(entry["worst"]["want"] - entry["worst"]["got"], 0.5, places=6)
        dot = sum(x * y for x, y in zip(a.values, b.values, strict=True))
        norms = math.sqrt(sum(x * x for x in a.values) * sum(y * y for y in b.values))
        self.assertAlmostEqual(entry["cosine"], dot / norms, places=6)
        self.assertAlmostEqual(entry["relative_l2"], 0.5 / math.sqrt(sum(y * y for y in b.values)), places=6)

    def test_tolerance(self):
        a = Tensor("F32", [2], [1.0, 2.0])
        b = Tensor("F32", [2], [1.0, 2.25])
        self.entry(a, b, code=1)
        self.entry(a, b, "--tolerance", "0.2", code=1)
        self.assertFalse(self.entry(a, b, "--tolerance", "0.25", code=0)["equal"])
        for text in ["-1", "x", "nan", "inf"]:
            self.refuse("compare", *self.pair({"x": a}, {"x": b}), "--tolerance", text, words=["--tolerance"])

    def test_signed_zero_differs_in_its_bits(self):
        a, b = Tensor("F32", [1], [0.0]), Tensor("F32", [1], [-0.0])
        self.assertFalse(self.entry(a, b, code=1)["equal"])
        self.entry(a, b, "--tolerance", "0", code=0)

    def test_nan_and_inf(self):
        nan, inf = math.nan, math.inf
        self.assertTrue(
            self.entry(Tensor("F32", [3], [nan, inf, 1]), Tensor("F32", [3], [nan, inf, 1]), code=0)["equal"]
        )
        for a, b in [([1.0, nan, nan], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, inf, 3.0]), ([1, -inf], [1, inf])]:
            entry = self.entry(Tensor("F32", [len(a)], a), Tensor("F32", [len(b)], b), "--tolerance", "1e30", code=1)
            self.assertIsNone(entry["cosine"])
            self.assertIsNone(entry["max_abs"])
            self.assertEqual(entry["worst"]["index"], [1])
            self.assertGreater(entry["non_finite_mismatches"], 0)

    def test_zero_tensors(self):
        zero, one = Tensor("F32", [2], [0.0, 0.0]), Tensor("F32", [2], [1.0, 0.0])
        self.assertEqual(self.entry(zero, zero, code=0)["cosine"], 1)
        entry = self.entry(one, zero, code=1)
        self.assertEqual((entry["cosine"], entry["relative_l2"]), (0, None))
        empty = Tensor("F32", [0, 3], [])
        self.assertTrue(self.entry(empty, empty, code=0)["equal"])

    def test_integers(self):
        entry = self.entry(offsets(0, 5, 9), offsets(0, 7, 9), code=1)
        self.assertEqual(entry["worst"], {"index": [1], "got": 5, "want": 7})
        self.entry(offsets(1, 2, dtype="I64"), offsets(1, 2, dtype="I64"), code=0)
        self.entry(Tensor("U8", [1], [255]), Tensor("U8", [1], [0]), code=1)

    def test_names_types_and_shapes(self):
        one = Tensor("F32", [2], [1.0, 2.0])
        result = self.results("compare", *self.pair({"x": one, "y": one}, {"x": one, "z": one}), code=1)
        differences = {entry["name"]: entry["difference"] for entry in result["tensors"]}
        self.assertEqual(differences, {"x": None, "y": "only in A", "z": "only in B"})
        for other in [Tensor("F32", [2, 1], [1.0, 2.0]), Tensor("BF16", [2], [1.0, 2.0])]:
            entry = self.entry(one, other, "--tolerance", "9", code=1)
            self.assertIn("F32 [2] in A", entry["difference"])

    def test_json_file_and_table(self):
        a, b = self.pair({"x": Tensor("F32", [1], [1.0])}, {"x": Tensor("F32", [1], [2.0])})
        table = self.succeed("compare", a, b, "--json", self.path("c.json"), code=1).stdout
        self.assertIn("differ", table)
        self.assertFalse(json.loads((self.folder / "c.json").read_text())["equal"])

    def test_refusals(self):
        good = self.write(capture(), "good")
        self.refuse("compare", good, self.path("none"), words=["none"])
        self.refuse("compare", self.path("none"), good, words=["none"])
        (self.folder / "short").write_bytes((self.folder / "good").read_bytes()[:-1])
        self.refuse("compare", good, self.path("short"), words=["short"])
        self.refuse("compare", good, words=["B: none given"])
        self.refuse("compare", good, good, "--json", good, words=["--json", "input"])


if __name__ == "__main__":
    command_line.main()
