"""Trains a byte-level language model on packed documents, its attention in a recipe of mxflash.

    python examples/train_bytes.py --recipe mxfp8              # minutes on two cores
    python examples/train_bytes.py plot curves.png runs/*      # the curves of several runs, and their table

A run writes DIR/log.csv (one line a step), DIR/positions.csv (one line a position evaluated token by token),
DIR/result.json, DIR/model.pt and DIR/curves.png. One seed gives the same bits again on the same machine with the same
number of threads.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curves import plot
from gpt import Attend, Model, Shape, attention_of, exact
from packs import Pack, cut, default_paths, endless, fill, read_documents

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SETTINGS = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "context",
    "tokens",
    "steps",
    "warmup",
    "lr",
    "dtype",
    "device",
    "threads",
)


@torch.no_grad()
def validation_loss(model: Model, packs: list[Pack], attend: Attend) -> float:
    """Mean nats a position."""
    return torch.cat([model.losses(pack, attend) for pack in packs]).double().mean().item()


class Sample(NamedTuple):
    """Losses of some positions, tensors [count] each."""

    places: Tensor  # int64, in the piece.
    together: Tensor  # float32 nats, from the run over the whole pack.
    alone: Tensor  # float32 nats, from a run over the position and what comes before it in its piece.


@torch.no_grad()
def token_by_token(model: Model, packs: list[Pack], attend: Attend, count: int, seed: int) -> Sample:
    """`count` positions of the packs, in the pack and alone: the second is how a model is used.

    Where the two differ by more than rounding, the pack has told a position about later tokens or other documents.
    """
    everywhere = [(n, i) for n, pack in enumerate(packs) for i in range(len(pack.tokens))]
    chosen = random.Random(seed).sample(everywhere, min(count, len(everywhere)))
    together = [model.losses(pack, attend) for pack in packs]
    alone = []
    for n, i in tqdm(chosen, desc="token by token", disable=None):
        pack = packs[n]
        span = slice(i - int(pack.places[i]), i + 1)
        ends = torch.tensor([0, span.stop - span.start], dtype=torch.int32, device=pack.tokens.device)
        alone.append(model.losses(Pack(pack.tokens[span], pack.targets[span], pack.places[span], ends), attend)[-1])
    places = torch.stack([packs[n].places[i] for n, i in chosen])
    return Sample(places, torch.stack([together[n][i] for n, i in chosen]), torch.stack(alone))


# ---- Training ----


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Of step 1 to steps: linear to the peak, then half a cosine to a tenth of it."""
    if step <= warmup:
        return peak * step / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup)))


def optimizer_of(model: Model, lr: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def train(options: argparse.Namespace) -> None:
    """One run, from reading the files to writing the results."""
    attend = attention_of(options.recipe)
    shape = Shape(options.layers, options.width, options.heads, options.kv_heads)
    try_attention(options, shape)
    training, validation = read_documents(options.data or default_paths())
    packs = fill(endless(cut(training, options.context), options.seed), options.tokens)
    # The same for every recipe and seed.
    held = fill(endless(cut(validation, options.context), 0), options.tokens)
    held = [pack.to(options.device) for pack in itertools.islice(held, options.validation_packs)]
    torch.manual_seed(options.seed)
    model = Model(shape, DTYPES[options.dtype]).to(options.device)
    optimizer = optimizer_of(model, options.lr)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "log.csv").open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(("step", "positions", "lr", "loss", "gradient_norm", "validation_own", "validation_exact"))
        for step in (bar := tqdm(range(1, options.steps + 1), desc=options.recipe, disable=None)):
            rate = learning_rate(step, options.steps, options.warmup, options.lr)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = model.losses(next(packs).to(options.device), attend).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(norm):
                raise FloatingPointError(f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; both must be finite")
            optimizer.step()
            row = [step, step * options.tokens, rate, loss.item(), norm.item(), "", ""]
            if step % options.evaluate_every == 0 or step == options.steps:
                row[5:] = [validation_loss(model, held, a) for a in (attend, exact)]
                bar.write(f"step {step}: loss {row[3]:.4f}, validation {row[5]:.4f}, exact {row[6]:.4f}", sys.stderr)
            log.writerow(row)
            file.flush()
            bar.set_postfix(loss=f"{row[3]:.3f}")
    sample = token_by_token(model, held, attend, options.positions, 0)
    with (options.out / "positions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([sample._fields, *zip(*(column.tolist() for column in sample), strict=True)])
    leak = (sample.alone - sample.together).double()
    result = {
        "recipe": options.recipe,
        "seed": options.seed,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "parameters": sum(p.numel() for p in model.parameters()),
        "documents": {"training": len(training), "validation": len(validation)},
        "bytes": {"training": sum(map(len, training)), "validation": sum(map(len, validation))},
        "validation_own": row[5],
        "validation_exact": row[6],
        "together": sample.together.double().mean().item(),
        "alone": sample.alone.double().mean().item(),
        "leak": leak.mean().item(),
        "leak_standard_error": leak.std().item() / math.sqrt(len(leak)),
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    torch.save(model.state_dict(), options.out / "model.pt")


# ---- Command line ----


def try_attention(options: argparse.Namespace, shape: Shape) -> None:
    """Runs the recipe once both ways, so that what cannot run says so before anything else does."""
    dtype = DTYPES[options.dtype]
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.ones(8, n, shape.head_dim, dtype=dtype, device=options.device, requires_grad=True) for n in heads)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32, device=options.device)
    attention_of(options.recipe)(q, k, v, ends).sum().backward()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="train_bytes.py",
        description="Trains a byte-level language model on packed documents.",
        epilog="train_bytes.py plot PICTURE DIR...: validation curves of several runs, and a table of them.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--recipe", default="mxfp8", help="a name of `mxflash recipes`, a JSON file, or sdpa: torch's own, exact")
    add(
        "--data",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="text files and directories; left out: text of this machine",
    )
    add("--out", type=Path, metavar="DIR", help="where the results go; left out: runs/RECIPE-SEED")
    add("--seed", type=whole(0), default=0, help="of weights, order and stochastic rounding")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    add("--dtype", choices=DTYPES, help="of the products; left out: float32 on a CPU, else bfloat16")
    add("--threads", type=whole(1), default=2, help="of torch on a CPU; another number may give other bits")
    add("--steps", type=whole(1), default=600, help="steps of the optimizer")
    add("--tokens", type=whole(1), default=2048, help="positions in a pack, one pack a step")
    add("--context", type=whole(1), default=256, help="longest piece of a document")
    add("--layers", type=whole(1), default=3, help="blocks of the model")
    add("--width", type=whole(1), default=128, help="of the residual stream: heads times head_dim")
    add("--heads", type=whole(1), default=4, help="query heads")
    add("--kv-heads", type=whole(1), default=2, help="key and value heads, a divisor of heads")
    add("--lr", type=positive, default=3e-3, help="peak learning rate")
    add("--warmup", type=whole(0), default=50, help="steps to the peak")
    add("--evaluate-every", type=whole(1), default=100, metavar="N", help="steps between validations")
    add("--validation-packs", type=whole(1), default=16, metavar="N", help="packs of the validation")
    add("--positions", type=whole(2), default=2048, metavar="N", help="positions evaluated token by token")
    options = parser.parse_args(arguments)
    if options.width % (8 * options.heads):
        parser.error(f"--width: {options.width} given, a multiple of 8 times --heads ({8 * options.heads}) allowed")
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: {options.kv_heads} given, a divisor of --heads ({options.heads}) allowed")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device: {options.device} given, cpu or cuda allowed")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"--device: {options.device} given, which torch cannot use here; cpu allowed")
    options.dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    options.out = options.out or Path("runs") / f"{Path(options.recipe).stem}-{options.seed}"
    return options


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        """Defaults, where there is one to show."""
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """One line, where argparse would print the usage too."""
        self.exit(2, f"{self.prog}: {message}\n")


def whole(least: int):
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} given, an integer of at least {least} allowed")
        return int(text)

    return convert


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} given, a number above 0 allowed")
    return value


def main(arguments: list[str]) -> int:
    """0: done; 1: the training broke down; 2: bad input or usage; 3: cannot run here."""
    try:
        if arguments[:1] == ["plot"]:
            if len(arguments) < 3:
                raise ValueError("plot: a picture and at least one directory of a run needed")
            print(plot(Path(arguments[1]), [Path(argument) for argument in arguments[2:]]))
            return 0
        options = parse(arguments)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it alone.
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(options.threads)
        train(options)
        print(plot(options.out / "curves.png", [options.out]))
    except (FloatingPointError, ValueError, OSError, RuntimeError) as error:
        print(f"train_bytes.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, FloatingPointError) else 3 if isinstance(error, RuntimeError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
