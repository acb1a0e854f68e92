"""`mxflash bench`: the answer first, then times with all that they need to be understood (C30)."""

import itertools
import statistics

import command_line

SMALL = ["--tokens", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--repeats", "3", "--warmup", "0"]


class Bench(command_line.CommandLineTest):
    def test_c30_every_workload(self):
        result = self.results("bench", *SMALL, "--recipe", "bf16,mxfp8")
        entries = result["benchmarks"]
        self.assertEqual(
            [(entry["workload"], entry["recipe"]) for entry in entries],
            [(name, recipe) for name in ["equal", "skewed", "log-uniform"] for recipe in ["bf16", "mxfp8"]],
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

    def test_help_lists_the_workloads(self):
        text = self.succeed("bench", "--help").stdout
        for name in ["equal", "skewed", "log-uniform"]:
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
            (["--engine", "abacus"], ["abacus"]),
            (["--json", self.path("none/b.json")], ["--json"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                self.refuse("bench", *arguments, words=words)


if __name__ == "__main__":
    command_line.main()
