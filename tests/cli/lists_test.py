"""`mxflash recipes` and `mxflash engines`."""

import json

import command_line

RECIPES = ["bf16", "mxfp8", "mxfp8-tokenblock", "nvfp4", "fp4", "mxattention", "mxfp4-diagonal"]
RECIPES += ["fp8-tensor", "mxfp8-floor", "mxfp8-1x32", "mxfp8-32x32", "mxfp4-leaky", "naive-fp4"]


class Lists(command_line.CommandLineTest):
    def test_recipes(self):
        recipes = self.results("recipes")
        names = [recipe["name"] for recipe in recipes]
        self.assertLessEqual(set(RECIPES), set(names))
        self.assertEqual(len(set(names)), len(names))
        table = self.succeed("recipes").stdout
        for recipe in recipes:
            self.assertIn(recipe["name"], table)
            self.assertIn(recipe["summary"], table)
            self.assertLessEqual({"name", "summary", "purpose", "claims", "beta", "tau"}, set(recipe))

    def test_every_recipe_comes_back_as_a_file(self):
        source = self.write(command_line.capture(tokens=8, head_dim=128))
        for recipe in self.results("recipes"):
            with self.subTest(recipe=recipe["name"]):
                (self.folder / "recipe.json").write_text(json.dumps({**recipe, "name": "copy"}))
                self.succeed("run", source, "--recipe", self.path("recipe.json"), "--out", self.path("a"))
                self.succeed("run", source, "--recipe", recipe["name"], "--out", self.path("b"))
                self.succeed("compare", self.path("a"), self.path("b"))

    def test_engines(self):
        engines = self.results("engines")
        self.assertEqual(engines[-1]["name"], "reference")
        self.assertTrue(engines[-1]["available"])
        names = [recipe["name"] for recipe in self.results("recipes")]
        for engine in engines:
            self.assertEqual([entry["name"] for entry in engine["recipes"]], names)
            self.assertEqual(engine["available"], engine["reason"] is None)
            for entry in engine["recipes"]:
                for one in [entry, entry["backward"]]:
                    self.assertEqual(one["runs"], one["reason"] is None)
                self.assertTrue(engine["name"] != "reference" or entry["runs"], entry["name"])
        table = self.succeed("engines").stdout
        for engine in engines:
            self.assertIn(f"{engine['name']}: {engine['description']}", table)
            self.assertIn(engine["reason"] or "available: yes", table)
        self.assertIn("mxfp8", table)

    def test_a_recipe_without_a_backward_says_so(self):
        for engine in self.results("engines"):
            for entry in engine["recipes"]:
                if entry["name"] in ["mxattention", "naive-fp4"]:
                    self.assertFalse(entry["backward"]["runs"])
                    self.assertIn("has no backward", entry["backward"]["reason"])

    def test_the_cuda_engine_is_listed_with_what_it_lacks(self):
        cuda = self.results("engines")[0]
        self.assertEqual(cuda["name"], "cuda")
        for entry in cuda["recipes"]:
            has_one = entry["name"] not in ["mxattention", "naive-fp4", "fp8-tensor"]
            self.assertEqual(entry["backward"]["runs"], cuda["available"] and has_one, entry["name"])
        if not cuda["available"]:
            self.assertTrue(cuda["reason"].startswith("cuda: "), cuda["reason"])

    def test_each_engine_answers_as_it_says(self):
        source = self.write(command_line.capture(tokens=8))
        for engine in self.results("engines"):
            recipe = next(entry for entry in engine["recipes"] if entry["name"] == "mxfp8")
            arguments = ["run", source, "--engine", engine["name"], "--recipe", "mxfp8"]
            if recipe["runs"] and not recipe["backward"]["runs"]:
                self.refuse(*arguments, words=["engine", engine["name"], "backward"], code=3)
                arguments.append("--forward-only")
            if recipe["runs"]:
                self.assertEqual(self.results(*arguments)["engine"]["name"], engine["name"])
            else:
                self.refuse(*arguments, words=["engine", engine["name"]], code=3)

    def test_json_into_a_file(self):
        for verb in ["recipes", "engines"]:
            self.succeed(verb, "--json", self.path("list.json"))
            self.assertIsInstance(json.loads((self.folder / "list.json").read_text()), list)
            self.refuse(verb, "--json", self.path("none/list.json"), words=["--json"])


if __name__ == "__main__":
    command_line.main()
