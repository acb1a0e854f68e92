"""A tiny Llama on the text of a licence: its loss and gradients with each recipe, next to its own sdpa.

    python examples/transformers_recipes.py            # a Markdown table; some minutes on two cores

Everything is made here from a configuration and seeds; nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers

from mxflash.transformers import register

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"  # A text that never changes; the last quarter is held out.


def build() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,  # At which recipes rotate.
            vocab_size=256,
        )
    )


def pack(text: bytes, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Documents of 32 to 255 bytes from anywhere in the text, `count` tokens in all, as a model takes them."""
    pieces, left = [], count
    while left:
        length = min(left, int(torch.randint(32, 256, (), generator=generator)))
        start = int(torch.randint(len(text) - length, (), generator=generator))
        pieces.append(text[start : start + length])
        left -= length
    ids = torch.tensor(list(b"".join(pieces)))[None]
    positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def train(model: transformers.LlamaForCausalLM, text: bytes, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**pack(text, 512, generator), use_cache=False).loss.backward()
        optimizer.step()


def evaluate(model: transformers.LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Loss, and the gradients of all parameters as one vector."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--recipes", default="bf16,mxfp8,mxfp8-tokenblock,nvfp4,fp4,mxfp4-diagonal")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is the fastest for a model this small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    text = TEXT.read_bytes()
    text, rest = text[: len(text) * 3 // 4], text[len(text) * 3 // 4 :]
    held_out = pack(rest, 2048, torch.Generator().manual_seed(2))

    base = build()
    untrained, _ = evaluate(base, held_out)
    train(base, text, options.steps)
    expected, gradient = evaluate(base, held_out)
    print(f"Held-out loss before training: {untrained:.4f}\n")
    print("| attention | loss, trained with sdpa | next to sdpa | gradients off by | loss, trained with it |")
    print("|---|---|---|---|---|")
    print(f"| sdpa, float32 | {expected:.4f} | | | {expected:.4f} |")
    # How far runs part that differ in nothing that matters: what the last column can tell apart.
    parted = []
    for nudge in (1e-6, 1e-5, -1e-5, 2.0**-9, -(2.0**-9)):
        model = build()
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + nudge)
        train(model, text, options.steps)
        parted.append(evaluate(model, held_out)[0])
    print(
        f"| sdpa, five runs, one matrix scaled by 1e-6 to 2e-3 | | | | {min(parted):.4f} to {max(parted):.4f} |",
        flush=True,
    )
    for recipe in filter(None, options.recipes.split(",")):
        name = register(f"mx-{recipe}", recipe=recipe)
        base.set_attn_implementation(name)
        loss, own = evaluate(base, held_out)
        off = float((own - gradient).norm() / gradient.norm())
        model = build()
        model.set_attn_implementation(name)
        train(model, text, options.steps)
        after, _ = evaluate(model, held_out)
        print(f"| `{recipe}` | {loss:.4f} | {loss - expected:+.4f} | {off:.1%} | {after:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
