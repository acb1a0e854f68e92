"""The page that `mxflash report` writes: whole, self-contained, true to its inputs; and what it refuses.

The command line is $MXFLASH, else `mxflash` on the PATH.
"""

import html.parser
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

MXFLASH = os.environ.get("MXFLASH", "mxflash")
SECTIONS = ["accuracy", "verdicts", "leaks", "row-sums", "octaves", "scale-rules", "benchmark", "inputs"]
HOSTILE = "</script><script>document.body.remove()</script><!-- <script> {{script}} &lt; \u2028 \u00e9 '\""
VOID = {"meta", "br", "hr", "input", "img", "link"}


def problem():
    return {"tokens": 1024, "documents": 5, "heads": 12, "kv_heads": 4, "head_dim": 64, "causal": True}


def run_result(recipe, error=1e-3, source="some/capture.safetensors"):
    accuracy = {
        "cosine": 1 - error,
        "relative_l2": math.sqrt(2 * error),
        "max_abs": 0.01,
        "worst": {"index": [1, 2, 3]},
    }
    return {
        "version": "0.1.0",
        "input": source,
        "recipe": recipe,
        "engine": {"name": "reference"},
        "problem": problem(),
        "time_ms": {"quantize": 1.5, "forward": 20.0, "backward": 41.0},
        "accuracy": {name: dict(accuracy) for name in ("o", "dq", "dk", "dv")},
        "row_sum": {"effective_mean": 0.98, "effective_min": 0.91},
        "flushed": {"p": 0.125, "ds": 0.03},
        "octaves": {"p": [[-9, 100, 50], [-8, 200, 0], [0, 100, 0]], "ds": [[-30, 97, 0], [-31, 3, 3]]},
    }


def audited(name, leaks, holds=True):
    example = {
        "kind": "forward",
        "document": 1,
        "head": 2,
        "position": 3,
        "perturbed": 70,
        "tensor": "v",
        "output": "o",
        "perturbation": "raise",
        "change": 0.25,
    }
    quiet = {"leaks": 0, "probes": 64, "max_relative_change": 0.0, "reach_tokens": 0, "worst": None}
    loud = {"leaks": leaks, "probes": 64, "max_relative_change": 0.25, "reach_tokens": 67, "worst": example}
    return {
        "name": name,
        "claims": {"forward": "exact", "backward": "block"},
        "has_backward": True,
        "forward": loud if leaks else quiet,
        "backward": quiet,
        "documents": quiet,
        "row_sum_error": 0.0,
        "holds": holds,
        "verdict": f"verdict of {name}",
        "examples": [example] if leaks else [],
    }


def audit_result(*recipes):
    return {
        "version": "0.1.0",
        "input": "some/capture.safetensors",
        "engine": {"name": "reference"},
        "problem": problem(),
        "recipes": list(recipes),
        "skipped": [{"name": "odd-one", "reason": "head_dim: 96 given"}],
    }


def bench_result(recipe):
    samples = {
        "median_ms": 123.4,
        "min_ms": 120.0,
        "max_ms": 130.0,
        "gflops_per_second": 7.5,
        "samples_ms": [120.0, 130.0],
    }
    return {
        "version": "0.1.0",
        "machine": {"cpu": "a processor", "clock_mhz": "2000", "cores": 2, "compiler": "12"},
        "method": {"warmup": 1, "repeats": 3, "threads": 2},
        "benchmarks": [
            {
                "workload": "uniform",
                "recipe": recipe,
                "engine": {"name": "reference"},
                "problem": problem(),
                "check": {"right": True},
                "forward": samples,
                "backward": None,
            }
        ],
    }


class Page(html.parser.HTMLParser):
    """Elements that are open at the end, attributes that load something, ids, headings, scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.ids, self.tags, self.scripts, self.wrong_ends = [], [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.loads += [(name, value) for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag == "script":
            self.scripts.append((attributes, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong_ends.append((tag, self.getpos()))

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def nearest_e2m1(value, exponent):
    scaled = abs(value) / 2.0**exponent
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    # The even code wins a tie: codes are the places in the grid.
    best = min(range(8), key=lambda code: (abs(grid[code] - scaled), code % 2))
    return math.copysign(grid[best] * 2.0**exponent, value)


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.out = self.folder / "report.html"

    def write(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def call(self, *results, out=None):
        command = [MXFLASH, "report", *map(str, results), "--out", str(out or self.out)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def report(self, *results):
        done = self.call(*(self.write(f"result{i}.json", result) for i, result in enumerate(results)))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return self.out.read_text(encoding="utf-8")

    def data(self, text):
        found = [script for attributes, script in Page(text).scripts if attributes.get("id") == "data"]
        self.assertEqual(len(found), 1)
        return json.loads(found[0])

    def refuse(self, *results, out=None, says=()):
        before = sorted(self.folder.rglob("*"))
        done = self.call(*results, out=out)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\A[^\n]+\n\Z")
        for words in says:
            self.assertIn(words, done.stderr)
        self.assertEqual(sorted(self.folder.rglob("*")), before)


class WholePage(ReportTest):
    def setUp(self):
        super().setUp()
        self.text = self.report(run_result("mxfp8"), audit_result(audited("mxfp8", 0)), bench_result("bf16"))

    def test_elements_are_closed_in_order(self):
        page = Page(self.text)
        self.assertTrue(self.text.startswith("<!DOCTYPE html>"))
        self.assertEqual((page.open, page.wrong_ends), ([], []))
        self.assertEqual(len(page.ids), len(set(page.ids)))

    def test_loads_nothing(self):
        page = Page(self.text)
        self.assertEqual([value for _, value in page.loads if not value.startswith("#")], [])
        self.assertNotIn("link", page.tags)
        self.assertNotIn("base", page.tags)
        self.assertIn("default-src 'none'", self.text)
        style = self.text[self.text.index("<style>") : self.text.index("</style>")]
        self.assertNotRegex(style, r"url\(|@import")

    def test_has_each_section_and_links_to_it(self):
        page = Page(self.text)
        for section in SECTIONS:
            with self.subTest(section=section):
                self.assertIn(section, page.ids)
                self.assertIn(("href", "#" + section), page.loads)

    def test_every_place_that_the_script_fills_is_there(self):
        page = Page(self.text)
        script = page.scripts[-1][1]
        used = re.findall(
            r"""(?:byId|drawTable|drawPlot|sayEmpty|drawPicker|drawOctaves)\(['\"]([a-z-]+)['\"]""", script
        )
        self.assertGreater(len(used), 10)
        self.assertEqual(set(used) - set(page.ids), set())

    def test_plotly_is_inside(self):
        self.assertTrue(any(len(script) > 1_000_000 and "Plotly" in script for _, script in Page(self.text).scripts))

    def test_states_version_date_and_inputs(self):
        data = self.data(self.text)
        self.assertRegex(data["version"], r"^\d+\.\d+\.\d+$")
        self.assertRegex(data["created"], r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$")
        files = [pathlib.Path(result["file"]).name for kind in ("runs", "audits", "benches") for result in data[kind]]
        self.assertEqual(files, ["result0.json", "result1.json", "result2.json"])


class Contents(ReportTest):
    def test_recipes_stand_in_the_order_given_with_their_numbers(self):
        names = ["zeta", "alpha", "mxfp8"]
        runs = [run_result(name, 10.0 ** -(i + 2)) for i, name in enumerate(names)]
        data = self.data(self.report(*runs, audit_result(*(audited(name, 0) for name in names))))
        self.assertEqual([run["recipe"] for run in data["runs"]], names)
        self.assertEqual([recipe["name"] for recipe in data["audits"][0]["recipes"]], names)
        for given, shown in zip(runs, data["runs"], strict=True):
            for output in ("o", "dq", "dk", "dv"):
                self.assertEqual(
                    shown["accuracy"][output]["cosine"], given["accuracy"][output]["cosine"], (given["recipe"], output)
                )
            for field in ("row_sum", "flushed", "octaves"):
                self.assertEqual(shown[field], given[field], given["recipe"])

    def test_hostile_names_stay_text(self):
        plain = Page(self.report(run_result("plain"))).tags
        bench = bench_result(HOSTILE)
        text = self.report(run_result(HOSTILE, source=HOSTILE), audit_result(audited(HOSTILE, 3)), bench)
        page = Page(text)
        self.assertEqual(page.tags, plain)
        self.assertEqual((page.open, page.wrong_ends), ([], []))
        data = self.data(text)
        self.assertEqual(data["runs"][0]["recipe"], HOSTILE)
        self.assertEqual(data["audits"][0]["recipes"][0]["name"], HOSTILE)
        self.assertEqual(data["benches"][0]["benchmarks"][0]["recipe"], HOSTILE)

    def test_unknown_fields_are_left_out(self):
        run = run_result("mxfp8")
        run["secret"] = "do not copy"
        self.assertNotIn("do not copy", self.report(run))

    def test_results_without_backward_or_check(self):
        forward = run_result("mxattention")
        forward["accuracy"] = {"o": forward["accuracy"]["o"]}
        forward["time_ms"]["backward"] = forward["flushed"]["ds"] = None
        forward["octaves"]["ds"] = []
        unchecked = run_result("bf16")
        del unchecked["accuracy"]
        data = self.data(self.report(forward, unchecked))
        self.assertNotIn("ds", data["runs"][0]["flushed"])
        self.assertNotIn("accuracy", data["runs"][1])

    def test_numbers_that_are_not_finite_are_accepted_as_null(self):
        run = run_result("mxfp8")
        run["accuracy"]["o"]["cosine"] = None
        audit = audit_result(audited("mxfp8", 1))
        audit["recipes"][0]["examples"][0]["change"] = None
        data = self.data(self.report(run, audit))
        self.assertIsNone(data["runs"][0]["accuracy"]["o"]["cosine"])
        self.assertIsNone(data["audits"][0]["recipes"][0]["examples"][0]["change"])

    def test_deeply_nested_json_is_read(self):
        text = json.dumps(run_result("mxfp8"))
        deep = "[" * 200_000 + "]" * 200_000
        self.assertNotIn("[[[[", json.dumps(self.data(self.report(text[:-1] + f', "deep": {deep}}}'))["runs"]))


class ScaleRules(ReportTest):
    def setUp(self):
        super().setUp()
        self.rules = self.data(self.report(run_result("mxfp8")))["scale_rules"]

    def test_c18_largest_element_has_the_error_of_its_rule(self):
        worst = (0.0, "")
        for i, maximum in enumerate(self.rules["maxima"]):
            exponents = {"floor": 0, "ceil": 0 if maximum <= 6 else 1, "uos": 0 if maximum <= 7.25 else 1}
            for rule, exponent in exponents.items():
                want = ((maximum - nearest_e2m1(maximum, exponent)) / maximum) ** 2
                worst = max(worst, (abs(want - self.rules["rules"][rule]["largest"][i]), f"{rule} at {maximum}"))
        self.assertLess(worst[0], 1e-12, worst[1])

    def test_evenly_spread_elements_have_the_least_error_by_uos_everywhere(self):
        values = {rule: errors["uniform"] for rule, errors in self.rules["rules"].items()}
        for i, maximum in enumerate(self.rules["maxima"]):
            least = min(values["floor"][i], values["ceil"][i])
            # The elements are 1,024 samples, so the crossing at 7.25 is met to a few in a thousand.
            self.assertLessEqual(values["uos"][i], least * 1.003, f"at {maximum}")
        where = self.rules["maxima"].index(7.25)
        self.assertAlmostEqual(values["floor"][where] / values["ceil"][where], 1, delta=0.003)

    def test_normal_blocks_prefer_uos_on_average(self):
        mean = {rule: sum(errors["normal"]) / len(errors["normal"]) for rule, errors in self.rules["rules"].items()}
        self.assertLess(mean["uos"], mean["floor"])
        self.assertLess(mean["uos"], mean["ceil"])

    def test_octave_is_dense_and_the_threshold_is_stated(self):
        maxima = self.rules["maxima"]
        self.assertEqual((maxima[0], self.rules["threshold"]), (4, 7.25))
        self.assertLess(maxima[-1], 8)
        self.assertLessEqual(max(b - a for a, b in zip(maxima, [*maxima[1:], 8], strict=True)), 1 / 32)


class Refusals(ReportTest):
    def test_files_that_are_no_result(self):
        wrong = {
            "empty.json": "",
            "text.json": "no json",
            "truncated.json": json.dumps(run_result("mxfp8"))[:-20],
            "number.json": "7",
            "list.json": "[]",
            "object.json": "{}",
            "other.json": '{"version": "1", "engines": []}',
            "overflow.json": '{"version": "1", "recipe": 1e999}',
        }
        for name, content in wrong.items():
            with self.subTest(name=name):
                path = self.write(name, content)
                self.refuse(path, says=[str(path), "mxflash run", "mxflash audit", "mxflash bench", "allowed"])

    def test_bytes_that_are_no_utf8(self):
        path = self.folder / "latin.json"
        path.write_bytes(json.dumps(run_result("NAME")).encode().replace(b"NAME", b"\xff\xfe"))
        self.refuse(path, says=[str(path), "allowed"])

    def test_a_field_of_the_wrong_type_or_missing_is_named(self):
        def changed(result, change):
            change(result)
            return result

        wrong = {
            "accuracy.o.cosine": changed(run_result("a"), lambda r: r["accuracy"]["o"].update(cosine="1")),
            "octaves.p[1]": changed(run_result("a"), lambda r: r["octaves"]["p"].__setitem__(1, [1, 2])),
            "problem.tokens": changed(run_result("a"), lambda r: r["problem"].pop("tokens")),
            "recipe": changed(run_result("a"), lambda r: r.update(recipe=["a"])),
            "recipes[0].holds": changed(audit_result(audited("a", 1)), lambda r: r["recipes"][0].update(holds="yes")),
            "recipes[0].examples[0].position": changed(
                audit_result(audited("a", 1)), lambda r: r["recipes"][0]["examples"][0].update(position={})
            ),
            "benchmarks[0].forward.median_ms": changed(
                bench_result("a"), lambda r: r["benchmarks"][0]["forward"].update(median_ms=[])
            ),
        }
        for where, result in wrong.items():
            with self.subTest(where=where):
                path = self.write("wrong.json", result)
                self.refuse(path, says=[f"{path}: {where}", "given"])

    def test_missing_file_and_directory(self):
        self.refuse(self.folder / "none.json", says=["none.json", "given", "allowed"])
        (self.folder / "folder.json").mkdir()
        self.refuse(self.folder / "folder.json", says=["folder.json", "directory", "allowed"])

    def test_one_bad_file_among_good_ones(self):
        good = self.write("good.json", run_result("mxfp8"))
        bad = self.write("bad.json", "{")
        self.refuse(good, bad, says=["bad.json"])

    def test_places_where_no_page_can_go(self):
        good = self.write("good.json", run_result("mxfp8"))
        self.refuse(good, out=self.folder / "none" / "report.html", says=["--out", "allowed"])
        self.refuse(good, out=self.folder, says=["--out", "directory"])
        self.refuse(good, out=good, says=["--out", "good.json"])
        self.assertEqual(json.loads(good.read_text()), run_result("mxfp8"))

    def test_line_breaks_in_a_name_stay_on_the_line(self):
        self.refuse(self.folder / "two\nlines.json", says=["two?lines.json"])


class Atomic(ReportTest):
    def test_a_refusal_leaves_the_old_page(self):
        self.out.write_text("old")
        self.refuse(self.write("bad.json", "{"))
        self.assertEqual(self.out.read_text(), "old")

    def test_a_new_page_replaces_the_old_one_and_leaves_nothing_else(self):
        self.out.write_text("old" * 10_000_000)
        text = self.report(run_result("mxfp8"))
        self.assertTrue(text.rstrip().endswith("</html>"))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["report.html", "result0.json"])


BROWSER = shutil.which("chromium")


@unittest.skipUnless(BROWSER, "needs chromium")
class InBrowser(ReportTest):
    def drawn(self, *results):
        self.report(*results)
        command = [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={self.folder / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            self.out.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        # Without the scripts: only what a reader sees.
        return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)

    def test_draws_every_plot_and_table(self):
        page = self.drawn(
            run_result("mxfp8"),
            run_result("mxfp8"),
            audit_result(audited("mxfp8", 5), audited("quiet-one", 0), audited("bad-one", 2, holds=False)),
            bench_result("bf16"),
        )
        self.assertIn('data-drawn="yes"', page)
        self.assertNotIn("could not be drawn", page)
        for words in [
            "0.999000",
            "12.5 %",
            "✓ holds",
            "✗ broken",
            "verdict of mxfp8",
            "5 of 64",
            "67 tokens back",
            "Exact, nothing moved",
            "quiet-one",
            "odd-one",
            "a processor",
            "✓ right",
            "mxfp8 (result0.json)",
            "mxfp8 (result1.json)",
        ]:
            self.assertIn(words, page)
        # Accuracy, two leaking panels, row sums, P and dS, three of scale rules.
        self.assertEqual(len(re.findall(r'class="plot js-plotly-plot"', page)), 9)

    def test_draws_without_some_kinds(self):
        for name, results in {
            "audit": [audit_result(audited("a", 1))],
            "bench": [bench_result("a")],
            "none": [audit_result()],
        }.items():
            with self.subTest(only=name):
                page = self.drawn(*results)
                self.assertIn('data-drawn="yes"', page)
                self.assertNotIn("could not be drawn", page)
                self.assertIn("None of the files has this", page)

    def test_hostile_names_and_numbers_stay_text(self):
        run = run_result(HOSTILE, source=HOSTILE)
        run["accuracy"]["dq"]["cosine"] = None
        run["octaves"]["p"] = [[-1e300, 1, 1], [1e300, 5, 0], [None, None, None]]
        audit = audit_result(audited(HOSTILE, 3))
        audit["recipes"][0]["examples"] += [
            dict(audit["recipes"][0]["examples"][0], position=-5, perturbed=1e300, tensor=HOSTILE),
            dict(audit["recipes"][0]["examples"][0], change=None),
        ]
        page = self.drawn(run, audit)
        self.assertIn('data-drawn="yes"', page)
        self.assertNotIn("could not be drawn", page)
        self.assertIn("&lt;/script&gt;&lt;script&gt;document.body.remove()", page)


if __name__ == "__main__":
    unittest.main()
