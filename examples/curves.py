"""Validation curves of runs of train_bytes.py, and a table of what they came to."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # After the backend is chosen.


def plot(picture: Path, runs: list[Path]) -> str:
    """Writes the picture and returns the table, in Markdown."""
    results = [(read_log(run / "log.csv"), json.loads((run / "result.json").read_text())) for run in runs]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(result["recipe"] for _, result in results))}
    named = set()
    for log, result in results:
        name = result["recipe"]
        style = {"color": colours[name], "label": None if name in named else name, "linewidth": 1.2}
        named.add(name)
        left.plot([row["step"] for row in log], [row["validation_own"] for row in log], **style)
        left.plot([row["step"] for row in log], [row["validation_exact"] for row in log], ":", color=colours[name])
    left.set(xlabel="step", ylabel="validation loss, nats a byte", title="own kernel (line), exact attention (dots)")
    left.legend(fontsize=8)
    for row, (_, result) in enumerate(results):
        error = 2 * result["leak_standard_error"]
        right.errorbar(result["leak"], row, xerr=error, fmt="o", color=colours[result["recipe"]], capsize=3)
    right.axvline(0, color="black", linewidth=0.5)
    right.set(xlabel="nats a byte, two standard errors", title="leak: loss token by token, less loss in the pack")
    right.set_yticks(range(len(results)), [f"{result['recipe']}, seed {result['seed']}" for _, result in results])
    right.invert_yaxis()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)
    return table([result for _, result in results])


def read_log(path: Path) -> list[dict[str, float]]:
    """The evaluated steps of a log."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["validation_own"]]
    return [{name: float(value) for name, value in row.items()} for row in rows]


def table(results: list[dict]) -> str:
    lines = ["| recipe | seed | own kernel | exact attention | in the pack | token by token | leak |", "|---" * 7 + "|"]
    for r in results:
        losses = (r["validation_own"], r["validation_exact"], r["together"], r["alone"])
        numbers = " | ".join(f"{loss:.4f}" for loss in losses)
        leak = f"{r['leak']:+.5f} ± {r['leak_standard_error']:.5f}"
        lines.append(f"| `{r['recipe']}` | {r['seed']} | {numbers} | {leak} |")
    return "\n".join(lines)
