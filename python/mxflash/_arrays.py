"""Arrays and values on their way into the compiled part, and results on their way out."""

import array as _array
from typing import Any


class Framework:
    """What an array's results should be: the same framework's arrays, of the same bfloat16."""

    def __init__(self, like: Any):
        self._module = type(like).__module__.partition(".")[0]
        self._namespace = getattr(like, "__array_namespace__", None)
        self.numpy = self._module == "numpy"
        # numpy has no bfloat16 of its own and DLPack cannot carry ml_dtypes': the bits travel as uint16.
        dtype = getattr(like, "dtype", None)
        self._bfloat16 = dtype if self.numpy and str(dtype) == "bfloat16" else None

    def give(self, result: Any) -> Any:
        """One of our results as an array of this framework, without a copy."""
        if self._module == "torch":
            import torch

            return torch.from_dlpack(result)
        if self.numpy:
            return result.view(self._bfloat16) if self._bfloat16 and result.dtype == "uint16" else result
        if self._namespace is None:
            raise ValueError(
                f"q: a {self._module} array given, one whose framework takes DLPack allowed "
                "(numpy, torch, cupy, jax, or any with __array_namespace__)"
            )
        return self._namespace().from_dlpack(Exported(result))


class Exported:
    """One of our results as the DLPack protocol wants it; taken once."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # The host.


def take(name: str, array: Any) -> Any:
    """An array as the compiled part takes it."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch":
        return array.detach()
    if kind == "numpy":
        dtype = str(array.dtype)
        if dtype == "bfloat16":
            return array.view("uint16")
        if dtype == "uint16":
            raise ValueError(f"{name}: type uint16 given, bfloat16, float16 or float32 allowed")
    if not hasattr(array, "__dlpack__"):
        raise ValueError(f"{name}: a {type(array).__name__} given, an array (numpy, torch, cupy, jax) allowed")
    return array


def take_offsets(name: str, offsets: Any) -> Any:
    """cu_seqlens: an int32 array as it is, or integers of a list or tuple."""
    if offsets is None:
        return None
    if isinstance(offsets, list | tuple):
        try:
            return _array.array("i", offsets)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: {error}; integers that int32 holds allowed") from None
    return take(name, offsets)


_ALLOWED = {
    "engine": "'auto' or the name of an engine",
    "causality": "'exact', 'block' or None",
    "threads": "an integer",
    "seed": "an integer from 0 to 2**64 - 1",
    "deterministic": "True or False",
    "window": "32-bit integers or None (no bound)",
    "scale": "a number or None",
    "format": "e4m3, e5m2, e2m3, e3m2, e2m1 or nvfp4",
    "block": "the name of a block",
    "scale_rule": "'floor', 'ceil', 'uos' or None",
    "side": "'query' or 'key'",
    "hadamard": "True or False",
    "rounding": "'nearest' or 'stochastic'",
}


def put(target: Any, **values: Any) -> None:
    """Sets attributes of the compiled part, whose own complaint about a type would not name the argument."""
    for name, value in values.items():
        try:
            setattr(target, name, value)
        except TypeError:
            raise ValueError(f"{name}: {value!r} given, {_ALLOWED[name]} allowed") from None
