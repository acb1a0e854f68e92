#!/usr/bin/env python3
"""The CUDA engine against other attention on one GPU, in one run: answers first, then times in alternation.

Needs a Hopper GPU, PyTorch for it and mxflash built with CUDA; bench/README.md says what is compared and how.
"""

import argparse
import concurrent.futures
import faulthandler
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import time

import torch

import cuda_report
import figures
from cuda_contestants import COMPILED, DIM, PEERS, AbsentError, Pack, mxflash
from cuda_report import HEADS, WORKLOADS

WARMUP = 3
# The device waits so many cycles before each call, in which the host launches it: no host time is in the figures.
HEAD_START = {"forward": 2_000_000, "backward": 6_000_000, "training": 10_000_000}
LATE = 5
STATE = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
# What the recipe is held to; those in 4 bits are far less exact.
TOLERANCE = {"bf16": 1e-2, "mxfp8": 8e-2, "mxfp8-tokenblock": 8e-2}
# Gradients have dO and dS rounded too: 7 % of dq and dk of such tensors are mxfp8's due by the reference engine.
OF_GRADIENTS = {"bf16": 1e-2, "mxfp8": 1e-1, "mxfp8-tokenblock": 1e-1}


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
    raise RuntimeError(
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


def driver_says(names):
    """What the driver's tool knows of the device: clocks, power, heat."""
    device = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nvidia-smi does not say ({error})"
    return ", ".join(f"{name} {value.strip()}" for name, value in zip(names, done.stdout.split(","), strict=True))


def versions():
    """Of what is measured, and where."""
    yield torch.cuda.get_device_name()
    yield driver_says(["driver_version", "clocks.max.sm", "clocks.max.mem"])
    yield f"CUDA {torch.version.cuda}"
    yield f"Python {platform.python_version()}"
    yield f"cuDNN {torch.backends.cudnn.version()}"
    for package in ("torch", "nvidia-cudnn-frontend", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def words_of(error):
    words = (str(error) or "no words").splitlines()[0][:160]
    return words if isinstance(error, AbsentError) else f"{type(error).__name__} ({words})"


def check(contestant, tolerances, pack):
    """({what: its error}, why what cannot be had cannot, what is wrong), of o and of gradients; phases go."""
    errors, absent, wrong = {}, {}, {}
    checks = ("o", ("forward",), pack.worst), ("gradients", ("backward", "training"), pack.worst_gradient)
    for (what, phases, worst), tolerance in zip(checks, tolerances, strict=True):
        if not set(phases) & set(contestant.phases):
            continue
        try:
            errors[what], place = worst(contestant)
            if errors[what] < tolerance:
                continue
            wrong[what] = f"relative L2 {errors[what]:.2e} at {place}, {tolerance:.0e} allowed"
            phases = contestant.phases  # Who is wrong in one thing is not timed in another.
        except Exception as error:  # Others' packages raise whatever they like.
            absent[what] = words_of(error)
        contestant.phases = tuple(phase for phase in contestant.phases if phase not in phases)
    return errors, absent, wrong


def all_of(options):
    """{name: (how it is made, what its o and its gradients are held to)}"""
    own = TOLERANCE.get(options.recipe, 0.3), OF_GRADIENTS.get(options.recipe, 0.6)
    return {
        options.recipe: (mxflash(options.recipe), own),
        f"{options.recipe}, dq in any order": (mxflash(options.recipe, deterministic=False), own),
        **{name: (make, (tolerance, tolerance)) for name, (make, tolerance) in PEERS.items()},
    }


def contestants_of(options, pack, entry):
    """{name: contestant} of those whose answers are right; the entry says what they were and who is missing."""
    made = {}
    for name, (make, tolerances) in all_of(options).items():
        begin = time.monotonic()
        missing = entry["absent" if name in PEERS else "wrong"]  # The recipe has no excuse.
        try:
            contestant = make(pack)
        except Exception as error:  # Others' packages raise whatever they like.
            missing[name] = words_of(error)
            continue
        contestant.phases = tuple(phase for phase in options.phase if phase in contestant.phases)
        entry["relative_l2"][name], absent, wrong = check(contestant, tolerances, pack)
        missing |= {f"{name}, {what}": reason for what, reason in absent.items()}
        entry["wrong"] |= {f"{name}, {what}": reason for what, reason in wrong.items()}
        entry["seconds"][f"making and checking {name}"] = time.monotonic() - begin
        made[name] = contestant
    return made


def measure_phase(options, phase, made, pack):
    """Milliseconds and peak bytes of each contestant that has the phase."""
    calls = {name: contestant.call(phase, pack.do) for name, contestant in made.items() if phase in contestant.phases}
    names, samples, peaks = list(calls), {name: [] for name in calls}, {}
    for turn in range(options.rounds):
        for index in figures.order(len(names), turn):
            name = names[index]
            samples[name] += timed(calls[name], options.repeats, HEAD_START[phase])
            peaks[name] = peak_of(calls[name])
    return {"samples_ms": samples, "peak_bytes": {name: peaks[name] for name in names if name in peaks}}


def shape_of(options, name):
    """(lengths, heads of k and v)"""
    text, kv_heads = WORKLOADS[name]
    return cuda_report.lengths_of(text), options.kv_heads or kv_heads


def measure(options, entry):
    """Fills a workload's entry, and yields after each phase."""
    pack = Pack(entry["lengths"], entry["kv_heads"], options.mask == "causal")
    made = contestants_of(options, pack, entry)
    entry["device"].append(driver_says(STATE))
    for phase in options.phase:
        begin = time.monotonic()
        entry["phases"][phase] = measure_phase(options, phase, made, pack)
        entry["seconds"][phase] = time.monotonic() - begin
        yield phase
    entry["device"].append(driver_says(STATE))


def run_workload(options, run, name):
    """Measures it, and writes the files after each step: who is stopped keeps what was measured."""
    lengths, kv_heads = shape_of(options, name)
    entry = {"workload": name, "lengths": lengths, "heads": HEADS, "kv_heads": kv_heads}
    entry |= {key: {} for key in ("relative_l2", "absent", "wrong", "seconds", "phases")} | {"device": []}
    entry["failed"] = "did not end"  # What a process that dies leaves behind.
    run["workloads"].append(entry)
    cuda_report.save(run, options)
    # Whoever hangs on the device holds up a call that no signal ends: then the process says where it is, and ends.
    faulthandler.dump_traceback_later(options.patience, exit=True)
    try:
        for phase in measure(options, entry):
            cells = [
                f"{peer} {cuda_report.time_cell(times)}, {entry['phases'][phase]['peak_bytes'][peer] / 2**20:.0f} MiB"
                for peer, times in entry["phases"][phase]["samples_ms"].items()
            ]
            print(f"{name:>18} {phase:>8} | " + " | ".join(cells), flush=True)
            cuda_report.save(run, options)
        del entry["failed"]
    except RuntimeError as error:
        entry["failed"] = words_of(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    for line in cuda_report.notes({"workloads": [entry]}):
        print(line, flush=True)
    print("seconds: " + ", ".join(f"{what} {value:.1f}" for what, value in entry["seconds"].items()), flush=True)
    cuda_report.save(run, options)
    torch.cuda.synchronize()  # If the device itself is lost, this ends the process.


def compile_only(options):
    """What another process does for this one: the peer's calls, once, so that its files of compiled code are there."""
    for name in options.workload:
        lengths, kv_heads = shape_of(options, name)
        pack = Pack(lengths, kv_heads, options.mask == "causal")
        try:
            contestant = PEERS[options.compile_only][0](pack)
        except AbsentError:
            return  # The run that is timed says why.
        for phase in options.phase:
            if phase in contestant.phases:
                contestant.call(phase, pack.do)()
    torch.cuda.synchronize()


def compile_first(options, names):
    """Has the peers compiled by processes side by side, before anything is timed."""
    begin, shapes = time.monotonic(), {name: shape_of(options, name) for name in names}
    shared = ["--mask", options.mask, "--phase", ",".join(options.phase), "--kv-heads", str(options.kv_heads)]
    jobs = [(peer, name) for name in cuda_report.one_of_each_shape(shapes) for peer in COMPILED]

    def run(job):
        """Seconds that it took, and what went wrong: what is no mishap the run that is timed meets again."""
        peer, name = job
        command = [sys.executable, __file__, *shared, "--workload", name, "--compile-only", peer]
        start = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.patience)
            trouble = done.stderr.strip().splitlines()[-1:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            trouble = "stopped"
        return time.monotonic() - start, trouble

    with concurrent.futures.ThreadPoolExecutor(options.compile_processes) as pool:
        for (peer, name), (seconds, trouble) in zip(jobs, pool.map(run, jobs), strict=True):
            print(f"compiled {peer} for {name}: {seconds:.0f} s {trouble}".rstrip(), flush=True)
    print(f"compiled beforehand in {time.monotonic() - begin:.0f} s", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--phase", default=",".join(HEAD_START), help="names separated by commas")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names separated by commas")
    parser.add_argument("--kv-heads", type=int, default=0, help=f"1 to {HEADS}; default, or 0: each workload's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile-processes", type=int, default=0, help="that compile peers at once beforehand")
    parser.add_argument("--compile-only", choices=COMPILED, help="a peer that is called once and not timed")
    parser.add_argument("--patience", type=float, default=600, help="seconds that compiling, or a workload, may take")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--resume", action="store_true", help="leave out what the run in --json had begun")
    options = parser.parse_args(arguments)
    for option, allowed in (("workload", WORKLOADS), ("phase", HEAD_START)):
        names = getattr(options, option).split(",")
        for name in names:
            if name not in allowed:
                parser.error(f"--{option}: {name} given, {', '.join(allowed)} allowed")
        setattr(options, option, names)
    if options.kv_heads < 0 or (options.kv_heads and HEADS % options.kv_heads):
        parser.error(f"--kv-heads: {options.kv_heads} given, 0 and divisors of {HEADS} allowed")
    for name, least in (("rounds", 1), ("repeats", 1), ("patience", 1), ("compile_processes", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} given, {least} or more allowed")
    if options.resume and not options.json:
        parser.error("--resume: no --json given, the file of the run to go on with allowed")
    return options


def main(arguments):
    options = parse(arguments)
    # FlashAttention 4 looks here when it is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if options.compile_only:
        compile_only(options)
        return 0
    settings = {"recipe": options.recipe, "mask": options.mask, "phases": options.phase}
    settings |= {"kv_heads": options.kv_heads, "rounds": options.rounds, "repeats": options.repeats}
    try:
        run = cuda_report.load(options.json if options.resume else None, list(versions()), settings)
    except ValueError as error:
        raise SystemExit(f"--resume: {error}") from None
    names = [name for name in options.workload if name not in cuda_report.begun(run)]
    print(
        f"{', '.join(run['versions'])}; {HEADS} heads, dims {DIM}, BF16, {options.mask}; "
        f"ms on the device, median (least..most) of {options.rounds} x {options.repeats}; "
        f"{options.recipe} with its quantization and schedule; the most memory beside what was there before the call",
        flush=True,
    )
    if options.compile_processes and names:
        compile_first(options, names)
    for name in names:
        run_workload(options, run, name)
    return 1 if cuda_report.wrong(run) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
