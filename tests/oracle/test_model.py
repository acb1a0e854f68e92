"""The built program against the second model of the contract (model.py), element by element.

MXFLASH_BINARY names the program. Inputs and outputs are FP32, so that nothing is lost on the way.

Tolerance. Codes and scales have to agree, so what is left is the rounding of the outputs to FP32, 2^-24, and of sums in
double, 2^-53. The latter can flip a code only where a value lies that close to a tie, and no tie is likely but those of
exact values, which both sides compute exactly. Hence 1e-6 of the row's largest value. The absolute part is for rows
that are zero but for rounding: the gradient of a query with one key is the difference of two equal numbers.
"""

import copy
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import numpy as np

import model

PROGRAM = os.environ["MXFLASH_BINARY"]
RELATIVE = 1e-6
OF_LARGEST = 1e-11
CAUSAL, FULL = (None, 0), (None, None)


def write_safetensors(path, tensors, metadata):
    header, blob = {"__metadata__": metadata}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        dtype = {"float32": "F32", "int32": "I32"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + blob)


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert entry["dtype"] == "F32", (name, entry)
            values = np.frombuffer(data[8 + length + begin : 8 + length + end], np.float32)
            tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
    return tensors


def make_inputs(lengths, dims, value_dims, heads, kv_heads, seed=1, dout_scale=1.0):
    """Packed documents of (queries, keys). Tokens differ in size by powers of two, so that exponents have to shift; one
    channel of each tensor is larger than the others; the softmax is neither flat nor one key alone.
    """
    generator = np.random.default_rng(seed)
    cu_q, cu_k = (np.cumsum([0, *column], dtype=np.int32) for column in zip(*lengths, strict=True))

    def normal(tokens, heads, dims, channel, sizes):
        values = generator.standard_normal((tokens, heads, dims))
        values[..., channel] *= 20
        values *= 2.0 ** generator.integers(*sizes, (tokens, heads, 1))
        return values.astype(np.float32)

    return {
        "q": normal(cu_q[-1], heads, dims, 3, (-8, 2)),
        "k": normal(cu_k[-1], kv_heads, dims, 5, (-8, 2)),
        "v": normal(cu_k[-1], kv_heads, value_dims, 3, (-6, 6)),
        "do": (normal(cu_q[-1], heads, value_dims, 7, (-6, 6)) * np.float32(dout_scale)).astype(np.float32),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
    }


def poison(inputs):
    """A NaN or Inf in q, k, v and dO, each in a document of its own, and no query or key the first."""
    for document, (name, value) in enumerate([("q", np.nan), ("k", np.inf), ("v", np.nan), ("do", -np.inf)]):
        begin = inputs["cu_seqlens_q" if name in ("q", "do") else "cu_seqlens_k"][document]
        inputs[name][begin + 17, 0, 5] = value
    return inputs


def run_program(arguments):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{arguments}: exit {done.returncode}: {done.stderr}")
    return done.stdout


def with_dlse(inputs, poisoned=()):
    """The same with a gradient of lse, some rows' a hundred times that of others; NaN and Inf at (token, head)."""
    generator = np.random.default_rng(11)
    shape = inputs["q"].shape[:2]
    dlse = 3 * generator.standard_normal(shape) * 10.0 ** generator.integers(-1, 2, shape)
    for place, value in poisoned:
        dlse[place] = value
    return {**inputs, "dlse": dlse.astype(np.float32)}


RECIPES = {recipe["name"]: recipe for recipe in json.loads(run_program(["recipes", "--json", "-"]))}
SEQUENCES = [(1, 1), (33, 33), (70, 70), (150, 150)]
CASES = {
    "causal": (make_inputs(SEQUENCES, 64, 64, 4, 2), CAUSAL),
    "rotated": (make_inputs([(33, 70), (70, 33), (0, 5), (5, 0), (40, 150)], 128, 64, 2, 1, seed=2), CAUSAL),
    "full": (make_inputs([(1, 1), (33, 20), (70, 150)], 40, 128, 2, 2, seed=3, dout_scale=1e-7), FULL),
    "full-64": (make_inputs([(70, 150)], 64, 32, 2, 1, seed=4, dout_scale=1e-7), FULL),
    "window": (make_inputs([(1, 1), (150, 70), (70, 150)], 32, 40, 3, 1, seed=5), (40, 0)),
    "window-ahead": (make_inputs([(33, 33), (150, 150)], 32, 24, 2, 1, seed=6), (50, 20)),
    "dlse": (with_dlse(make_inputs([(1, 1), (70, 33), (150, 150)], 64, 40, 4, 2, seed=8)), CAUSAL),
    # Of the second, the first 37 queries see no key.
    "dlse-poisoned": (
        with_dlse(
            make_inputs([(40, 40), (70, 33), (60, 150)], 128, 64, 2, 1, seed=9),
            [((17, 0), np.nan), ((45, 1), np.inf), ((105, 0), -np.inf), ((120, 1), np.nan)],
        ),
        CAUSAL,
    ),
    "poisoned": (poison(make_inputs([(50, 50), (70, 40), (40, 70), (150, 150)], 64, 40, 2, 1, seed=7)), CAUSAL),
}


def row_error(got, want):
    """Of every element, its error over what is allowed; infinite where one is NaN or Inf and the other not."""
    finite = np.isfinite(want)
    magnitude = np.where(finite, np.abs(want), 0)
    row = magnitude.max(-1, keepdims=True) if got.ndim == 3 else magnitude
    allowed = RELATIVE * row + OF_LARGEST * magnitude.max(initial=0) + 1e-42  # FP32's least subnormals
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        error = np.abs(got - want) / allowed
    return np.where(same, 0, np.where(finite & np.isfinite(got), error, np.inf))


class ModelTest(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def compare(self, name, recipe, case, causality=None, seed=(7 << 32) + 5, scale=None):
        inputs, (left, right) = CASES[case]
        dims = inputs["q"].shape[-1]
        if recipe["hadamard"] == "required" and dims & (dims - 1):
            return
        source, out, own = (str(self.folder / file) for file in ("in.safetensors", "out.safetensors", "recipe.json"))
        write_safetensors(source, inputs, {} if scale is None else {"softmax_scale": repr(scale)})
        pathlib.Path(own).write_text(json.dumps(recipe))
        arguments = ["run", source, "--engine", "reference", "--recipe", own, "--seed", str(seed), "--out", out]
        arguments += ["--json", str(self.folder / "run.json")]
        if (left, right) != CAUSAL:
            bounds = ",".join("inf" if bound is None else str(bound) for bound in (left, right))
            arguments += ["--full", *([] if (left, right) == FULL else ["--window", bounds])]
        if causality is not None:
            arguments += ["--causality", causality]
        run_program(arguments)
        got = read_safetensors(out)
        followed = model.with_exact_causality(recipe) if causality == "exact" else recipe
        want = model.attention(followed, inputs, left, right, seed, scale)
        self.assertEqual(set(got), set(want), (name, case))
        for output, values in want.items():
            with self.subTest(recipe=name, case=case, causality=causality, output=output):
                errors = row_error(got[output], values)
                worst = np.unravel_index(np.argmax(errors), errors.shape)
                self.assertLessEqual(
                    errors[worst],
                    1,
                    f"{output}{list(map(int, worst))}: program {got[output][worst]!r}, model {values[worst]!r}, "
                    f"{(errors > 1).sum()} of {errors.size} elements differ",
                )


def main():
    program = unittest.main(exit=False)
    sys.exit(not (program.result.wasSuccessful() and program.result.testsRun > 0))


def changed(recipe, **fields):
    """A recipe of one's own: fields by their path, `__` between the names; claims left to be derived."""
    recipe = copy.deepcopy(recipe)
    del recipe["claims"]
    for path, value in fields.items():
        place = recipe
        *names, last = path.split("__")
        for name in names:
            place = place[name]
        place[last] = value
    return recipe


class BuiltIn(ModelTest):
    """A test a recipe (added below), over all cases."""

    def test_exact_causality(self):
        for name in ("mxfp8", "nvfp4"):
            for case in CASES:
                self.compare(name, RECIPES[name], case, "exact")

    def test_block_causality_changes_nothing_that_is_no_stricter(self):
        for name in ("mxfp8", "mxfp8-tokenblock"):
            self.compare(name, RECIPES[name], "causal", "block")

    def test_exact_causality_of_recipes_that_are_exact(self):
        for name in ("bf16", "fp4", "mxfp4-diagonal"):
            self.compare(name, RECIPES[name], "causal", "exact")

    def test_softmax_scale_of_the_file(self):
        self.compare("mxfp8", RECIPES["mxfp8"], "causal", scale=0.3)
        self.compare("fp4", RECIPES["fp4"], "rotated", scale=-0.01)


def over_all_cases(name):
    def test(self):
        for case in CASES:
            self.compare(name, RECIPES[name], case)

    return test


for recipe_name in RECIPES:
    setattr(BuiltIn, "test_" + recipe_name.replace("-", "_"), over_all_cases(recipe_name))


class OfOnesOwn(ModelTest):
    """What no built-in recipe uses."""

    def compare_changed(self, base, cases, **fields):
        recipe = changed(RECIPES[base], **fields)
        for case in cases:
            self.compare(f"{base} {fields}", recipe, case)

    def test_fp16_accumulation(self):
        for kind in ("f16_sequence", "f16_causal"):
            for base in ("mxfp8", "mxfp4-diagonal", "bf16"):
                cases = ["full", "window", "dlse", "dlse-poisoned", "poisoned"]
                self.compare_changed(base, cases, dq_accumulation=kind)

    def test_mitchell(self):
        self.compare_changed("mxattention", ["causal", "rotated", "window-ahead"], exponential="mitchell")

    def test_schraudolph(self):
        for products in ("mxfp8", "mxfp8-1x32"):
            fields = {product: RECIPES[products][product] for product in ("s", "o")}
            fields |= {"beta": RECIPES[products]["beta"], "hadamard": "off", "exponential": "schraudolph"}
            self.compare_changed("mxattention", ["causal", "full", "window", "poisoned"], **fields)

    def test_the_example_of_the_recipes_page(self):
        page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
        example = json.loads(page.read_text().split("```json")[1].split("```")[0])
        for case in CASES:
            self.compare(example["name"], example, case)

    def test_stochastic_operands(self):
        cases = ["rotated", "poisoned"]
        for place in ("dp__left", "dp__right", "dv__tokens", "dq__weights", "dq__tokens", "dk__weights", "dk__tokens"):
            self.compare_changed("mxfp8", cases, **{place + "__rounding": "stochastic"})
        both = {"dq__weights__rounding": "stochastic", "dk__weights__rounding": "stochastic"}
        self.compare_changed("mxfp8", cases, **both)
        self.compare_changed("mxfp8", cases, **both, dq__weights__block="dims:32", dk__weights__block="dims:32")
        self.compare_changed("mxfp8", cases, **both, dq__weights__block="dims:32", dk__weights__block="channel:32")

    def test_stochastic_cut(self):
        token = {**RECIPES["mxfp8"]["dq"]["tokens"], "rounding": "stochastic"}
        weights = {**token, "block": "dims:32"}
        self.compare_changed(
            "mxfp4-diagonal", ["causal", "window", "poisoned"], dq__cut={"weights": weights, "tokens": token}
        )

    def test_other_formats(self):
        for encoding in ("e5m2", "e2m3", "e3m2", "e2m1"):
            fields = {f"{product}__{side}__encoding": encoding for product, side in model.STREAMS}
            fields |= {"s__left__encoding": encoding, "s__right__encoding": encoding, "o__tokens__encoding": encoding}
            self.compare_changed("mxfp8", ["causal", "rotated"], **fields)
            fields = {"o__weights__encoding": encoding, "dv__weights__encoding": encoding, "beta": 2}
            self.compare_changed("mxfp8", ["causal", "poisoned"], **fields)

    def test_a_small_beta(self):
        self.compare_changed("mxfp8", ["causal", "window"], beta=2)


if __name__ == "__main__":
    main()
