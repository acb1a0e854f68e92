"""Help, version, and calls that are not the command line's."""

import command_line

VERBS = ["run", "audit", "quantize", "generate", "compare", "bench", "recipes", "engines", "report"]


class Usage(command_line.CommandLineTest):
    def test_help_explains_every_verb_and_option(self):
        overview = self.succeed("--help").stdout
        for verb in VERBS:
            self.assertIn(verb, overview)
            lines = self.succeed(verb, "--help").stdout.splitlines()
            options = [line for line in lines if line.startswith("  -")]
            self.assertGreater(len(options), 0, verb)
            for line in options:
                # Name, type, explanation; this last on the next line where the first two are long.
                following = lines[lines.index(line) + 1]
                words = line.split() + (following.split() if following.startswith(" " * 20) else [])
                self.assertGreater(len(words), 3, f"{verb} {words[0]} is not explained")

    def test_version(self):
        self.assertRegex(self.succeed("--version").stdout, r"^mxflash \d+\.\d+\.\d+\n$")

    def test_no_verb(self):
        self.refuse(words=["verb", "run, audit, quantize"])

    def test_unknown_verb(self):
        self.refuse("train", "x", words=["train", "run, audit, quantize"])

    def test_unknown_option(self):
        for verb in VERBS:
            with self.subTest(verb=verb):
                self.refuse(verb, "--colour", words=["mxflash: "])
        self.refuse("recipes", "--colour", words=["--colour", "mxflash recipes --help"])

    def test_surplus_argument(self):
        self.refuse("run", "a", "b", words=["b", "mxflash run --help"])

    def test_missing_arguments_are_named(self):
        cases = {
            "run": "IN",
            "audit": "IN",
            "quantize": "IN",
            "generate": "--lengths",
            "compare": "A",
            "report": "RESULTS",
        }
        for verb, name in cases.items():
            with self.subTest(verb=verb):
                self.refuse(verb, words=[f"mxflash: {name}: none given", f"mxflash {verb} --help"])

    def test_option_without_a_value(self):
        self.refuse("run", "x", "--recipe", words=["--recipe", "given"])

    def test_option_given_twice(self):
        self.refuse("run", "x", "--seed", "1", "--seed", "2", words=["--seed", "more than one"])

    def test_control_characters_stay_on_one_line(self):
        self.refuse("run", "no\nsuch\x1b[31mfile", words=["no?such?[31mfile"])


if __name__ == "__main__":
    command_line.main()
