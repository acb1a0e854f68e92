"""Bad input to the verbs that read a capture: one line that names it, exit code 2 or 3, nothing written."""

import os
import pathlib
import struct
import unittest

import command_line
from command_line import Tensor, capture, full, normal, offsets


class Refusals(command_line.CommandLineTest):
    def both(self, source, words, code=2):
        """run and audit read the same files and refuse them alike."""
        self.refuse("run", source, "--out", self.path("out"), "--json", self.path("r.json"), words=words, code=code)
        self.refuse("audit", source, "--json", self.path("a.json"), words=words, code=code)

    def changed(self, words, **tensors):
        self.both(self.write({**capture(), **tensors}), words)

    def test_missing_file(self):
        self.both(self.path("none.safetensors"), ["none.safetensors"])

    def test_directory_as_file(self):
        (self.folder / "folder").mkdir()
        self.both(self.path("folder"), ["folder"])

    def test_truncated_file(self):
        source = self.write(capture())
        data = (self.folder / "in.safetensors").read_bytes()
        for length in [0, 7, 8, 20, len(data) // 2, len(data) - 1]:
            with self.subTest(length=length):
                (self.folder / "in.safetensors").write_bytes(data[:length])
                self.both(source, ["in.safetensors"])

    def test_hostile_headers(self):
        headers = [
            b"[]",
            b"{}garbage",
            b"\xff\xfe",
            b'{"q":{"dtype":"BF16","shape":[9223372036854775807,9223372036854775807,2],"data_offsets":[0,4]}}',
            b'{"q":{"dtype":"BF16","shape":[-1,1,2],"data_offsets":[0,4]}}',
            b'{"q":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[4,0]}}',
            b'{"q":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[0,9999999999]}}',
            b'{"q":{"dtype":"FANCY","shape":[1,1,2],"data_offsets":[0,4]}}',
            b'{"q":5}',
            b"{" * 100_000,
        ]
        for header in headers:
            with self.subTest(header=header[:60]):
                (self.folder / "in").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
                self.both(self.path("in"), ["in"])
        for length in [2**63, 2**64 - 1, 10**9]:
            (self.folder / "in").write_bytes(struct.pack("<Q", length) + b"{}")
            self.both(self.path("in"), ["in"])

    def test_missing_tensors(self):
        for name in ["q", "k", "v"]:
            tensors = capture()
            del tensors[name]
            with self.subTest(name=name):
                self.both(self.write(tensors), [f"mxflash: {name}: ", "required"])
        self.both(self.write({}), ["q: ", "required"])

    def test_wrong_types(self):
        for name in ["q", "k", "v", "do"]:
            with self.subTest(name=name):
                self.changed([f"mxflash: {name}: ", "I32", "BF16"], **{name: full("I32", [48, 1, 32], 0)})
        self.changed(["mxflash: dlse: ", "BF16", "F32"], dlse=normal("BF16", [48, 2], 5))
        self.changed(["mxflash: dlse: ", "I32", "F32"], dlse=full("I32", [48, 2], 0))
        self.changed(["F32", "BF16"], k=normal("F32", [48, 1, 32], 2))

    def test_wrong_shapes(self):
        self.changed(["q: ", "[48, 32]"], q=normal("BF16", [48, 32], 1))
        self.changed(["k"], k=normal("BF16", [48, 1, 40], 2))
        self.changed(["v"], v=normal("BF16", [47, 1, 32], 3))
        self.changed(["v"], v=normal("BF16", [48, 2, 32], 3))
        self.changed(["do"], do=normal("BF16", [48, 2, 40], 4))
        self.changed(["do"], do=normal("BF16", [48, 1, 32], 4))
        self.changed(["do"], do=normal("BF16", [47, 2, 32], 4))
        for shape in [[47, 2], [48, 1], [48], [48, 2, 1]]:
            self.changed(["mxflash: dlse: ", str(shape), "allowed"], dlse=normal("F32", shape, 5))

    def test_dlse_without_do(self):
        tensors = {**capture(), "dlse": normal("F32", [48, 2], 5)}
        del tensors["do"]
        self.both(self.write(tensors), ["mxflash: dlse: ", "do"])

    def test_c10_head_dims_out_of_range(self):
        for head_dim in [4, 12, 264]:
            with self.subTest(head_dim=head_dim):
                self.both(self.write(capture(tokens=4, head_dim=head_dim)), [str(head_dim), "8", "256"])

    def test_c11_heads_that_do_not_divide(self):
        for heads, kv_heads in [(33, 2), (3, 2), (2, 4), (0, 0), (2, 0), (0, 2)]:
            with self.subTest(heads=heads, kv_heads=kv_heads):
                self.both(self.write(capture(tokens=4, heads=heads, kv_heads=kv_heads)), [str(heads), "head"])

    def test_c12_offsets(self):
        cases = {
            "starts above 0": ([1, 48], ["cu_seqlens"]),
            "decreases": ([0, 30, 20, 48], ["cu_seqlens"]),
            "ends early": ([0, 47], ["cu_seqlens", "47", "48"]),
            "ends late": ([0, 49], ["cu_seqlens", "49", "48"]),
            "negative": ([0, -5, 48], ["cu_seqlens"]),
            "lengths instead of offsets": ([16, 16, 16], ["cu_seqlens"]),
            "empty": ([], ["cu_seqlens"]),
            "covers nothing": ([0], ["cu_seqlens"]),
        }
        for name, (values, words) in cases.items():
            with self.subTest(name=name):
                self.changed(words, cu_seqlens=offsets(*values))
        self.changed(["cu_seqlens", "I64", "I32"], cu_seqlens=offsets(0, 48, dtype="I64"))
        self.changed(["cu_seqlens", "F32"], cu_seqlens=Tensor("F32", [2], [0.0, 48.0]))
        self.changed(["cu_seqlens"], cu_seqlens=Tensor("I32", [1, 2], [0, 48]))

    def test_offsets_of_each_side(self):
        good = offsets(0, 48)
        self.changed(["cu_seqlens_k"], cu_seqlens_q=good)
        self.changed(["cu_seqlens_q"], cu_seqlens_k=good)
        self.changed(["cu_seqlens"], cu_seqlens=good, cu_seqlens_q=good, cu_seqlens_k=good)
        self.changed(["cu_seqlens"], cu_seqlens=good, cu_seqlens_k=good)
        self.changed(["cu_seqlens_k"], cu_seqlens_q=good, cu_seqlens_k=offsets(0, 20, 48))
        self.changed(["cu_seqlens_k"], cu_seqlens_q=good, cu_seqlens_k=offsets(0, 40))

    def test_metadata(self):
        for text in ["", "x", "0.1x", " 0.1", "nan", "inf", "1e99", "0,1"]:
            with self.subTest(scale=text):
                self.both(
                    self.write(capture(), metadata={"softmax_scale": text}), ["softmax_scale", "given", "allowed"]
                )
        for text in ["", "True", "1", "yes"]:
            with self.subTest(causal=text):
                self.both(self.write(capture(), metadata={"causal": text}), ["causal", "true or false"])

    def test_unknown_recipe(self):
        self.refuse("run", self.write(capture()), "--recipe", "mxfp9", words=["mxfp9", "mxfp8", "nvfp4"])
        self.refuse("audit", self.write(capture()), "--recipe", "mxfp8,mxfp9", words=["mxfp9", "mxfp8"])
        self.refuse("run", self.write(capture()), "--recipe", "no.json", words=["no.json"])
        self.refuse("run", self.write(capture()), "--recipe", self.path("."), words=["--recipe"])

    def test_unknown_engine(self):
        for verb in ["run", "audit"]:
            self.refuse(verb, self.write(capture()), "--engine", "abacus", words=["engine", "abacus", "reference"])

    def test_numbers(self):
        source = self.write(capture())
        for text in ["-1", "4097", "x", "1.5", "1e3", "0x10", "99999999999999999999"]:
            with self.subTest(threads=text):
                self.refuse("run", source, f"--threads={text}", words=["--threads", "given", "0", "4096"])
        for text in ["-1", "18446744073709551616", "x", "1.5"]:
            with self.subTest(seed=text):
                self.refuse("run", source, "--seed", text, words=["--seed", "18446744073709551615"])
        self.succeed("run", source, "--seed", "18446744073709551615", "--threads", "4096")
        for text in ["0", "-1", "x"]:
            self.refuse("audit", source, "--probes", text, words=["--probes", "given", "allowed"])

    def test_unwritable_outputs(self):
        source = self.write(capture())
        (self.folder / "folder").mkdir()
        for option in ["--out", "--json"]:
            for path in [self.path("none/out"), self.path("folder"), self.path("in.safetensors/out")]:
                with self.subTest(option=option, path=path):
                    self.refuse("run", source, option, path, words=[f"{option}: ", path, "allowed"])
        self.refuse("run", source, "--out", "-", words=["--out"])
        self.refuse("run", source, "--out", "", words=["--out"])
        self.refuse("audit", source, "--json", self.path("none/a.json"), words=["--json"])

    @unittest.skipIf(os.geteuid() == 0, "every directory is writable for root")
    def test_directory_without_permission(self):
        source = self.write(capture())
        (self.folder / "closed").mkdir(0o500)
        self.refuse("run", source, "--out", self.path("closed/out"), words=["--out", "writable"])

    def test_outputs_that_are_inputs(self):
        source = self.write(capture())
        (self.folder / "link").hardlink_to(source)
        (self.folder / "symlink").symlink_to(source)
        for path in [source, "in.safetensors", "./in.safetensors", self.path("link"), self.path("symlink")]:
            with self.subTest(path=path):
                self.refuse("run", source, "--out", path, words=["--out", "input"])
                self.refuse("run", source, "--json", path, words=["--json", "input"])
                self.refuse("audit", source, "--json", path, words=["--json", "input"])
        self.refuse("run", source, "--out", "new", "--json", "new", words=["--json", "--out"])

    def test_full_standard_output(self):
        source = self.write(capture())
        with pathlib.Path("/dev/full").open("w") as full_device:
            done = command_line.subprocess.run(
                [command_line.PROGRAM, "run", source], stdout=full_device, stderr=-1, text=True, check=False
            )
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output", done.stderr)

    def test_an_earlier_output_survives_a_failure(self):
        (self.folder / "out").write_text("precious")
        source = self.write({**capture(), "v": normal("BF16", [47, 1, 32], 3)})
        self.refuse("run", source, "--out", self.path("out"))
        self.assertEqual((self.folder / "out").read_text(), "precious")


if __name__ == "__main__":
    command_line.main()
