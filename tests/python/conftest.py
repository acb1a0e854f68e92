"""Fixtures: a real capture, and random problems."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import mxflash

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = ROOT / "examples" / "gpt_small_l3.safetensors"


@pytest.fixture(scope="session")
def capture():
    """q, k, v, do and cu_seqlens of a language model's layer, as torch tensors."""
    tensors, _ = mxflash.load(CAPTURE, "torch")
    return tensors


@pytest.fixture
def command_line(tmp_path):
    """Runs the command line, which MXFLASH names."""
    binary = os.environ.get("MXFLASH")
    if binary is None:
        pytest.skip("MXFLASH does not name the command line")

    def run(*arguments):
        subprocess.run([binary, *map(str, arguments)], check=True, cwd=tmp_path, stdout=subprocess.PIPE)
        return tmp_path

    return run


@pytest.fixture
def problem():
    """Makes q, k, v, do and cu_seqlens of documents with the given lengths."""

    def make(lengths, heads=4, kv_heads=2, head_dim=32, value_dim=32, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)

        def draw(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        return {
            "q": draw(tokens, heads, head_dim),
            "k": draw(tokens, kv_heads, head_dim),
            "v": draw(tokens, kv_heads, value_dim),
            "do": draw(tokens, heads, value_dim),
            "cu_seqlens": offsets,
        }

    return make
