#!/usr/bin/env python3
"""The demo's table from the JSON of `mxflash recipes`, `run --check` and `audit`; standard library only.

demo_table.py names RECIPES.json        the recipes to run: all but the negatives
demo_table.py table FOLDER RECIPE...    the table of FOLDER/run-RECIPE.json and FOLDER/audit.json
"""

import json
import sys
from pathlib import Path

HEADER = ["recipe", "cos O", "cos dQ", "cos dK", "cos dV", "P -> 0", "dS -> 0", "row sum", "least", "audit", "verdict"]
TEXT_COLUMNS = {0, 9, 10}


def load(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def number(value, form="{:.5f}"):
    return "-" if value is None else form.format(value)


def row(run, audited):
    accuracy = run["accuracy"]
    cosines = [number(accuracy.get(name, {}).get("cosine")) for name in ("o", "dq", "dk", "dv")]
    flushed = [number(run["flushed"][name], "{:.3%}") for name in ("p", "ds")]
    row_sum = [number(run["row_sum"][name]) for name in ("effective_mean", "effective_min")]
    if audited is None:
        verdict = ["skipped", "see audit.json"]
    else:
        verdict = ["holds" if audited["holds"] else "BROKEN", audited["verdict"]]
    return [run["recipe"], *cosines, *flushed, *row_sum, *verdict]


def show(rows):
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    for cells in rows:
        padded = [
            cell.ljust(width) if column in TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())


def table(folder, recipes):
    runs = [load(Path(folder) / f"run-{recipe}.json") for recipe in recipes]
    audited = {entry["name"]: entry for entry in load(Path(folder) / "audit.json")["recipes"]}
    problem = runs[0]["problem"]
    print(
        f"\n{runs[0]['input']}: {problem['tokens']} tokens, {problem['documents']} documents, {problem['heads']} heads "
        f"over {problem['kv_heads']}, head_dim {problem['head_dim']}; truth: float64 on the unquantized inputs\n"
    )
    show([HEADER, *(row(run, audited.get(run["recipe"])) for run in runs)])
    print("\nP -> 0, dS -> 0: share of non-zero values rounded to zero; row sum: mean and least over rows (exact: 1)")
    print("audit of the recipes that leak by design:\n")
    others = [entry for name, entry in audited.items() if name not in recipes]
    show(
        [
            ["recipe", "audit", "verdict"],
            *([e["name"], "holds" if e["holds"] else "BROKEN", e["verdict"]] for e in others),
        ]
    )


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "names":
        print("\n".join(recipe["name"] for recipe in load(arguments[1]) if recipe["purpose"] != "negative"))
        return 0
    if len(arguments) > 2 and arguments[0] == "table":
        table(arguments[1], arguments[2:])
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
