"""The pure parts of bench/peers.py: the order of a round, work, statistics, tables. No peer is imported."""

import math
import pathlib
import subprocess
import sys
import unittest

import command_line

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import figures
import peers


def timed(*samples, flops=1e9):
    return {"flops": flops} | figures.summary(samples)


def report(right=True):
    """Two contestants, one without a backward, one workload."""
    phases = {"forward": timed(10, 20, 30)}
    check = {"right": right, "relative_l2_limit": 1e-5, "accuracy": {"o": {"relative_l2": 1e-7, "max_abs": 2e-6}}}
    ours = check | {"document_heads": {"checked": 2, "of": 16}}
    theirs = check | {"kv_heads_checked": [0, 15], "of": 16}
    chosen = {"forward": {"chosen": "one call"}, "forward+backward": {"chosen": "batches"}}
    results = [
        {"name": "mxflash x", "ceiling": "fp32", "right": True, "check": {"forward": ours}, "tuning": chosen}
        | {"phases": phases | {"forward+backward": timed(50)}},
        {"name": "peer", "ceiling": "bf16", "right": right, "check": {"forward": theirs}}
        | {"tuning": {"forward": {"chosen": "one call"}}, "phases": phases if right else {}},
    ]
    ceiling = {"fp32_gflops_per_second": 100, "bf16_gflops_per_second": 1000, "copy_gb_per_second": 12}
    return {
        "date": "2026-01-01",
        "machine": {"cpu": "a CPU", "cores": 2, "flags": ["avx2"], "load_before": [1, 1, 1], "load_after": [2, 1, 1]},
        "versions": {"mxflash": "mxflash 1", "mxflash_commit": "abc", "compiler": "12"}
        | {"torch": "2", "torch_capability": "AVX2", "onnxruntime": "1"},
        "method": {"phases": ["forward", "forward+backward"], "threads": 2, "rounds": 3, "repeats": 1}
        | {"shape": {"heads": 16, "kv_heads": 4, "head_dim": 128}}
        | {"flops": {"forward": "f", "forward+backward": "b"}},
        "ceilings": {"product": "a product", "copy": "a copy", "threads": {"1": ceiling, "2": ceiling}},
        "workloads": [{"workload": "equal", "tokens": 64, "lengths": [32, 32], "results": results}],
        "memory": [
            {"recipe": "x", "workload": "equal", "tokens": 64, "phase": "forward", "share": 1.5}
            | {"peak_bytes": 4 << 20, "base_bytes": 1 << 20, "tensor_bytes": 2 << 20}
        ],
    }


class Order(unittest.TestCase):
    def test_each_round_is_a_permutation(self):
        for count in range(1, 6):
            for turn in range(12):
                self.assertEqual(sorted(figures.order(count, turn)), list(range(count)), (count, turn))

    def test_every_other_round_runs_backwards(self):
        for turn in range(0, 8, 2):
            self.assertEqual(figures.order(4, turn), figures.order(4, turn + 1)[::-1], turn)

    def test_everyone_is_first_and_last(self):
        rounds = [figures.order(4, turn) for turn in range(8)]
        self.assertEqual({turn[0] for turn in rounds}, {0, 1, 2, 3})
        self.assertEqual({turn[-1] for turn in rounds}, {0, 1, 2, 3})


class Work(unittest.TestCase):
    def test_pairs_are_those_of_a_causal_mask(self):
        lengths = figures.lengths_of([0, 3, 3, 8])
        self.assertEqual(lengths, [3, 0, 5])
        brute = sum(key <= query for length in lengths for query in range(length) for key in range(length))
        self.assertEqual(figures.causal_pairs(lengths), brute)

    def test_flops_count_two_and_seven_products(self):
        # A product of one pair and head: head_dim multiplications and as many additions.
        self.assertEqual(figures.flops("forward", 2, [3], 8), 2 * (2 * 8) * 2 * 6)
        self.assertEqual(figures.flops("forward+backward", 2, [3], 8), 7 * (2 * 8) * 2 * 6)

    def test_groups_hold_every_document_once(self):
        self.assertEqual(figures.groups_by_length([5, 7, 5, 1, 7]), [[0, 2], [1, 4], [3]])


class Statistics(unittest.TestCase):
    def test_summary(self):
        got = figures.summary([40, 10, 20, 30, 50])
        self.assertEqual((got["samples"], got["median_ms"], got["min_ms"], got["max_ms"]), (5, 30, 10, 50))
        self.assertEqual(got["quartile_distance_ms"], 20)
        self.assertEqual(got["samples_ms"], [40, 10, 20, 30, 50])

    def test_one_sample_has_no_spread(self):
        self.assertEqual(figures.summary([7])["quartile_distance_ms"], 0)

    def test_no_sample_is_refused(self):
        with self.assertRaisesRegex(ValueError, "samples"):
            figures.summary([])

    def test_numbers_have_three_digits(self):
        shown = [figures.number(value) for value in (0, 0.012345, 1.2345, 123.45, 999.7, 1234.5, 123456)]
        self.assertEqual(shown, ["0", "0.0123", "1.23", "123", "1000", "1234", "123456"])

    def test_memory_is_counted_beyond_an_idle_process(self):
        self.assertTrue(math.isclose(figures.peak_share(700, 100, 400), 1.5))


class Tables(unittest.TestCase):
    def test_rate_is_of_the_median_and_the_ceiling(self):
        self.assertEqual(figures.rate_cell(timed(10, 20, 60), 100), "50 (50 %)")
        self.assertEqual(figures.rate_cell(None, 100), "-")

    def test_markdown(self):
        self.assertEqual(figures.markdown(["a", "b"], [["x", "1"]]), "| a | b |\n| --- | ---: |\n| x | 1 |")
        with self.assertRaisesRegex(ValueError, "2 allowed"):
            figures.markdown(["a", "b"], [["x"]])

    def test_documents(self):
        self.assertEqual(figures.documents_text([32, 32]), "2 of 32")
        self.assertEqual(figures.documents_text([32, 64, 768]), "3 of 32..768, median 64")

    def test_report(self):
        text = "\n".join(peers.lines_of(report()))
        self.assertIn("| mxflash x | forward: one call; forward+backward: batches |", text)
        self.assertIn("| 20 (10..30; 10) | 50 (50 %) | 50 (50..50; 0) | 20 (20 %) |", text)
        self.assertIn("| peer | one call | 20 (10..30; 10) | 50 (5 %) | - | - |", text)
        self.assertIn("2 of 16 document-heads", text)
        self.assertIn("| x | equal 64 | forward | 4 | 1 | 2 | 1.50 |", text)

    def test_a_wrong_answer_has_no_speed(self):
        text = "\n".join(peers.lines_of(report(right=False)))
        self.assertIn("| peer: WRONG, not timed | one call | - | - | - | - |", text)


class Arguments(unittest.TestCase):
    def test_defaults(self):
        options = peers.parse(["--mxflash", __file__])
        self.assertEqual((options.tokens, options.workload), (["1024", "4096"], list(peers.WORKLOADS)))
        self.assertEqual(peers.parse(["--mxflash", __file__, "--recipe", ""]).recipe, [])

    def test_refusals_name_argument_and_choices(self):
        cases = [
            (["--peers", "abacus"], ["--peers", "abacus", "torch-fp32"]),
            (["--workload", "huge"], ["--workload", "huge", "single"]),
            (["--tokens", "1024,x"], ["--tokens", "x"]),
            (["--rounds", "0"], ["--rounds", "0"]),
            (["--kv-heads", "0"], ["--kv-heads", "0"]),
            (["--mxflash", "/none"], ["--mxflash", "/none"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                command = [sys.executable, "-B", peers.__file__, "--mxflash", __file__, *arguments]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                for word in words:
                    self.assertIn(word, done.stderr)


if __name__ == "__main__":
    command_line.main()
