"""A small byte-level GPT on packed documents: RMSNorm, rotary positions, grouped heads, SwiGLU; any attention."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mxflash.torch import attention
from packs import SYMBOLS, Pack

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, cu_seqlens: o


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def turns(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, float32 [tokens, 1, head_dim / 2] each."""
    half = head_dim // 2
    angle = places[:, None, None] * 10000.0 ** (-torch.arange(half, device=places.device) / half)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim], halves against halves."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        hidden = 8 * shape.width // 3 // 8 * 8
        self.gate, self.up = (nn.Linear(shape.width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cu_seqlens: Tensor, attend: Attend) -> Tensor:
        s = self.shape
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, s.head_dim))
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)  # Views: attention takes strides as they come.
        x = x + self.out(attend(rotate(q, *turn), rotate(k, *turn), v, cu_seqlens).flatten(1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Logits [tokens, 257] of a pack; `attend` is any attention on packed documents.

    Weights are float32, products are of `dtype`.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.head_dim = shape.head_dim
        self.embed = nn.Embedding(SYMBOLS, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, SYMBOLS, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)

    def forward(self, pack: Pack, attend: Attend) -> Tensor:
        x = self.embed(pack.tokens)
        turn = turns(pack.places, self.head_dim)
        for block in self.blocks:
            x = block(x, turn, pack.cu_seqlens, attend)
        return self.head(self.norm(x))

    def losses(self, pack: Pack, attend: Attend) -> Tensor:
        """Nats of each position, float32 [tokens]."""
        # Around each run: autocast keeps its copies of the weights until it ends: around a loop, that is no step seen.
        with torch.autocast(pack.tokens.device.type, torch.bfloat16, self.dtype == torch.bfloat16):
            logits = self(pack, attend)
        return functional.cross_entropy(logits.float(), pack.targets, reduction="none")


def exact(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """torch's own attention, document by document, in float32: the baseline, and the judge of every recipe."""
    results = []
    with torch.autocast(q.device.type, enabled=False):
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            document = (x[start:stop].float().transpose(0, 1)[None] for x in (q, k, v))
            results.append(
                functional.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            )
    return torch.cat(results).to(q.dtype)


def attention_of(recipe: str) -> Attend:
    """`sdpa` is exact(); anything else is a recipe of mxflash."""
    if recipe == "sdpa":
        return exact
    return lambda q, k, v, cu_seqlens: attention(q, k, v, cu_seqlens, recipe=recipe, deterministic=True)
