#!/usr/bin/env python3
"""The CUDA engine against other attention on one GPU, in one run: answers first, then times in alternation.

Needs a Hopper GPU, PyTorch for it and mxflash built with CUDA; bench/README.md says what is compared and how.
"""

import argparse
import importlib.metadata
import json
import pathlib
import platform
import statistics
import sys

import torch

from cuda_contestants import DIM, HEADS, PEERS, AbsentError, Pack, mxflash

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
WARMUP = 3
# The device waits about a millisecond before each call, in which the host launches it: no host time is in the figures.
HEAD_START = 2_000_000
# What the recipe is held to; those in 4 bits are far less exact.
TOLERANCE = {"bf16": 1e-2, "mxfp8": 8e-2, "mxfp8-tokenblock": 8e-2}


def lengths_of(text):
    parts = [part.split("x") if "x" in part else ("1", part) for part in text.split("+")]
    return [int(length) for count, length in parts for _ in range(int(count))]


def timed(call, repeats):
    """Milliseconds of each call on the device."""
    for _ in range(WARMUP):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        torch.cuda._sleep(HEAD_START)
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def versions():
    """Of what is measured, and where."""
    yield torch.cuda.get_device_name()
    yield f"Python {platform.python_version()}"
    yield f"cuDNN {torch.backends.cudnn.version()}"
    for package in ("torch", "nvidia-cudnn-frontend", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def contestants_of(options, pack):
    """Calls by name, each checked, and why the others are absent."""
    made, absent = {}, {}
    chosen = {options.recipe: (mxflash(options.recipe), TOLERANCE.get(options.recipe, 0.3)), **PEERS}
    for name, (make, tolerance) in chosen.items():
        try:
            call = make(pack)
        except AbsentError as reason:
            absent[name] = str(reason)
            continue
        error, place = pack.worst(call)
        if not error < tolerance:
            raise SystemExit(f"{name}: relative L2 {error:.2e} at {place}, {tolerance:.0e} allowed: nothing is timed")
        made[name] = (call, error)
    return made, absent


def measure(options, name):
    text, kv_heads = WORKLOADS[name]
    pack = Pack(lengths_of(text), kv_heads, options.mask == "causal")
    made, absent = contestants_of(options, pack)
    samples = {peer: [] for peer in made}
    for turn in range(options.rounds):
        for peer in list(made) if turn % 2 == 0 else reversed(made):
            samples[peer] += timed(made[peer][0], options.repeats)
    return {
        "workload": name,
        "mask": options.mask,
        "lengths": pack.lengths,
        "heads": HEADS,
        "kv_heads": kv_heads,
        "relative_l2": {peer: error for peer, (_, error) in made.items()},
        "samples_ms": samples,
        "absent": absent,
    }


def line_of(result):
    cells = [
        f"{peer} {statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f})"
        for peer, times in result["samples_ms"].items()
    ]
    cells += [f"{peer}: {reason}" for peer, reason in result["absent"].items()]
    return f"{result['workload']:>18} | " + " | ".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    for name in options.workload.split(","):
        if name not in WORKLOADS:
            parser.error(f"--workload: {name} given, {', '.join(WORKLOADS)} allowed")
    print(
        f"{', '.join(versions())}; {HEADS} heads, dims {DIM}, BF16, {options.mask}, forward; "
        f"ms on the device, median (least..most) of {options.rounds} x {options.repeats}; "
        f"{options.recipe} with its quantization and schedule"
    )
    results = []
    with torch.no_grad():
        for name in options.workload.split(","):
            results.append(measure(options, name))
            print(line_of(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
