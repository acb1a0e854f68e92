"""What bench/cuda_peers.py compares on and what it writes. The standard library alone: the unit tests have no GPU."""

import json
import statistics

import figures

# Eleven and twenty-nine lengths, log-uniform between 128 and 8192.
ELEVEN = "5120+2816+2048+1664+1280+1024+896+640+512+256+128"
TWENTY_NINE = (
    "8192+7168+6144+5632+4608+4096+3584+3072+2816+2560+2304+2048+1792+1664+1536+1408+1280+1152+1024+896+768"
    "+512+384+256+192+160+128+128+32"
)
HEADS = 16
WORKLOADS = {
    "16x1024": ("16x1024", HEADS),
    "8x2048": ("8x2048", HEADS),
    "4x4096": ("4x4096", HEADS),
    "2x16384": ("2x16384", HEADS),
    "8192+32x256": ("8192+32x256", HEADS),
    "8192+224x256": ("8192+224x256", HEADS),
    "11 log-uniform": (ELEVEN, HEADS),
    "11 with 4 kv heads": (ELEVEN, 4),
    "29 log-uniform": (TWENTY_NINE, HEADS),
}


def lengths_of(text):
    parts = [part.split("x") if "x" in part else ("1", part) for part in text.split("+")]
    return [int(length) for count, length in parts for _ in range(int(count))]


def one_of_each_shape(shapes):
    """Names of workloads that have all (tokens, kv heads) between them: what is compiled for one serves the like."""
    first = {}
    for name, (lengths, kv_heads) in shapes.items():
        first.setdefault((sum(lengths), kv_heads), name)
    return list(first.values())


def new_run(versions, settings):
    return {"versions": versions, "settings": settings, "workloads": []}


def begun(run):
    return {entry["workload"] for entry in run["workloads"]}


def load(path, versions, settings):
    """The run in the file, to go on with; a new one where there is no file."""
    if not path or not path.exists():
        return new_run(versions, settings)
    run = json.loads(path.read_text(encoding="utf-8"))
    if run["settings"] != settings:
        raise ValueError(f"{path}: a run with {run['settings']} given, {settings} allowed")
    if run["versions"] != versions:
        raise ValueError(f"{path}: a run on {run['versions']} given, {versions} allowed")
    return run


def save(run, options):
    """Whoever is stopped meanwhile leaves the files of the step before."""
    for path, text in ((options.json, json.dumps(run, indent=1)), (options.markdown, report(run))):
        if path:
            new = path.with_name(path.name + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)


def time_cell(times):
    return f"{statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f})"


def table(run, phase, measured, cell):
    """One row a workload, one column a contestant: cells of what was measured in a phase."""
    entries = [(entry, entry["phases"][phase][measured]) for entry in run["workloads"] if phase in entry["phases"]]
    peers = list(dict.fromkeys(peer for _, of_peers in entries for peer in of_peers))
    rows = [
        [entry["workload"], *(cell(of_peers[peer]) if peer in of_peers else "-" for peer in peers)]
        for entry, of_peers in entries
    ]
    return figures.markdown(["workload", *peers], rows)


def errors_table(run):
    peers = list(dict.fromkeys(peer for entry in run["workloads"] for peer in entry["relative_l2"]))
    rows = []
    for entry in run["workloads"]:
        errors = [entry["relative_l2"].get(peer, {}) for peer in peers]
        cells = [", ".join(f"{what} {error:.1e}" for what, error in of_peer.items()) or "-" for of_peer in errors]
        rows.append([entry["workload"], *cells])
    return figures.markdown(["workload", *peers], rows)


def notes(run):
    """Who was not timed, and why: each reason once, with the workloads that it holds for."""
    where = {}
    for entry in run["workloads"]:
        for kind in ("wrong", "absent"):
            for peer, reason in entry[kind].items():
                where.setdefault(f"{kind}: {peer}: {reason}", []).append(entry["workload"])
        if "failed" in entry:
            where.setdefault(f"failed: {entry['failed']}", []).append(entry["workload"])
    return [f"- {text} ({', '.join(names)})" for text, names in where.items()]


def report(run):
    """Everything as markdown."""
    settings = run["settings"]
    parts = [
        f"{', '.join(run['versions'])}; {settings['mask']}; ms on the device, median (least..most) of "
        f"{settings['rounds']} x {settings['repeats']}"
    ]
    for phase in settings["phases"]:
        parts += [f"**{phase}**, ms", table(run, phase, "samples_ms", time_cell)]
    for phase in settings["phases"]:
        parts.append(f"**{phase}**, MiB at most, beside what was there before the call")
        parts.append(table(run, phase, "peak_bytes", lambda peak: f"{peak / 2**20:.0f}"))
    parts += ["Relative L2 against float64, the worst", errors_table(run)]
    clocks = [f"- {entry['workload']}: {'; '.join(entry['device'])}" for entry in run["workloads"] if entry["device"]]
    for title, lines in (("Not timed", notes(run)), ("The device before and after", clocks)):
        if lines:
            parts.append("\n".join([title, "", *lines]))
    return "\n\n".join(parts) + "\n"


def wrong(run):
    """Whether anything was wrong or failed."""
    return any(entry["wrong"] or "failed" in entry for entry in run["workloads"])
