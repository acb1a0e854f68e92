"""`mxflash audit`: claims kept, negatives caught, and its JSON."""

import json

import command_line
from command_line import capture, normal

NEGATIVES = {"fp8-tensor", "mxfp8-floor", "mxfp8-1x32", "mxfp8-32x32", "mxfp4-leaky", "naive-fp4"}


class Audit(command_line.CommandLineTest):
    def source(self, tokens=160, do=True):
        tensors = capture(tokens=tokens, heads=2, kv_heads=1, head_dim=128, cu=[0, 29, tokens])
        if not do:
            del tensors["do"]
        return self.write(tensors)

    def test_exact_claims_hold(self):
        result = self.results("audit", self.source(), "--recipe", "bf16,mxfp8", "--probes", "16")
        self.assertEqual([entry["name"] for entry in result["recipes"]], ["bf16", "mxfp8"])
        available = [engine["name"] for engine in self.results("engines") if engine["available"]]
        self.assertIn(result["engine"]["name"], ["auto", *available])
        for entry in result["recipes"]:
            self.assertTrue(entry["holds"], entry["verdict"])
            self.assertEqual(entry["claims"]["forward"], "exact")
            self.assertEqual(entry["forward"]["leaks"], 0)
            self.assertEqual(entry["forward"]["max_relative_change"], 0)
            self.assertIsNone(entry["forward"]["worst"])
            self.assertEqual(entry["documents"]["leaks"], 0)
            self.assertGreater(entry["forward"]["probes"], 8)
            self.assertGreater(entry["backward"]["probes"], 0)
            self.assertLess(entry["backward"]["reach_tokens"], 32)
            self.assertTrue(entry["has_backward"])
            self.assertIn(entry["engine"]["name"], available)
            self.assertIn(entry["engine"]["backward"], available)

    def test_a_negative_is_caught_and_the_leak_described(self):
        result = self.results("audit", self.source(), "--recipe", "fp8-tensor", "--probes", "16")
        entry = result["recipes"][0]
        self.assertTrue(entry["holds"], entry["verdict"])
        leaks = entry["forward"]["leaks"] + entry["backward"]["leaks"]
        self.assertGreater(leaks, 0)
        self.assertGreater(len(entry["examples"]), 0)
        keys = {"document", "head", "position", "perturbed", "tensor", "output", "perturbation", "change"}
        for example in entry["examples"]:
            self.assertLessEqual(keys, set(example))
            self.assertIn(example["kind"], ["forward", "backward", "documents"])
            if example["kind"] != "documents":
                self.assertLess(example["position"], example["perturbed"])

    def test_a_false_claim_exits_1(self):
        recipe = next(entry for entry in self.results("recipes") if entry["name"] == "mxfp8")
        # A leaking recipe that says nothing of it is refused or caught; either way it does not pass as holding.
        leaky = next(entry for entry in self.results("recipes") if entry["name"] == "fp8-tensor")
        leaky = {**leaky, "name": "liar", "purpose": recipe["purpose"], "claims": recipe["claims"]}
        (self.folder / "liar.json").write_text(json.dumps(leaky))
        done = self.call("audit", self.source(), "--recipe", self.path("liar.json"), "--json", "-")
        self.assertIn(done.returncode, [1, 2])
        if done.returncode == 2:
            self.assertIn("claim", done.stderr)

    def test_all_recipes(self):
        source = self.source(tokens=96)
        known = {entry["name"] for entry in self.results("recipes")}
        result = self.results("audit", source, "--probes", "12")
        self.assertEqual({entry["name"] for entry in result["recipes"]}, known)
        self.assertEqual(result["skipped"], [])
        self.assertLessEqual(NEGATIVES, known)
        for entry in result["recipes"]:
            self.assertTrue(entry["holds"], f"{entry['name']}: {entry['verdict']}")

    def test_all_skips_what_refuses_the_shape(self):
        source = self.write(capture(tokens=40, head_dim=96))
        done = self.call("audit", source, "--probes", "2", "--json", "-")
        self.assertIn(done.returncode, [0, 1], done.stderr)  # two probes need not catch every negative
        skipped = {entry["name"]: entry["reason"] for entry in json.loads(done.stdout)["skipped"]}
        self.assertIn("96", skipped["mxattention"])
        self.refuse("audit", source, "--recipe", "mxattention", words=["96"])

    def test_without_do_only_the_forward(self):
        source = self.source(do=False)
        result = self.results("audit", source, "--recipe", "mxfp8", "--probes", "4")
        self.assertFalse(result["backward"]["audited"])
        self.assertIn("do", result["backward"]["reason"])
        self.assertEqual(result["recipes"][0]["backward"]["probes"], 0)
        table = self.succeed("audit", source, "--recipe", "mxfp8", "--probes", "4").stdout
        self.assertIn("forward only", table)

    def test_table_and_file(self):
        table = self.succeed(
            "audit", self.source(), "--recipe", "mxfp8", "--probes", "4", "--json", self.path("a.json")
        ).stdout
        self.assertIn("holds", table)
        self.assertTrue(json.loads((self.folder / "a.json").read_text())["recipes"][0]["holds"])

    def test_same_seed_same_result(self):
        source = self.source()
        arguments = ["audit", source, "--recipe", "fp8-tensor", "--probes", "8"]
        first = self.results(*arguments, "--seed", "3")
        self.assertEqual(first, self.results(*arguments, "--seed", "3", "--threads", "3"))

    def test_refused_recipes(self):
        self.refuse("audit", self.source(), "--recipe", "", words=["--recipe"])
        self.refuse("audit", self.source(), "--recipe", "mxfp8,,bf16", words=["mxfp8"])

    def test_mismatched_shapes(self):
        tensors = {**capture(), "v": normal("BF16", [47, 1, 32], 3)}
        self.refuse("audit", self.write(tensors), words=["v"])


if __name__ == "__main__":
    command_line.main()
