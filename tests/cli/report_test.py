"""`mxflash report`: one page that needs nothing else, and refusals."""

import html.parser
import json

import command_line
from command_line import capture


class Outside(html.parser.HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.links = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith(("#", "data:")):
                self.links.append((tag, value))


class Report(command_line.CommandLineTest):
    def results_files(self):
        source = self.write(capture(head_dim=128, tokens=40))
        self.succeed("run", source, "--check", "--json", self.path("run.json"))
        self.succeed("run", source, "--recipe", "mxattention", "--check", "--json", self.path("forward.json"))
        self.call("audit", source, "--recipe", "mxfp8,fp8-tensor", "--probes", "4", "--json", self.path("audit.json"))
        sizes = ["--tokens", "32", "--heads", "2", "--head-dim", "32", "--repeats", "1", "--workload", "equal"]
        self.succeed("bench", *sizes, "--json", self.path("bench.json"))
        return [self.path(name) for name in ["run.json", "forward.json", "audit.json", "bench.json"]]

    def test_one_self_contained_page(self):
        files = self.results_files()
        self.succeed("report", *files, "--out", self.path("report.html"))
        page = (self.folder / "report.html").read_text()
        self.assertTrue(page.lower().startswith("<!doctype html>"))
        outside = Outside()
        outside.feed(page)
        self.assertEqual(outside.links, [])
        cosine = json.loads((self.folder / "run.json").read_text())["accuracy"]["dq"]["cosine"]
        self.assertIn(f"{cosine:.12g}"[:12], page)
        for name in ["mxfp8", "mxattention", "fp8-tensor"]:
            self.assertIn(name, page)

    def test_each_kind_alone(self):
        for name in self.results_files():
            with self.subTest(name=name):
                self.succeed("report", name, "--out", self.path("report.html"))

    def test_refusals(self):
        source = self.write(capture())
        self.succeed("run", source, "--json", self.path("run.json"))
        good = self.path("run.json")
        (self.folder / "broken.json").write_text("{")
        (self.folder / "other.json").write_text('{"a": 1}')
        page = self.path("report.html")
        self.refuse("report", self.path("none.json"), "--out", page, words=["none.json"])
        self.refuse("report", self.path("broken.json"), "--out", page, words=["broken.json"])
        self.refuse("report", good, self.path("other.json"), "--out", page, words=["other.json"])
        self.refuse("report", good, "--out", good, words=["--out", "run.json"])
        self.refuse("report", good, "--out", self.path("none/report.html"), words=["report.html"])
        self.refuse("report", good, words=["--out: none given"])


if __name__ == "__main__":
    command_line.main()
