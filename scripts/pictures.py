#!/usr/bin/env python3
"""Pictures of docs/choosing.md and docs/own-recipe.md, and the tables beside them, from a capture.

python scripts/pictures.py choosing|own-recipe [CAPTURE.safetensors]
"""

import copy
import sys
from pathlib import Path

import matplotlib
import torch

import mxflash

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
OUTPUTS = ("o", "dq", "dk", "dv")


class Measure:
    """Errors of recipes on one capture, against float64."""

    def __init__(self, path):
        self.tensors, metadata = mxflash.load(path, "torch")
        self.settings = {
            "causal": metadata.get("causal", "true") == "true",
            "scale": float(metadata["softmax_scale"]) if "softmax_scale" in metadata else None,
        }
        self.inputs = [self.tensors[name] for name in "qkv"]
        self.offsets = self.tensors.get("cu_seqlens")
        o, _ = mxflash.exact_attention(*self.inputs, self.offsets, **self.settings)
        gradients = mxflash.exact_attention_backward(self.tensors["do"], *self.inputs, self.offsets, **self.settings)
        self.exact = dict(zip(OUTPUTS, (o, *gradients), strict=True))

    def errors(self, recipe, backward=True):
        """Relative L2 error of o and, where there is a backward, of the gradients."""
        o, lse = mxflash.attention(*self.inputs, self.offsets, recipe, **self.settings)
        results = [o]
        if backward:
            results += mxflash.attention_backward(
                self.tensors["do"], *self.inputs, o, lse, self.offsets, recipe, **self.settings
            )
        return {
            name: ((got.double() - self.exact[name]).norm() / self.exact[name].double().norm()).item()
            for name, got in zip(OUTPUTS, results, strict=False)
        }


def save(figure, name):
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"{name}.svg"
    # Without a date or random ids the same results make the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(path, metadata={"Date": None})
    print(f"{path.relative_to(ROOT)} written")


def choosing(measure):
    """Error of every recipe for use, one bar an output."""
    rows = {
        name: measure.errors(name, recipe["purpose"] == "training")
        for name, recipe in mxflash.recipes().items()
        if recipe["purpose"] != "negative"
    }
    print("| recipe | " + " | ".join(OUTPUTS) + " |")
    print("|---" * (len(OUTPUTS) + 1) + "|")
    for name, errors in rows.items():
        cells = (f"{errors[output]:.2%}" if output in errors else "-" for output in OUTPUTS)
        print(f"| `{name}` | " + " | ".join(cells) + " |")
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for i, output in enumerate(OUTPUTS):
        at = [row + 0.2 * (i - 1.5) for row, errors in enumerate(rows.values()) if output in errors]
        axes.bar(at, [100 * errors[output] for errors in rows.values() if output in errors], 0.19, label=output)
    axes.set(xticks=range(len(rows)), yscale="log", ylabel="relative L2 error, %")
    axes.set_xticklabels(rows, rotation=15)
    axes.legend(ncols=len(OUTPUTS), frameon=False)
    axes.grid(axis="y", alpha=0.3)
    save(figure, "choosing")


# Which operand of which product to change, and what the picture calls it.
OPERANDS = {
    "q in Q Kᵀ": ("s", "left"),
    "k in Q Kᵀ": ("s", "right"),
    "v in P V": ("o", "tokens"),
    "dO in dO Vᵀ": ("dp", "left"),
    "v in dO Vᵀ": ("dp", "right"),
    "dO in Pᵀ dO": ("dv", "tokens"),
    "k in dS K": ("dq", "tokens"),
    "q in dSᵀ Q": ("dk", "tokens"),
}
ENCODINGS = ("bf16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def own_recipe(measure):
    """mxfp8 with one operand in another encoding: which operand deserves its bits?"""
    base = mxflash.recipes()["mxfp8"]
    table = []
    for product, side in OPERANDS.values():
        row = []
        for encoding in ENCODINGS:
            recipe = copy.deepcopy(base)
            recipe["name"] = "one-operand"
            recipe[product][side]["encoding"] = encoding
            del recipe["claims"]  # Derived from the scales.
            row.append(max(measure.errors(recipe).values()))
        table.append(row)
    print("| operand | " + " | ".join(ENCODINGS) + " |")
    print("|---" * (len(ENCODINGS) + 1) + "|")
    for operand, row in zip(OPERANDS, table, strict=True):
        print(f"| {operand} | " + " | ".join(f"{error:.1%}" for error in row) + " |")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    image = axes.imshow(torch.tensor(table).log10(), cmap="magma_r", aspect="auto")
    axes.set(xticks=range(len(ENCODINGS)), yticks=range(len(OPERANDS)), xticklabels=ENCODINGS, yticklabels=OPERANDS)
    middle = sum(image.get_clim()) / 2
    for y, row in enumerate(table):
        for x, error in enumerate(row):
            dark = torch.tensor(error).log10() > middle
            axes.text(x, y, f"{error:.1%}", ha="center", va="center", color="white" if dark else "black", fontsize=8)
    axes.set_title("largest relative L2 error among o, dq, dk, dv", fontsize=9)
    save(figure, "own-recipe")


KINDS = {"choosing": choosing, "own-recipe": own_recipe}


def main():
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python scripts/pictures.py {'|'.join(KINDS)} [CAPTURE.safetensors]")
    capture = sys.argv[2] if len(sys.argv) == 3 else ROOT / "examples" / "gpt_small_l3.safetensors"
    KINDS[sys.argv[1]](Measure(capture))


if __name__ == "__main__":
    main()
