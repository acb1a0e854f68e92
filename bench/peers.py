#!/usr/bin/env python3
"""The CPU engine against other CPU attention, in one run: answers first, then times in alternation.

`make peers` sets everything up and runs it with ARGS; see bench/README.md for what is compared and how.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile")
FLAGS += ("amx_int8", "amx_bf16", "amx_fp16")
WORKLOADS = ("single", "equal", "skewed", "log-uniform")
PEERS = ("torch-fp32", "torch-bf16", "onnxruntime")
SETTLE_SECONDS = 0.05  # A pool's threads spin a while after a call; not at the expense of the next contestant.


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxflash", type=pathlib.Path, default=ROOT / "build/release/tools/mxflash/mxflash")
    parser.add_argument("--recipe", default="mxfp8", help="recipes separated by commas; empty: peers only")
    parser.add_argument("--engine", default="auto", help="of mxflash, names separated by commas")
    parser.add_argument("--peers", default=",".join(PEERS), help="separated by commas; empty: mxflash only")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names separated by commas")
    parser.add_argument("--tokens", default="1024,4096", help="numbers separated by commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of a contestant in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "build/peers.json")
    parser.add_argument("--out", type=pathlib.Path, help="file of the tables; default: standard output")
    options = parser.parse_args(arguments)
    for name in ("recipe", "peers", "workload", "tokens"):
        setattr(options, name, [part for part in getattr(options, name).split(",") if part])
    for name, given, allowed in (("peers", options.peers, PEERS), ("workload", options.workload, WORKLOADS)):
        for one in given:
            if one not in allowed:
                parser.error(f"--{name}: '{one}' given, {', '.join(allowed)} allowed")
    for name in ("rounds", "repeats", "threads", "heads", "kv_heads", "head_dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} given, 1 or more allowed")
    if not all(text.isdecimal() and int(text) > 0 for text in options.tokens):
        parser.error(f"--tokens: '{','.join(options.tokens)}' given, positive integers separated by commas allowed")
    if not options.mxflash.is_file():
        parser.error(f"--mxflash: {options.mxflash} given, the built program allowed (make peers builds it)")
    return options


def say(text):
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def command_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(reversed([tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "clock_mhz": fields.get("cpu MHz"),
        "cache": fields.get("cache size"),
        "flags": [flag for flag in FLAGS if flag in flags],
        "kernel": platform.release(),
        "load_before": os.getloadavg(),
    }


def versions(options):
    import onnxruntime
    import torch

    return {
        "mxflash": command_line(str(options.mxflash), "--version"),
        "mxflash_commit": command_line("git", "describe", "--always", "--dirty", "--tags"),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }


def make_contestants(options):
    import torch

    import contestants

    peers = {
        "torch-fp32": lambda: contestants.Torch(torch.float32, options.threads),
        "torch-bf16": lambda: contestants.Torch(torch.bfloat16, options.threads),
        "onnxruntime": lambda: contestants.OnnxRuntime(options.threads),
    }
    engines = options.engine.split(",")
    ours = [
        contestants.Mxflash(options.mxflash, name, options.threads, engine)
        for engine in engines
        for name in options.recipe
    ]
    return [*ours, *(peers[name]() for name in options.peers)]


def shape_of(options, workload, tokens):
    """The documents of a workload as `mxflash bench` lays them; a call with next to no work says which."""
    import contestants

    shape = contestants.Shape(tokens, 1, 1, 8, [])
    quick = ["--no-check", "--forward-only", "--repeats", "1", "--warmup", "0"]
    result = contestants.bench_json(options.mxflash, shape, workload, "bf16", *quick)
    lengths = figures.lengths_of(result["benchmarks"][0]["cu_seqlens"])
    compiler = result["machine"]["compiler"]
    return contestants.Shape(tokens, options.heads, options.kv_heads, options.head_dim, lengths), compiler


def play(options, shape, workload, phases):
    """One workload: every contestant prepared and checked, then the rounds."""
    import contestants

    data = contestants.Data(shape, options.seed)
    kv_heads = sorted({0, shape.kv_heads - 1})
    players = make_contestants(options)
    checks = []
    for player in players:
        say(f"{workload} {shape.tokens}: {player.name}: tuning and check")
        player.workload = workload
        player.prepare(data, phases)
        checks.append(player.check(data, kv_heads))
    wrong = [player.name for player, check in zip(players, checks, strict=True) if not all_right(check)]
    samples = [{} for _ in players]
    for turn in range(options.rounds):
        say(f"{workload} {shape.tokens}: round {turn + 1} of {options.rounds}")
        for place in figures.order(len(players), turn):
            if players[place].name in wrong:
                continue  # A wrong answer has no speed.
            time.sleep(SETTLE_SECONDS)
            for phase, values in players[place].sample(options.repeats).items():
                samples[place].setdefault(phase, []).extend(values)
    return [result_of(*parts, shape) for parts in zip(players, checks, samples, strict=True)]


def all_right(check):
    return all(entry["right"] for entry in check.values())


def result_of(player, check, samples, shape):
    result = {
        "name": player.name,
        "ceiling": player.ceiling,
        "quantization_included": player.name.startswith("mxflash"),
        "right": all_right(check),
        "check": check,
        "tuning": player.tuning,
        "phases": {},
    }
    for phase, values in samples.items():
        work = figures.flops(phase, shape.heads, shape.lengths, shape.head_dim)
        result["phases"][phase] = {"flops": work} | figures.summary(values)
    return result


def memory(options, shape, workload, results):
    """Of mxflash: the largest resident set of a call beyond that of a tiny one, against inputs and outputs."""
    import contestants

    tiny = contestants.Shape(32, 1, 1, 8, [32])
    rows = []
    for recipe in options.recipe:
        player = contestants.Mxflash(options.mxflash, recipe, options.threads, options.engine.split(",")[0])
        queries = 2 * shape.tokens * shape.heads * shape.head_dim
        keys = 2 * shape.tokens * shape.kv_heads * shape.head_dim
        inputs = 2 * queries + 2 * keys
        log_sums = 4 * shape.tokens * shape.heads
        sizes = {"forward": inputs + queries + log_sums, "forward+backward": inputs + queries + 2 * keys}
        phases = next(result["phases"] for result in results if result["name"] == player.name)
        for phase in phases:
            only = ["--forward-only"] if phase == "forward" else []
            base = player.peak_bytes(tiny, "single", *only)
            peak = player.peak_bytes(shape, workload, *only)
            row = {"recipe": recipe, "workload": workload, "tokens": shape.tokens, "phase": phase}
            row |= {"peak_bytes": peak, "base_bytes": base, "tensor_bytes": sizes[phase]}
            rows.append(row | {"share": figures.peak_share(peak, base, sizes[phase])})
    return rows


def ceiling_of(report, kind):
    threads = report["ceilings"]["threads"][str(report["method"]["threads"])]
    return threads[f"{kind}_gflops_per_second"]


def ceiling_lines(report):
    rows = []
    for threads, entry in report["ceilings"]["threads"].items():
        cells = [entry[f"{kind}_gflops_per_second"] for kind in ("fp32", "bf16")] + [entry["copy_gb_per_second"]]
        rows.append([threads, *map(figures.number, cells)])
    header = ["threads", "FP32 product, GFLOP/s", "BF16 product, GFLOP/s", "copy, GB/s"]
    return [
        f"Ceilings, the best over the run: {report['ceilings']['product']}; copy of {report['ceilings']['copy']}.",
        "",
        figures.markdown(header, rows),
        "",
    ]


def how(tuning):
    """What tuning chose, once where it chose the same for all phases."""
    ways = {phase: tuned["chosen"] for phase, tuned in tuning.items()}
    if len(set(ways.values())) == 1:
        return next(iter(ways.values()))
    return "; ".join(f"{phase}: {way}" for phase, way in ways.items())


def time_lines(report, group):
    rows = []
    for result in group["results"]:
        cells = [result["name"] if result["right"] else f"{result['name']}: WRONG, not timed", how(result["tuning"])]
        ceiling = ceiling_of(report, result["ceiling"])
        for phase in report["method"]["phases"]:
            timed = result["phases"].get(phase)
            cells += [figures.time_cell(timed), figures.rate_cell(timed, ceiling)]
        rows.append(cells)
    header = ["contestant", "how"]
    for phase in report["method"]["phases"]:
        header += [f"{phase}, ms", "GFLOP/s (of ceiling)"]
    title = f"{group['workload']}, {group['tokens']} tokens: documents {figures.documents_text(group['lengths'])}"
    return [f"**{title}**", "", figures.markdown(header, rows, left=2), ""]


def check_lines(report):
    rows = []
    for group in report["workloads"]:
        for result in group["results"]:
            for phase, check in result["check"].items():
                errors = "; ".join(
                    f"{name} {entry['relative_l2']:.1e} / {entry['max_abs']:.1e}"
                    for name, entry in check["accuracy"].items()
                )
                if "kv_heads_checked" in check:
                    part = f"{len(check['kv_heads_checked'])} of {check['of']} key/value heads"
                else:
                    part = "{checked} of {of} document-heads".format(**check["document_heads"])
                limit = f"{check['relative_l2_limit']:.1e}"
                place = f"{group['workload']} {group['tokens']}"
                rows.append([place, result["name"], phase, part, limit, errors])
    header = ["workload", "contestant", "phase", "checked", "limit", "relative L2 / max abs error"]
    return ["Answers, against float64:", "", figures.markdown(header, rows, left=len(header)), ""]


def memory_lines(report):
    if not report["memory"]:
        return []
    rows = [
        [row["recipe"], f"{row['workload']} {row['tokens']}", row["phase"]]
        + [figures.number(row[name] / 2**20) for name in ("peak_bytes", "base_bytes", "tensor_bytes")]
        + [f"{row['share']:.2f}"]
        for row in report["memory"]
    ]
    header = ["recipe", "workload", "phase", "peak MiB", "tiny call MiB", "inputs and outputs MiB", "ratio"]
    return [
        "Memory of mxflash: largest resident set of a process that makes its inputs (q, k, v, dO) and makes one call "
        "a phase, beyond that of a tiny call, over the bytes of inputs and outputs.",
        "",
        figures.markdown(header, rows, left=3),
        "",
    ]


def lines_of(report):
    method, host, version = report["method"], report["machine"], report["versions"]
    shape = method["shape"]
    lines = [
        f"{host['cpu']}, {host['cores']} cores, {method['threads']} threads; {' '.join(host['flags'])}; load "
        f"{host['load_before'][0]:.2f} before, {host['load_after'][0]:.2f} after.",
        f"{version['mxflash']} ({version['mxflash_commit']}, compiler {version['compiler']}), torch {version['torch']} "
        f"({version['torch_capability']}), onnxruntime {version['onnxruntime']}, {report['date']}.",
        f"{shape['heads']} heads on {shape['kv_heads']}, head_dim {shape['head_dim']}, causal. "
        f"{method['rounds']} rounds of {method['repeats']} calls each, after a warm-up call, in an order that changes "
        "from round to round. Milliseconds: median (least..most; distance of the quartiles). mxflash: whole calls, "
        "quantization included. Of ceiling: the FP32 product, for BF16 and for mxflash on AMX the BF16 product.",
        f"FLOPs: forward {method['flops']['forward']}; both {method['flops']['forward+backward']}.",
    ]
    lines = [line + "\n" for line in lines]
    lines += ceiling_lines(report)
    for group in report["workloads"]:
        lines += time_lines(report, group)
    return lines + check_lines(report) + memory_lines(report)


def main(arguments):
    options = parse(arguments)
    sys.path.insert(0, str(ROOT / "bench"))
    import contestants

    phases = ["forward"] if options.forward_only else list(figures.PHASES)
    report = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "machine": machine(),
        "versions": versions(options),
        "method": {
            "phases": phases,
            "threads": options.threads,
            "rounds": options.rounds,
            "repeats": options.repeats,
            "warmup": 1,
            "seed": options.seed,
            "clock": "steady clocks around whole calls",
            "flops": {"forward": figures.FLOPS_FORWARD, "forward+backward": figures.FLOPS_BOTH},
            "shape": {"heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim},
        },
        "workloads": [],
        "memory": [],
    }
    ceilings = contestants.Ceilings(options.threads)
    for tokens in map(int, options.tokens):
        for workload in options.workload:
            say("ceilings")
            ceilings.measure()
            shape, report["versions"]["compiler"] = shape_of(options, workload, tokens)
            results = play(options, shape, workload, phases)
            report["workloads"].append(
                {"workload": workload, "tokens": tokens, "lengths": shape.lengths, "results": results}
            )
    say("ceilings and memory")
    ceilings.measure()
    report["ceilings"] = ceilings.report()
    report["memory"] = memory(options, shape, options.workload[-1], results)
    report["machine"]["load_after"] = os.getloadavg()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(lines_of(report))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0 if all(result["right"] for group in report["workloads"] for result in group["results"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
