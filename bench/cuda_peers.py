#!/usr/bin/env python3
"""The CUDA engine against PyTorch's BF16 attention on one GPU, in one run: answers first, then times in alternation.

Needs a Hopper GPU, PyTorch for it and a build of preset gpu; see bench/README.md for what is compared and how.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Eleven and twenty-nine lengths, log-uniform between 128 and 8192.
ELEVEN = "5120+2816+2048+1664+1280+1024+896+640+512+256+128"
TWENTY_NINE = (
    "8192+7168+6144+5632+4608+4096+3584+3072+2816+2560+2304+2048+1792+1664+1536+1408+1280+1152+1024+896+768"
    "+512+384+256+192+160+128+128+32"
)
WORKLOADS = {
    "16x1024": ("16x1024", 16),
    "8x2048": ("8x2048", 16),
    "4x4096": ("4x4096", 16),
    "2x16384": ("2x16384", 16),
    "8192+32x256": ("8192+32x256", 16),
    "8192+224x256": ("8192+224x256", 16),
    "11 log-uniform": (ELEVEN, 16),
    "11 with 4 kv heads": (ELEVEN, 4),
    "29 log-uniform": (TWENTY_NINE, 16),
}
HEADS, DIM = 16, 128
WARMUP = 3


def lengths_of(text):
    parts = [part.split("x") if "x" in part else ("1", part) for part in text.split("+")]
    return [int(length) for count, length in parts for _ in range(int(count))]


def timed(call, repeats):
    """Milliseconds of each call, by events on the stream."""
    for _ in range(WARMUP):
        call()
    samples = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return samples


class Pack:
    """Random BF16 tensors [tokens, heads, dims] of one packing."""

    def __init__(self, lengths, kv_heads):
        self.lengths, self.kv_heads, self.tokens = lengths, kv_heads, sum(lengths)
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, DIM))
        self.q, self.k, self.v = (
            torch.randn(self.tokens, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)
            for shape in shapes
        )
        self.offsets = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def exact(self, document, head):
        """Float64 attention of one document and query head: [length, dims]."""
        rows = slice(sum(self.lengths[:document]), sum(self.lengths[: document + 1]))
        kv = head // (HEADS // self.kv_heads)
        q, k, v = self.q[rows, head].double(), self.k[rows, kv].double(), self.v[rows, kv].double()
        scores = (q @ k.T / DIM**0.5).masked_fill(~torch.ones(len(q), len(q), device="cuda").tril().bool(), -torch.inf)
        return rows, scores.softmax(-1) @ v


def varlen(pack):
    from torch.nn.attention.varlen import varlen_attn

    longest = max(pack.lengths)
    repeat = HEADS // pack.kv_heads
    k, v = (x.repeat_interleave(repeat, 1).contiguous() for x in (pack.k, pack.v))
    return lambda: varlen_attn(
        pack.q, k, v, pack.offsets, pack.offsets, longest, longest, **causal_argument(varlen_attn)
    )


def causal_argument(function):
    """The argument has had two names."""
    import inspect

    return {"is_causal": True} if "is_causal" in inspect.signature(function).parameters else {"window_size": (-1, 0)}


def flex(pack):
    document = torch.repeat_interleave(
        torch.arange(len(pack.lengths), device="cuda"), torch.tensor(pack.lengths, device="cuda")
    )

    def mask(_batch, _head, query, key):
        return (document[query] == document[key]) & (query >= key)

    block_mask = torch.compile(create_block_mask)(mask, None, None, pack.tokens, pack.tokens, device="cuda")
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (pack.q, pack.k, pack.v))
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = pack.kv_heads != HEADS
    return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)[0].transpose(0, 1)


def cudnn(pack):
    if len(set(pack.lengths)) != 1 or pack.kv_heads != HEADS:
        return None
    shape = (len(pack.lengths), pack.lengths[0], HEADS, DIM)
    q, k, v = (x.view(shape).transpose(1, 2) for x in (pack.q, pack.k, pack.v))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(pack.tokens, HEADS, DIM)

    return call


PEERS = {"torch varlen": varlen, "flex": flex, "cudnn dense": cudnn}


def check(name, call, pack):
    """The shortest and the longest document, first and last head, against float64."""
    got = call().reshape(pack.tokens, HEADS, DIM)
    for document in {pack.lengths.index(min(pack.lengths)), pack.lengths.index(max(pack.lengths))}:
        if pack.lengths[document] > 8192:
            continue  # Its float64 scores would take gigabytes.
        for head in (0, HEADS - 1):
            rows, want = pack.exact(document, head)
            error = ((got[rows, head].double() - want).norm() / want.norm()).item()
            if not error < 1e-2:
                raise SystemExit(f"{name}: relative L2 {error:.2e} in document {document}, head {head}: not timed")


def ours(options, text, kv_heads, first):
    """Samples of `mxflash bench`, which checks its answer the first time: the check takes longer than the calls."""
    command = [options.mxflash, "bench", "--engine", "cuda", "--recipe", options.recipe, "--workload", text]
    command += ["--heads", str(HEADS), "--kv-heads", str(kv_heads), "--head-dim", str(DIM), "--forward-only"]
    command += ["--warmup", str(WARMUP), "--repeats", str(options.repeats), "--json", "-"]
    command += ["--check-pairs", str(options.check_pairs)] if first else ["--no-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"mxflash bench: {done.stderr.strip() or done.stdout.strip()}")
    entry = json.loads(done.stdout)["benchmarks"][0]
    return entry["forward"]["samples_ms"]


def measure(options, name):
    text, kv_heads = WORKLOADS[name]
    pack = Pack(lengths_of(text), kv_heads)
    contestants = {peer: make(pack) for peer, make in PEERS.items()}
    contestants = {peer: call for peer, call in contestants.items() if call is not None}
    for peer, call in contestants.items():
        check(peer, call, pack)
    samples = {peer: [] for peer in [options.recipe, *contestants]}
    for turn in range(options.rounds):
        order = list(samples) if turn % 2 == 0 else list(samples)[::-1]
        for peer in order:
            if peer == options.recipe:
                samples[peer] += ours(options, text, kv_heads, turn == 0)
            else:
                samples[peer] += timed(contestants[peer], options.repeats)
    return {"workload": name, "lengths": pack.lengths, "heads": HEADS, "kv_heads": kv_heads, "samples_ms": samples}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxflash", default=str(ROOT / "build/gpu/tools/mxflash/mxflash"))
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check-pairs", type=int, default=1 << 24)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
        f"Python {platform.python_version()}; {HEADS} heads, dims {DIM}, BF16, causal, forward; "
        f"ms, median (least..most) of {options.rounds} x {options.repeats}; "
        f"{options.recipe} with its quantization and schedule"
    )
    results = []
    for name in options.workload.split(","):
        result = measure(options, name)
        results.append(result)
        cells = [
            f"{peer} {statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f})"
            for peer, times in result["samples_ms"].items()
        ]
        print(f"{name:>16} | " + " | ".join(cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
