"""Captures and results as safetensors files: q, k, v, do, cu_seqlens, and metadata."""

import os
from typing import Any

from mxflash import _native
from mxflash._arrays import native


def load(path: str | os.PathLike, framework: str = "numpy") -> tuple[dict[str, Any], dict[str, str]]:
    """(tensors by name, metadata) of a safetensors file, as arrays of "numpy" or "torch".

    bfloat16 in numpy is ml_dtypes', which must be installed for it. A file that is not one, or does not hold what its
    header says, raises RuntimeError.
    """
    if framework not in ("numpy", "torch"):
        raise ValueError(f"framework: {framework!r} given, 'numpy' or 'torch' allowed")
    tensors, types, metadata = _native.load(path, numpy=framework == "numpy")
    if framework == "torch":
        import torch

        return {name: torch.from_dlpack(array) for name, array in tensors.items()}, metadata
    for name, array in tensors.items():
        if types[name] == "BF16":
            import ml_dtypes

            tensors[name] = array.view(ml_dtypes.bfloat16)
    return tensors, metadata


def save(path: str | os.PathLike, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, whole or not at all; the command line reads it."""
    for name in tensors:
        if not isinstance(name, str) or "\0" in name:
            raise ValueError(f"tensors: {name!r} given as a name, a string without NUL allowed")
    for name, text in (metadata or {}).items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise ValueError(f"metadata: {name!r}: {text!r} given, strings allowed")
    taken = {name: native(name, tensor) for name, tensor in tensors.items()}
    _native.save(os.fspath(path), taken, metadata or {})
