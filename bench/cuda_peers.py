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
# The device waits so many cycles before each call, in which the host launches it: no host time is in the figures.
HEAD_START = {"forward": 2_000_000, "backward": 6_000_000, "training": 10_000_000}
LATE = 5
# What the recipe is held to; those in 4 bits are far less exact.
TOLERANCE = {"bf16": 1e-2, "mxfp8": 8e-2, "mxfp8-tokenblock": 8e-2}
# Gradients have dO and dS rounded too: 7 % of dq and dk of such tensors are mxfp8's due by the reference engine.
OF_GRADIENTS = {"bf16": 1e-2, "mxfp8": 1e-1, "mxfp8-tokenblock": 1e-1}


def lengths_of(text):
    parts = [part.split("x") if "x" in part else ("1", part) for part in text.split("+")]
    return [int(length) for count, length in parts for _ in range(int(count))]


def timed(call, repeats, head_start):
    """Milliseconds of each call on the device, which waits first, longer where the host was late."""
    for _ in range(WARMUP):
        call()
    for _ in range(LATE):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        late = False
        for start, stop in events:
            torch.cuda._sleep(head_start)
            start.record()
            call()
            late |= start.query()
            stop.record()
        torch.cuda.synchronize()
        if not late:
            return [start.elapsed_time(stop) for start, stop in events]
        head_start *= 2
    raise SystemExit(
        "the host does not launch a call in the time that the device waits: it is too busy, or it waits too"
    )


def peak_of(call):
    """Bytes of torch's allocator beside those that were there before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


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


def held(name, worst, tolerance):
    """The error, which has to be below the tolerance."""
    error, place = worst
    if not error < tolerance:
        raise SystemExit(f"{name}: relative L2 {error:.2e} at {place}, {tolerance:.0e} allowed: nothing is timed")
    return error


def check(name, contestant, tolerances, pack):
    """{what: its error}, of o and of gradients, and why what cannot be had cannot; its phases go."""
    errors, absent = {}, {}
    checks = ("o", ("forward",), pack.worst), ("gradients", ("backward", "training"), pack.worst_gradient)
    for (what, phases, worst), tolerance in zip(checks, tolerances, strict=True):
        if not set(phases) & set(contestant.phases):
            continue
        try:
            errors[what] = held(name, worst(contestant), tolerance)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            words = (str(error) or "no words").splitlines()[0]
            absent[f"{name}, {what}"] = f"{type(error).__name__} ({words[:160]})"
            contestant.phases = tuple(phase for phase in contestant.phases if phase not in phases)
    return errors, absent


def contestants_of(options, pack):
    """({name: (contestant, errors)}, why the others are absent)."""
    made, absent = {}, {}
    own = TOLERANCE.get(options.recipe, 0.3), OF_GRADIENTS.get(options.recipe, 0.6)
    chosen = {
        options.recipe: (mxflash(options.recipe), own),
        f"{options.recipe}, dq in any order": (mxflash(options.recipe, deterministic=False), own),
        **{name: (make, (tolerance, tolerance)) for name, (make, tolerance) in PEERS.items()},
    }
    for name, (make, tolerances) in chosen.items():
        try:
            contestant = make(pack)
        except AbsentError as reason:
            absent[name] = str(reason)
            continue
        contestant.phases = tuple(phase for phase in options.phase if phase in contestant.phases)
        errors, reasons = check(name, contestant, tolerances, pack)
        absent |= reasons
        if contestant.phases:
            made[name] = (contestant, errors)
    return made, absent


def measure_phase(options, phase, made, pack):
    """(milliseconds, peak bytes) of each contestant that has the phase."""
    calls = {
        peer: contestant.call(phase, pack.do) for peer, (contestant, _) in made.items() if phase in contestant.phases
    }
    samples, peaks = {peer: [] for peer in calls}, {}
    for turn in range(options.rounds):
        for peer in list(calls) if turn % 2 == 0 else reversed(calls):
            samples[peer] += timed(calls[peer], options.repeats, HEAD_START[phase])
            peaks[peer] = peak_of(calls[peer])
    return samples, peaks


def measure(options, name):
    """One result a phase."""
    text, kv_heads = WORKLOADS[name]
    pack = Pack(lengths_of(text), kv_heads, options.mask == "causal")
    made, absent = contestants_of(options, pack)
    for phase in options.phase:
        samples, peaks = measure_phase(options, phase, made, pack)
        yield {
            "workload": name,
            "phase": phase,
            "mask": options.mask,
            "lengths": pack.lengths,
            "heads": HEADS,
            "kv_heads": kv_heads,
            "relative_l2": {peer: errors for peer, (_, errors) in made.items()},
            "samples_ms": samples,
            "peak_bytes": peaks,
            "absent": absent,
        }


def line_of(result):
    cells = [
        f"{peer} {statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f}), "
        f"{result['peak_bytes'][peer] / 2**20:.0f} MiB"
        for peer, times in result["samples_ms"].items()
    ]
    cells += [f"{peer}: {reason}" for peer, reason in result["absent"].items()]
    return f"{result['workload']:>18} {result['phase']:>8} | " + " | ".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--phase", default=",".join(HEAD_START), help="names separated by commas")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    for option, allowed in (("workload", WORKLOADS), ("phase", HEAD_START)):
        names = getattr(options, option).split(",")
        for name in names:
            if name not in allowed:
                parser.error(f"--{option}: {name} given, {', '.join(allowed)} allowed")
        setattr(options, option, names)
    print(
        f"{', '.join(versions())}; {HEADS} heads, dims {DIM}, BF16, {options.mask}; "
        f"ms on the device, median (least..most) of {options.rounds} x {options.repeats}; "
        f"{options.recipe} with its quantization and schedule; the most memory beside what was there before the call"
    )
    results = []
    for name in options.workload:
        for result in measure(options, name):
            results.append(result)
            print(line_of(result), flush=True)
            if options.json:  # Again and again: who is stopped keeps what was measured.
                options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
