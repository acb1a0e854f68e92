"""Codes and scales of one tensor."""

from typing import Any, NamedTuple

from mxflash import _native
from mxflash._arrays import Framework, native, put, take_offsets


class Quantized(NamedTuple):
    """What `mxflash quantize` writes: see quantize()."""

    codes: Any
    scales: Any
    dequantized: Any


def quantize(
    x: Any,
    format: str = "e4m3",
    block: str = "token",
    scale_rule: str | None = None,
    *,
    cu_seqlens: Any = None,
    hadamard: bool = False,
    rounding: str = "nearest",
    seed: int = 0,
    threads: int = 0,
) -> Quantized:
    """Quantizes x [tokens, heads, dims].

    codes: uint8 [tokens, heads, dims], one code an element. scales: uint8 E8M0 (nvfp4: UE4M3) codes [rows, heads,
    columns], blocks counted anew in each document; block "tensor": one float32. dequantized: float32 [tokens, heads,
    dims].
    format: e4m3, e5m2, e2m3, e3m2, e2m1, or nvfp4 (e2m1 with a UE4M3 scale). block: what shares a scale: token,
    tokens:32, dims:16, dims:32, channel:16, channel:32, square:32 or tensor. scale_rule: floor, ceil (the default) or
    uos; None for nvfp4. hadamard: rotates each row first. rounding: nearest or stochastic.
    """
    framework = Framework(x)
    request = _native.Request()
    request.numpy = framework.numpy
    put(request, format=format, block=block, scale_rule=scale_rule, hadamard=hadamard)
    put(request, rounding=rounding, seed=seed, threads=threads)
    results = _native.quantize(native("x", x), take_offsets("cu_seqlens", cu_seqlens), request)
    return Quantized(*(framework.give(result) for result in results))
