"""`mxflash bench`: the answer first, then times with all that they need to be understood (C30)."""

import itertools
import statistics

import command_line

SMALL = ["--tokens", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--repeats", "3", "--warmup", "0"]
WORKLOADS = ["single", "equal", "skewed", "log-uniform"]


class Bench(command_line.CommandLineTest):
    def test_c30_every_workload(self):
        result = self.results("bench", *SMALL, "--recipe", "bf16,mxfp8")
        entries = result["benchmarks"]
        self.assertEqual(
            [(entry["workload"], entry["recipe"]) for entry in entries],
            [(name, recipe) for name in WORKLOADS for recipe in ["bf16", "mxfp8"]],
        )
        method = result["method"]
        self.assertTrue(method["quantization_included"])
        self.assertEqual((method["warmup"], method["repeats"]), (0, 3))
        self.assertGreaterEqual(method["threads"], 1)
        self.assertIn("pairs", method["flops_forward"])
        self.assertGreaterEqual(result["machine"]["cores"], 1)
        self.assertTrue(result["machine"]["compiler"])
        for entry in entries:
            self.assertTrue(entry["check"]["right"])
            self.assertTrue(entry["check"]["complete"])
            covered = entry["check"]["document_heads"]
            self.assertEqual(covered, {"checked": len(entry["cu_seqlens"]) - 1, "of": len(entry["cu_seqlens"]) - 1})
            self.assertLess(entry["check"]["accuracy"]["dq"]["relative_l2"], entry["check"]["relative_l2_limit"])
            self.assertEqual(entry["problem"]["tokens"], 64)
            cu = entry["cu_seqlens"]
            lengths = [end - begin for begin, end in itertools.pairwise(cu)]
            self.assertEqual(len(lengths), entry["problem"]["documents"])
            self.assertEqual(entry["pairs"], sum(length * (length + 1) // 2 for length in lengths))
            self.assertEqual(entry["forward"]["flops"], 2 * 2 * entry["pairs"] * 64)
            self.assertEqual(entry["backward"]["flops"], 2 * 2 * entry["pairs"] * (3 * 32 + 2 * 32))
            for phase in ["forward", "backward"]:
                samples = entry[phase]["samples_ms"]
                self.assertEqual(len(samples), 3)
                self.assertEqual(entry[phase]["median_ms"], statistics.median(samples))
                self.assertEqual(entry[phase]["min_ms"], min(samples))
                self.assertEqual(entry[phase]["max_ms"], max(samples))

    def test_table(self):
        table = self.succeed("bench", *SMALL, "--workload", "skewed", "--recipe", "mxfp8").stdout
        for word in ["warm-up", "quantization included", "FLOPs", "threads", "right", "[64, 2, 32]"]:
            self.assertIn(word, table)

    def test_every_recipe_passes_its_check(self):
        for recipe in self.results("recipes"):
            with self.subTest(recipe=recipe["name"]):
                sizes = ["--tokens", "128", "--heads", "2", "--kv-heads", "1", "--repeats", "1", "--warmup", "0"]
                result = self.results("bench", *sizes, "--workload", "equal", "--recipe", recipe["name"])
                entry = result["benchmarks"][0]
                self.assertTrue(entry["check"]["right"])
                self.assertEqual(entry["backward"] is None, entry["no_backward"] is not None)

    def test_forward_only(self):
        result = self.results("bench", *SMALL, "--workload", "equal", "--forward-only")
        self.assertIsNone(result["benchmarks"][0]["backward"])

    def test_single_is_one_document(self):
        result = self.results("bench", *SMALL, "--workload", "single", "--recipe", "bf16")
        self.assertEqual(result["benchmarks"][0]["cu_seqlens"], [0, 64])

    def test_no_check_says_so(self):
        arguments = ["bench", *SMALL, "--workload", "equal", "--recipe", "mxfp8", "--no-check"]
        entry = self.results(*arguments)["benchmarks"][0]
        self.assertEqual(entry["check"], {"checked": False, "right": None})
        for phase in ["forward", "backward"]:
            self.assertEqual(len(entry[phase]["samples_ms"]), 3)
        table = self.succeed(*arguments).stdout
        self.assertIn("not checked", table)
        self.assertIn("unchecked", table)

    def test_large_checks_cover_a_part(self):
        sizes = ["--tokens", "128", "--heads", "8", "--kv-heads", "4", "--repeats", "1", "--warmup", "0"]
        # Four documents of 32 on four key/value heads of two query heads: 16 items of 2 * 32 * 33 / 2 pairs.
        item = 32 * 33
        for limit, checked in [(1, 1), (item, 1), (5 * item, 5), (16 * item - 1, 15), (16 * item, 16)]:
            with self.subTest(limit=limit):
                arguments = ["bench", *sizes, "--workload", "equal", "--recipe", "mxfp8", "--check-pairs", limit]
                check = self.results(*arguments)["benchmarks"][0]["check"]
                self.assertTrue(check["right"])
                self.assertEqual(check["document_heads"], {"checked": checked, "of": 16})
                self.assertEqual(check["pairs_times_heads"], {"checked": checked * item, "of": 16 * item})
                self.assertEqual(check["complete"], checked == 16)
                self.assertIn("right" if checked == 16 else f"{checked} of 16", self.succeed(*arguments).stdout)

    def test_the_check_is_that_of_run(self):
        """Same inputs, same outputs: the check by items finds the errors and places that `run --check` finds."""
        sizes = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--seed", "7"]
        self.succeed("generate", "--lengths", "16x4", *sizes, "--out", self.path("in.safetensors"))
        want = self.results("run", self.path("in.safetensors"), "--recipe", "mxfp8", "--seed", "7", "--check")[
            "accuracy"
        ]
        arguments = ["--tokens", "64", "--repeats", "1", "--warmup", "0", "--workload", "equal", "--recipe", "mxfp8"]
        got = self.results("bench", *sizes, *arguments)["benchmarks"][0]["check"]["accuracy"]
        self.assertEqual(list(got), ["o", "dq", "dk", "dv"])
        for name, accuracy in got.items():
            with self.subTest(output=name):
                self.assertEqual(accuracy["worst"]["index"], want[name]["worst"]["index"])
                self.assertEqual(accuracy["worst"]["got"], want[name]["worst"]["got"])
                # The file holds the softmax scale in FP32: logits up to 8 in size move by 2^-24 of that.
                for figure in ["cosine", "relative_l2", "max_abs"]:
                    self.assertAlmostEqual(accuracy[figure], want[name][figure], delta=1e-6)

    def test_help_lists_the_workloads(self):
        text = self.succeed("bench", "--help").stdout
        for name in WORKLOADS:
            self.assertIn(name, text)

    def test_refusals(self):
        cases = [
            (["--workload", "huge"], ["--workload", "huge", "equal"]),
            (["--workload", ""], ["--workload"]),
            (["--recipe", "mxfp9"], ["mxfp9"]),
            (["--recipe", ""], ["--recipe"]),
            (["--tokens", "0"], ["--tokens", "0"]),
            (["--heads", "3", "--kv-heads", "2"], ["heads", "3", "2"]),
            (["--head-dim", "12"], ["12"]),
            (["--repeats", "0"], ["--repeats"]),
            (["--warmup", "-1"], ["--warmup"]),
            (["--check-pairs", "0"], ["--check-pairs", "0"]),
            (["--check-pairs", "many"], ["--check-pairs", "many"]),
            (["--no-check", "--check-pairs", "5"], ["--no-check", "--check-pairs"]),
            (["--engine", "abacus"], ["abacus"]),
            (["--json", self.path("none/b.json")], ["--json"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                self.refuse("bench", *arguments, words=words)


if __name__ == "__main__":
    command_line.main()
