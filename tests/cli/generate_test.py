"""`mxflash generate`: shapes, the same bytes for the same seed, distributions, refusals."""

import itertools
import math
import statistics

import command_line
from command_line import read_safetensors


class Generate(command_line.CommandLineTest):
    def generate(self, *arguments, name="out"):
        self.succeed("generate", "--out", self.path(name), *arguments)
        return read_safetensors(self.path(name))

    def test_lengths_and_counts(self):
        tensors, metadata = self.generate(
            "--lengths", "20,8x3,0,1x2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"
        )
        self.assertEqual(set(tensors), {"q", "k", "v", "do", "cu_seqlens"})
        self.assertEqual(tensors["cu_seqlens"].values, [0, 20, 28, 36, 44, 44, 45, 46])
        self.assertEqual(tensors["cu_seqlens"].dtype, "I32")
        self.assertEqual(tensors["q"].shape, [46, 4, 16])
        self.assertEqual(tensors["k"].shape, [46, 2, 16])
        self.assertEqual(tensors["v"].shape, [46, 2, 16])
        self.assertEqual(tensors["do"].shape, [46, 4, 16])
        self.assertEqual({tensors[name].dtype for name in ["q", "k", "v", "do"]}, {"BF16"})
        self.assertEqual(metadata["causal"], "true")
        self.assertAlmostEqual(float(metadata["softmax_scale"]), 0.25)

    def test_defaults(self):
        tensors, _ = self.generate("--lengths", "3")
        self.assertEqual(tensors["q"].shape, [3, 16, 128])
        self.assertEqual(tensors["k"].shape, [3, 16, 128])

    def test_what_it_writes_runs(self):
        self.generate("--lengths", "20,8x2", "--heads", "2", "--value-dim", "24", "--head-dim", "32", "--dtype", "f16")
        result = self.results("run", self.path("out"), "--check")
        self.assertEqual(result["problem"]["documents"], 3)
        self.assertEqual(result["problem"]["value_dim"], 24)
        self.assertGreater(result["accuracy"]["o"]["cosine"], 0.99)

    def test_c5_key_lengths(self):
        lengths = ["--lengths", "27,68,17", "--key-lengths", "22,0,54", "--heads", "1", "--head-dim", "8"]
        tensors, _ = self.generate(*lengths)
        self.assertEqual(tensors["cu_seqlens_q"].values, [0, 27, 95, 112])
        self.assertEqual(tensors["cu_seqlens_k"].values, [0, 22, 22, 76])
        self.assertEqual(tensors["k"].shape[0], 76)
        self.succeed("run", self.path("out"))

    def test_no_documents(self):
        tensors, _ = self.generate("--lengths", "0x0")
        self.assertEqual(tensors["cu_seqlens"].values, [0])
        tensors, _ = self.generate("--lengths", "0x5")
        self.assertEqual(tensors["cu_seqlens"].values, [0] * 6)

    def test_same_seed_same_bytes(self):
        for distribution in ["normal", "outliers"]:
            arguments = ["--lengths", "50,7", "--heads", "2", "--head-dim", "32", "--distribution", distribution]
            contents = []
            for name, seed in [("a", "7"), ("b", "7"), ("c", "8")]:
                self.generate(*arguments, "--seed", seed, name=name)
                contents.append((self.folder / name).read_bytes())
            self.assertEqual(contents[0], contents[1])
            self.assertNotEqual(contents[0], contents[2])

    def test_normal_numbers(self):
        tensors, _ = self.generate("--lengths", "300", "--heads", "2", "--head-dim", "64", "--dtype", "f32")
        for name in ["q", "k", "v", "do"]:
            values = tensors[name].values
            self.assertAlmostEqual(statistics.fmean(values), 0, delta=0.03, msg=name)
            self.assertAlmostEqual(statistics.pstdev(values), 1, delta=0.02, msg=name)
            within = sum(abs(value) < 1 for value in values) / len(values)
            self.assertAlmostEqual(within, 0.6827, delta=0.01, msg=name)
            neighbours = statistics.fmean(a * b for a, b in itertools.pairwise(values))
            self.assertAlmostEqual(neighbours, 0, delta=0.02, msg=name)
        self.assertNotEqual(tensors["q"].values[:64], tensors["k"].values[:64])

    def test_outliers(self):
        arguments = ["--lengths", "300", "--heads", "2", "--head-dim", "64", "--dtype", "f32"]
        tensors, _ = self.generate(*arguments, "--distribution", "outliers")
        large = {}
        for name in ["q", "k", "v", "do"]:
            for head in range(2):
                deviations = [
                    math.sqrt(statistics.fmean(tensors[name][(token, head, dim)] ** 2 for token in range(300)))
                    for dim in range(64)
                ]
                channels = [dim for dim in range(64) if deviations[dim] > 5]
                large[name, head] = channels
                self.assertEqual(len(channels), 2 if name in "qk" else 0, (name, head))
                for dim in channels:
                    self.assertTrue(25 < deviations[dim] < 115, (name, head, dim, deviations[dim]))
        for head in range(2):
            self.assertFalse(set(large["q", head]) & set(large["k", head]))

    def test_refusals(self):
        base = {"--lengths": "8", "--heads": "2", "--head-dim": "16", "--out": self.path("out")}
        cases = [
            ({"--lengths": "x"}, ["--lengths", "'x'", "LENGTHxCOUNT"]),
            ({"--lengths": "-1"}, ["--lengths", "'-1'"]),
            ({"--lengths": "8,"}, ["--lengths", "''"]),
            ({"--lengths": "8x"}, ["--lengths", "'8x'"]),
            ({"--lengths": "8x2x2"}, ["--lengths", "2x2"]),
            ({"--lengths": "8x-2"}, ["--lengths", "-2"]),
            ({"--lengths": "1.5"}, ["--lengths", "1.5"]),
            ({"--lengths": "2147483648"}, ["--lengths", "2147483647"]),
            ({"--lengths": "65536x65536"}, ["--lengths", "4294967296 tokens", "2147483647"]),
            ({"--lengths": "2147483647x2147483647"}, ["--lengths", "2147483647"]),
            ({"--lengths": "0x2147483647"}, ["--lengths", "2147483647"]),
            ({"--lengths": "2000000000", "--heads": "4096"}, ["--lengths", "GiB"]),
            ({"--key-lengths": "4,4"}, ["--key-lengths", "2 documents", "1"]),
            ({"--heads": "0"}, ["--heads", "'0'"]),
            ({"--heads": "33", "--kv-heads": "2"}, ["--kv-heads", "2", "33"]),
            ({"--heads": "3", "--kv-heads": "2"}, ["--kv-heads", "2", "3"]),
            ({"--head-dim": "12"}, ["--head-dim", "12", "multiple of 8"]),
            ({"--head-dim": "264"}, ["--head-dim", "264", "256"]),
            ({"--value-dim": "0"}, ["--value-dim", "0"]),
            ({"--distribution": "uniform"}, ["--distribution", "uniform", "normal"]),
            ({"--dtype": "f64"}, ["--dtype", "f64", "bf16"]),
            ({"--seed": "-1"}, ["--seed", "-1"]),
            ({"--out": self.path("none/out")}, ["--out", "directory"]),
            ({"--out": str(self.folder)}, ["--out", "directory"]),
        ]
        for change, words in cases:
            with self.subTest(change=change):
                arguments = [part for pair in {**base, **change}.items() for part in pair]
                self.refuse("generate", *arguments, words=words)


if __name__ == "__main__":
    command_line.main()
