"""`mxflash run`: causal, full and window masks, through what each query sees."""

import math

import command_line
from command_line import full, normal, offsets, read_safetensors

UNBOUNDED = 10**9


class Masks(command_line.CommandLineTest):
    """q = k = 0 makes every visible key weigh the same, so that exp(lse) counts the keys that a query sees."""

    def file(self, queries, keys, metadata=None):
        tensors = {
            "q": full("F32", [sum(queries), 1, 8], 0.0),
            "k": full("F32", [sum(keys), 1, 8], 0.0),
            "v": normal("F32", [sum(keys), 1, 8], 3),
            "cu_seqlens_q": offsets(*[sum(queries[:i]) for i in range(len(queries) + 1)]),
            "cu_seqlens_k": offsets(*[sum(keys[:i]) for i in range(len(keys) + 1)]),
        }
        return self.write(tensors, metadata=metadata)

    def counts(self, source, *arguments):
        self.succeed("run", source, "--recipe", "bf16", "--out", self.path("out"), *arguments)
        lse = read_safetensors(self.path("out"))[0]["lse"]
        return [0 if value == -math.inf else round(math.exp(value)) for value in lse.values]

    def expected(self, queries, keys, left, right):
        counts = []
        for length, key_length in zip(queries, keys, strict=True):
            for query in range(length):
                aligned = query + key_length - length
                counts.append(sum(-left <= key - aligned <= right for key in range(key_length)))
        return counts

    def test_c7_alignment_is_bottom_right(self):
        source = self.file([2, 5, 3], [5, 2, 3])
        self.assertEqual(self.counts(source), [4, 5, 0, 0, 0, 1, 2, 1, 2, 3])
        self.assertEqual(self.counts(source, "--full"), [5, 5, 2, 2, 2, 2, 2, 3, 3, 3])

    def test_metadata_and_full(self):
        source = self.file([3], [3], {"causal": "false"})
        self.assertEqual(self.counts(source), [3, 3, 3])
        self.assertEqual(self.counts(source, "--full"), [3, 3, 3])
        self.assertFalse(self.results("run", source)["problem"]["causal"])
        self.assertEqual(self.counts(self.file([3], [3], {"causal": "true"}), "--full"), [3, 3, 3])

    def test_c8_windows(self):
        queries, keys = [40, 3, 7], [40, 6, 2]
        source = self.file(queries, keys)
        windows = {"0,0": (0, 0), "39,0": (39, 0), "5,2": (5, 2), "inf,3": (UNBOUNDED, 3), "4,inf": (4, UNBOUNDED)}
        windows |= {"7,-3": (7, -3), "-2,5": (-2, 5), "7,-8": (7, -8), "1,2147483647": (1, UNBOUNDED)}
        windows |= {"1,9223372036854775807": (1, UNBOUNDED), "inf,inf": (UNBOUNDED, UNBOUNDED)}
        windows |= {"-2147483648,-2147483648": (-(2**31), -(2**31))}
        for text, (left, right) in windows.items():
            with self.subTest(window=text):
                wide = self.counts(source, "--full", "--window", text)
                self.assertEqual(wide, self.expected(queries, keys, left, right))
                causal = self.counts(source, f"--window={text}")
                self.assertEqual(causal, self.expected(queries, keys, left, min(right, 0)))

    def test_window_in_the_json(self):
        source = self.file([3], [3])
        self.assertIsNone(self.results("run", source)["problem"]["window"])
        self.assertEqual(self.results("run", source, "--window", "2,5")["problem"]["window"], [2, 0])
        self.assertEqual(self.results("run", source, "--full", "--window", "inf,1")["problem"]["window"], [None, 1])

    def test_refused_windows(self):
        source = self.file([3], [3])
        for text in [
            "3",
            "3,",
            ",3",
            "1,2,3",
            "a,1",
            "1.5,1",
            "1,nan",
            "99999999999999999999,0",
            "-2147483649,0",
            " 1,1",
        ]:
            with self.subTest(window=text):
                self.refuse("run", source, "--window", text, words=["--window", "given", "allowed"])


if __name__ == "__main__":
    command_line.main()
