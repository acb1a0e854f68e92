"""The pure parts of bench/cuda_peers.py: workloads, runs that go on, reports. No GPU and no peer is needed."""

import argparse
import json
import pathlib
import sys
import tempfile
import unittest

import command_line

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import cuda_report

SETTINGS = {"mask": "causal", "phases": ["forward", "training"], "rounds": 2, "repeats": 2}


def entry(name, **changed):
    phase = {
        "samples_ms": {"ours": [2.0, 1.0, 4.0], "theirs": [5.0]},
        "peak_bytes": {"ours": 3 << 20, "theirs": 1 << 20},
    }
    whole = {"workload": name, "phases": {"forward": phase}, "relative_l2": {"ours": {"o": 0.0123}}}
    return whole | {"absent": {}, "wrong": {}, "seconds": {}, "device": ["cool", "warm"]} | changed


def run_of(*entries):
    return cuda_report.new_run(["a device"], SETTINGS) | {"workloads": list(entries)}


class Workloads(unittest.TestCase):
    def test_lengths(self):
        self.assertEqual(cuda_report.lengths_of("8192+3x256+7"), [8192, 256, 256, 256, 7])

    def test_the_packs_hold_what_their_names_say(self):
        for name, (text, _) in cuda_report.WORKLOADS.items():
            lengths = cuda_report.lengths_of(text)
            if name[0] in "12" and "log-uniform" in name:
                self.assertEqual(len(lengths), int(name.split()[0]))
            self.assertIn(sum(lengths), (16384, 32768, 65536), name)

    def test_one_workload_of_each_shape(self):
        shapes = {"a": ([4, 4], 16), "b": ([8], 16), "c": ([8], 4), "d": ([9], 16)}
        self.assertEqual(cuda_report.one_of_each_shape(shapes), ["a", "c", "d"])


class Files(unittest.TestCase):
    def test_a_run_goes_on(self):
        with tempfile.TemporaryDirectory() as folder:
            options = argparse.Namespace(json=pathlib.Path(folder, "run.json"), markdown=None)
            self.assertEqual(cuda_report.load(options.json, [], SETTINGS)["workloads"], [])
            cuda_report.save(run_of(entry("first")), options)
            again = cuda_report.load(options.json, ["a device"], SETTINGS)
            self.assertEqual(cuda_report.begun(again), {"first"})
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()], ["run.json"])

    def test_a_run_with_other_settings_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "run.json")
            path.write_text(json.dumps(run_of()), encoding="utf-8")
            with self.assertRaisesRegex(ValueError, "'rounds': 2.*'rounds': 3.* allowed"):
                cuda_report.load(path, ["a device"], SETTINGS | {"rounds": 3})

    def test_a_run_on_another_device_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "run.json")
            path.write_text(json.dumps(run_of()), encoding="utf-8")
            with self.assertRaisesRegex(ValueError, "'a device'.*'another'.* allowed"):
                cuda_report.load(path, ["another"], SETTINGS)


class Reports(unittest.TestCase):
    def test_a_table_has_a_row_a_workload_and_a_column_a_contestant(self):
        other = {"samples_ms": {"third": [0.5]}, "peak_bytes": {"third": 0}}
        run = run_of(entry("first"), entry("second", phases={"forward": other}), entry("none", phases={}))
        self.assertEqual(
            cuda_report.table(run, "forward", "samples_ms", cuda_report.time_cell).splitlines(),
            [
                "| workload | ours | theirs | third |",
                "| --- | ---: | ---: | ---: |",
                "| first | 2.000 (1.000..4.000) | 5.000 (5.000..5.000) | - |",
                "| second | - | - | 0.500 (0.500..0.500) |",
            ],
        )

    def test_report_says_everything(self):
        text = cuda_report.report(run_of(entry("first", absent={"theirs, gradients": "no time"})))
        for words in ("a device; causal", "2 x 2", "| first | 3 | 1 |", "| first | o 1.2e-02 |", "first: cool; warm"):
            self.assertIn(words, text)
        self.assertIn("- absent: theirs, gradients: no time (first)", text)

    def test_a_reason_stands_once(self):
        entries = [entry(name, absent={"theirs": "has gone"}) for name in ("first", "second")]
        self.assertEqual(cuda_report.notes(run_of(*entries)), ["- absent: theirs: has gone (first, second)"])

    def test_who_is_wrong_and_what_failed_is_said_and_counts(self):
        self.assertFalse(cuda_report.wrong(run_of(entry("first", absent={"theirs": "has gone"}))))
        for changed in ({"wrong": {"ours, o": "off by 1"}}, {"failed": "did not end"}):
            run = run_of(entry("first"), entry("second", **changed))
            self.assertTrue(cuda_report.wrong(run))
            self.assertEqual(len(cuda_report.notes(run)), 1)
            self.assertIn("(second)", cuda_report.notes(run)[0])


if __name__ == "__main__":
    command_line.main()
