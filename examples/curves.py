"""Validation curves of runs of train_bytes.py, and a table of what they came to."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # After the backend is chosen.

MOVED = 1e-3  # Nats. The linear layers' rounding in another shape comes to about a millionth.


def plot(picture: Path, runs: list[Path]) -> str:
    """Writes the picture of the runs (directories) and returns their table, in Markdown."""
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours: dict[str, str] = {}
    for run, result in zip(runs, results, strict=True):
        recipe = result["recipe"]
        label = None if recipe in colours else recipe
        style = {"color": colours.setdefault(recipe, f"C{len(colours)}"), "linewidth": 1.2}
        log = [row for row in read(run / "log.csv") if "validation_own" in row]
        steps, own, exact = ([row[name] for row in log] for name in ("step", "validation_own", "validation_exact"))
        left.plot(steps, own, label=label, **style)
        left.plot(steps, exact, ":", **style)
        differences = sorted(abs(row["alone"] - row["together"]) for row in read(run / "positions.csv"))
        shares = [1 - n / len(differences) for n in range(len(differences))]
        right.plot([max(difference, 1e-7) for difference in differences], shares, label=label, **style)
        result["moved"] = sum(difference > MOVED for difference in differences) / len(differences)
    left.set(xlabel="step", ylabel="nats a position", title="Validation: own kernel (line), exact attention (dots)")
    right.set(
        xlabel="nats", ylabel="share of positions", xscale="log", title="Token by token differs by more than this"
    )
    left.legend(fontsize=8)
    right.axvline(MOVED, color="black", linewidth=0.5)
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)
    return table(results)


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV, without their empty cells."""
    with path.open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def table(results: list[dict]) -> str:
    names = ("recipe", "seed", "own kernel", "exact attention", "in the pack", "token by token", "difference", "moved")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for r in results:
        losses = " | ".join(f"{r[name]:.4f}" for name in ("validation_own", "validation_exact", "together", "alone"))
        leak = f"{r['leak']:+.4f} ± {r['leak_standard_error']:.4f}"
        lines.append(f"| `{r['recipe']}` | {r['seed']} | {losses} | {leak} | {r['moved']:.1%} |")
    return "\n".join(lines)
