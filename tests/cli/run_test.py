"""`mxflash run`: results, JSON, recipes, checks."""

import json
import math

import command_line
from command_line import capture, full, normal, offsets, read_safetensors


def runs(engine, recipe):
    return next(entry for entry in engine["recipes"] if entry["name"] == recipe)


class Run(command_line.CommandLineTest):
    def test_writes_every_output_in_the_type_of_the_input(self):
        for dtype in ["BF16", "F16", "F32"]:
            with self.subTest(dtype=dtype):
                source = self.write(capture(tokens=40, heads=4, kv_heads=2, dtype=dtype, cu=[0, 7, 40]))
                self.succeed("run", source, "--out", self.path("out"))
                tensors, metadata = read_safetensors(self.path("out"))
                self.assertEqual(set(tensors), {"o", "lse", "dq", "dk", "dv"})
                self.assertEqual(tensors["o"].shape, [40, 4, 32])
                self.assertEqual(tensors["lse"].shape, [40, 4])
                self.assertEqual(tensors["dk"].shape, [40, 2, 32])
                self.assertEqual(tensors["lse"].dtype, "F32")
                for name in ["o", "dq", "dk", "dv"]:
                    self.assertEqual(tensors[name].dtype, dtype)
                self.assertEqual(metadata["recipe"], "mxfp8")

    def test_json_has_the_documented_keys(self):
        source = self.write(capture(heads=4, kv_heads=2, cu=[0, 16, 48]))
        result = self.results("run", source, "--check", "--seed", "5")
        available = [engine for engine in self.results("engines") if engine["available"]]
        both = [engine["name"] for engine in available if runs(engine, "mxfp8")["backward"]["runs"]]
        self.assertEqual(result["engine"], {"name": available[0]["name"], "backward": both[0]})
        self.assertIn(result["counted_by"], [available[0]["name"], both[0]])
        self.assertEqual(result["recipe"], "mxfp8")
        self.assertEqual(result["input"], source)
        self.assertEqual(result["seed"], 5)
        problem = {
            "tokens": 48,
            "documents": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "value_dim": 32,
            "causal": True,
            "window": None,
        }
        self.assertEqual({key: result["problem"][key] for key in problem}, problem)
        self.assertEqual(set(result["time_ms"]), {"quantize", "forward", "backward"})
        self.assertEqual(set(result["accuracy"]), {"o", "dq", "dk", "dv"})
        for name, accuracy in result["accuracy"].items():
            self.assertGreater(accuracy["cosine"], 0.99, name)
            self.assertLess(accuracy["relative_l2"], 0.15, name)
            self.assertEqual(len(accuracy["worst"]["index"]), 3, name)
            worst = accuracy["worst"]
            self.assertAlmostEqual(abs(worst["got"] - worst["want"]), accuracy["max_abs"], msg=name)
        self.assertAlmostEqual(result["row_sum"]["effective_mean"], 1, places=6)
        self.assertGreater(result["row_sum"]["effective_min"], 0.9999)
        self.assertTrue(0 <= result["flushed"]["p"] < 0.1)
        self.assertTrue(0 <= result["flushed"]["ds"] < 0.1)
        for octaves in result["octaves"].values():
            self.assertGreater(len(octaves), 3)
            for octave, count, flushed in octaves:
                self.assertIsInstance(octave, int)
                self.assertGreaterEqual(count, flushed)
        pairs = 16 * 17 // 2 + 32 * 33 // 2
        self.assertLessEqual(sum(count for _, count, _ in result["octaves"]["p"]), 4 * pairs)

    def test_worst_place_and_values_are_those_of_the_files(self):
        source = self.write(capture())
        result = self.results("run", source, "--check", "--out", self.path("out"))
        tensors, _ = read_safetensors(self.path("out"))
        for name, accuracy in result["accuracy"].items():
            self.assertAlmostEqual(tensors[name][accuracy["worst"]["index"]], accuracy["worst"]["got"], msg=name)

    def test_json_into_a_file_beside_the_table(self):
        source = self.write(capture())
        table = self.succeed("run", source, "--check", "--json", self.path("r.json")).stdout
        self.assertIn("cosine", table)
        result = json.loads((self.folder / "r.json").read_text())
        self.assertIn(f"{result['accuracy']['dq']['cosine']:.6f}", table)

    def test_every_recipe_runs(self):
        source = self.write(capture(head_dim=128, tokens=40, cu=[0, 3, 40]))
        for recipe in self.results("recipes"):
            with self.subTest(recipe=recipe["name"]):
                result = self.results("run", source, "--recipe", recipe["name"], "--check")
                self.assertEqual(result["recipe"], recipe["name"])
                self.assertGreater(result["accuracy"]["o"]["cosine"], 0.9)

    def test_engines_by_name(self):
        source = self.write(capture())
        available = [engine for engine in self.results("engines") if engine["available"]]
        names = [engine["name"] for engine in available]
        self.assertEqual(names[-2:], ["cpu:scalar", "reference"])
        for engine in available:
            name = engine["name"]
            backward = runs(engine, "mxfp8")["backward"]["runs"]
            if not backward:
                self.refuse("run", source, "--engine", name, words=[name, "no backward"], code=3)
            result = self.results("run", source, "--engine", name, "--check", *([] if backward else ["--forward-only"]))
            self.assertEqual(result["engine"], {"name": name, "backward": name if backward else None})
            self.assertGreater(result["accuracy"]["o"]["cosine"], 0.99, name)
        cpu = [name for name in names if name.startswith("cpu")]
        self.assertEqual(self.results("run", source, "--engine", "cpu")["engine"]["name"], cpu[0])

    def test_without_check_there_is_no_accuracy(self):
        self.assertNotIn("accuracy", self.results("run", self.write(capture())))

    def test_forward_only(self):
        source = self.write(capture())
        result = self.results("run", source, "--forward-only", "--check", "--out", self.path("out"))
        self.assertEqual(set(read_safetensors(self.path("out"))[0]), {"o", "lse"})
        self.assertEqual(set(result["accuracy"]), {"o"})
        self.assertIsNone(result["time_ms"]["backward"])
        self.assertIsNone(result["flushed"]["ds"])
        self.assertFalse(result["backward"]["computed"])
        self.assertIn("--forward-only", result["backward"]["reason"])

    def test_no_do_means_no_gradients(self):
        tensors = capture()
        del tensors["do"]
        result = self.results("run", self.write(tensors), "--check")
        self.assertIn("do", result["backward"]["reason"])
        self.assertEqual(set(result["accuracy"]), {"o"})

    def test_dlse_adds_to_dq_and_dk(self):
        tensors = capture(heads=4, kv_heads=2, cu=[0, 7, 48])
        self.succeed("run", self.write(tensors), "--engine", "reference", "--out", self.path("none"))
        none = read_safetensors(self.path("none"))[0]
        # Thirty times dO: without it in the truth or in the engine, cosines of dQ and dK would be near 0.
        tensors["dlse"] = normal("F32", [48, 4], 5)
        tensors["dlse"].values = [30 * value for value in tensors["dlse"].values]
        source = self.write(tensors)
        for engine in ["auto", "reference"]:
            result = self.results("run", source, "--engine", engine, "--check", "--out", self.path("some"))
            for name, accuracy in result["accuracy"].items():
                self.assertGreater(accuracy["cosine"], 0.99, (engine, name))
        some = read_safetensors(self.path("some"))[0]
        self.assertEqual(some["dv"].values, none["dv"].values)
        self.assertNotEqual(some["dk"].values, none["dk"].values)
        tensors["dlse"] = full("F32", [48, 4], 0.0)
        self.succeed("run", self.write(tensors), "--engine", "reference", "--out", self.path("zero"))
        self.succeed("compare", self.path("zero"), self.path("none"))

    def test_inference_recipe_says_why_there_are_no_gradients(self):
        source = self.write(capture(head_dim=128))
        result = self.results("run", source, "--recipe", "mxattention", "--out", self.path("out"))
        self.assertFalse(result["backward"]["computed"])
        self.assertIn("inference", result["backward"]["reason"])
        self.assertEqual(set(read_safetensors(self.path("out"))[0]), {"o", "lse"})
        self.assertIn("inference", self.succeed("run", source, "--recipe", "mxattention").stdout)

    def test_min_cosine(self):
        source = self.write(capture())
        self.succeed("run", source, "--min-cosine", "o=0.99,dq=0.99,dk=0.99,dv=0.99")
        done = self.succeed("run", source, "--min-cosine", "o=0.99,dq=0.9999999", code=1)
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("dq: cosine", done.stderr)
        self.assertNotIn("o: cosine", done.stderr)
        self.succeed("run", source, "--forward-only", "--min-cosine", "dq=0.5", code=1)
        for text in ["o", "o=", "o=x", "p=0.5", "o=nan", "=1"]:
            self.refuse("run", source, "--min-cosine", text, words=["--min-cosine", "allowed"])

    def test_same_bits_with_any_number_of_threads(self):
        source = self.write(capture(heads=4, kv_heads=2, cu=[0, 5, 48]))
        for recipe in ["mxfp8", "fp4"]:
            self.succeed("run", source, "--recipe", recipe, "--threads", "1", "--out", self.path("1"))
            self.succeed(
                "run", source, "--recipe", recipe, "--threads", "5", "--deterministic", "--out", self.path("5")
            )
            self.succeed("compare", self.path("1"), self.path("5"))

    def test_seed_decides_stochastic_rounding(self):
        source = self.write(capture())
        for seed in ["1", "2"]:
            self.succeed("run", source, "--recipe", "fp4", "--seed", seed, "--out", self.path(seed))
        result = self.results("compare", self.path("1"), self.path("2"), code=1)
        equal = {entry["name"]: entry["equal"] for entry in result["tensors"]}
        self.assertTrue(equal["o"])
        self.assertFalse(equal["dq"])

    def test_causality_levels(self):
        source = self.write(capture(tokens=96, head_dim=128))
        default = self.results("run", source, "--check")
        exact = self.results("run", source, "--check", "--causality", "exact")
        block = self.results("run", source, "--check", "--causality", "block")
        self.assertNotEqual(exact["accuracy"]["dq"], block["accuracy"]["dq"])
        self.assertEqual(default["accuracy"]["dq"], block["accuracy"]["dq"])
        for text in ["leaks", "none", ""]:
            if text:
                self.refuse("run", source, "--causality", text, words=["--causality", "exact or block"])
        self.refuse("run", source, "--recipe", "mxfp8-tokenblock", "--causality", "exact", words=["mxfp8-tokenblock"])

    def test_scale_of_the_metadata(self):
        tensors = capture()
        self.succeed("run", self.write(tensors, "a"), "--recipe", "bf16", "--out", self.path("default"))
        scale = {"softmax_scale": repr(1 / math.sqrt(32))}
        self.succeed("run", self.write(tensors, "b", scale), "--recipe", "bf16", "--out", self.path("same"))
        self.succeed("compare", self.path("default"), self.path("same"))
        other = self.write(tensors, "c", {"softmax_scale": "1e-9"})
        self.assertAlmostEqual(self.results("run", other)["problem"]["scale"], 1e-9)
        self.succeed("run", other, "--recipe", "bf16", "--out", self.path("flat"))
        lse = read_safetensors(self.path("flat"))[0]["lse"]
        for token in range(48):
            self.assertAlmostEqual(lse[[token, 0]], math.log(token + 1), places=5)

    def test_c11_grouped_heads(self):
        # A constant V per key/value head shows which head each query head reads.
        tensors = capture(tokens=16, heads=4, kv_heads=2)
        tensors["v"].values = [float(1 + i // 32 % 2) for i in range(16 * 2 * 32)]
        self.succeed("run", self.write(tensors), "--out", self.path("out"))
        o = read_safetensors(self.path("out"))[0]["o"]
        for token in range(16):
            for head in range(4):
                for dim in range(32):
                    self.assertEqual(o[[token, head, dim]], 1 + head // 2, (token, head, dim))

    def test_value_dim_of_its_own(self):
        tensors = capture(head_dim=64)
        tensors["v"] = normal("BF16", [48, 1, 40], 3)
        tensors["do"] = normal("BF16", [48, 2, 40], 4)
        result = self.results("run", self.write(tensors), "--check", "--out", self.path("out"))
        self.assertEqual(result["problem"]["value_dim"], 40)
        self.assertEqual(read_safetensors(self.path("out"))[0]["dv"].shape, [48, 1, 40])

    def test_c3_documents_do_not_depend_on_their_neighbours(self):
        tensors = capture(tokens=70, cu=[0, 33, 70])
        self.succeed("run", self.write(tensors, "both"), "--out", self.path("both.out"))
        both = read_safetensors(self.path("both.out"))[0]
        alone = {}
        for name, tensor in capture(tokens=70).items():
            row = math.prod(tensor.shape[1:])
            alone[name] = command_line.Tensor("BF16", [37, *tensor.shape[1:]], tensor.values[33 * row :])
        self.succeed("run", self.write(alone, "alone"), "--out", self.path("alone.out"))
        for name, tensor in read_safetensors(self.path("alone.out"))[0].items():
            row = math.prod(tensor.shape[1:])
            self.assertEqual(both[name].values[33 * row :], tensor.values, name)

    def test_c5_queries_without_keys_and_keys_without_queries(self):
        tensors = {
            "q": normal("BF16", [30, 1, 32], 1),
            "k": normal("BF16", [30, 1, 32], 2),
            "v": normal("BF16", [30, 1, 32], 3),
            "do": normal("BF16", [30, 1, 32], 4),
            "cu_seqlens_q": offsets(0, 15, 15, 30),
            "cu_seqlens_k": offsets(0, 10, 20, 30),
        }
        self.succeed("run", self.write(tensors), "--out", self.path("out"))
        out = read_safetensors(self.path("out"))[0]
        for token in range(30):
            empty = token % 15 < 5  # bottom-right aligned: 15 queries on 10 keys
            self.assertEqual(out["lse"][[token, 0]] == -math.inf, empty, token)
            for dim in range(32):
                if empty:
                    self.assertEqual(out["o"][[token, 0, dim]], 0, (token, dim))
                    self.assertEqual(out["dq"][[token, 0, dim]], 0, (token, dim))
        for key in range(10, 20):
            for dim in range(32):
                self.assertEqual(out["dk"][[key, 0, dim]], 0, (key, dim))
                self.assertEqual(out["dv"][[key, 0, dim]], 0, (key, dim))
        for name, tensor in out.items():
            self.assertFalse(any(map(math.isnan, tensor.values)), name)

    def test_zero_tokens(self):
        tensors = {name: full("BF16", [0, 2, 32], 0.0) for name in ["q", "k", "v", "do"]}
        for cu in [(0,), (0, 0), (0, 0, 0)]:
            tensors["cu_seqlens"] = offsets(*cu)
            result = self.results("run", self.write(tensors), "--check", "--out", self.path("out"))
            self.assertEqual(result["problem"]["tokens"], 0)
            self.assertEqual(result["problem"]["documents"], len(cu) - 1)
            self.assertEqual(read_safetensors(self.path("out"))[0]["dq"].shape, [0, 2, 32])

    def test_nan_and_inf_poison_their_rows_alone(self):
        for name, value in [("v", math.nan), ("k", math.inf), ("v", -math.inf)]:
            with self.subTest(name=name, value=value):
                tensors = capture(tokens=40, heads=1, cu=[0, 8, 40])
                tensors[name].values[20 * 32 + 3] = value
                result = self.results("run", self.write(tensors), "--check", "--out", self.path("out"))
                o = read_safetensors(self.path("out"))[0]["o"]
                for token in range(40):
                    poisoned = any(not math.isfinite(o[[token, 0, dim]]) for dim in range(32))
                    self.assertEqual(poisoned, token >= 20, token)
                self.assertIn("cosine", result["accuracy"]["o"])

    def test_recipe_of_ones_own(self):
        recipe = next(entry for entry in self.results("recipes") if entry["name"] == "mxfp8")
        recipe["name"] = "mine"
        (self.folder / "mine.json").write_text(json.dumps(recipe))
        source = self.write(capture())
        result = self.results("run", source, "--recipe", self.path("mine.json"), "--out", self.path("mine"))
        self.assertEqual(result["recipe"], "mine")
        self.succeed("run", source, "--out", self.path("named"))
        self.succeed("compare", self.path("mine"), self.path("named"))

    def test_refused_recipes_of_ones_own(self):
        source = self.write(capture())
        recipe = next(entry for entry in self.results("recipes") if entry["name"] == "mxfp8")
        cases = {
            "beta": (json.dumps({**recipe, "beta": 512}), ["beta"]),
            "surplus": (json.dumps({**recipe, "colour": 1}), ["colour"]),
            "missing": (json.dumps({key: value for key, value in recipe.items() if key != "tau"}), ["tau"]),
            "broken": ("{", []),
            "array": ("[]", []),
            "empty": ("", []),
        }
        for name, (text, words) in cases.items():
            with self.subTest(name=name):
                (self.folder / f"{name}.json").write_text(text)
                path = self.path(f"{name}.json")
                self.refuse("run", source, "--recipe", path, "--out", self.path("out"), words=[*words, f"{name}.json"])

    def test_hadamard_needs_a_power_of_two(self):
        source = self.write(capture(head_dim=96))
        self.refuse("run", source, "--recipe", "mxattention", "--out", self.path("out"), words=["96"])
        self.succeed("run", source)  # mxfp8 rotates at 128 alone


if __name__ == "__main__":
    command_line.main()
