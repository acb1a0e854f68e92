"""Arrays and values on their way into the compiled part, and results on their way out."""

import array as _array
import sys
from typing import Any

from mxflash import _native


class Framework:
    """What an array's results should be: the same framework's arrays, of the same bfloat16."""

    def __init__(self, like: Any):
        known = (name for name in ("torch", "numpy") if _is_array_of(name, like))
        self._module = next(known, type(like).__module__.partition(".")[0])
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


def _is_array_of(name: str, array: Any) -> bool:
    """Whether it is an array of torch or numpy, or of a class made from theirs."""
    module = sys.modules.get(name)
    return module is not None and isinstance(array, module.Tensor if name == "torch" else module.ndarray)


class Exported:
    """One of our results as the DLPack protocol wants it; taken once."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # The host.


def take(name: str, array: Any) -> Any:
    """An array as the compiled part takes it; what DLPack would carry wrongly is put right or refused."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch and isinstance(array, torch.Tensor):
        if array.device.type == "meta":
            raise ValueError(f"{name}: a tensor on meta given, one with values allowed")
        array = array.detach().resolve_neg()  # A view with the negative bit would lose its sign.
    elif numpy and isinstance(array, numpy.ndarray):
        if isinstance(array, numpy.ma.MaskedArray):
            raise ValueError(f"{name}: a masked array given, one without a mask allowed (its values would be used)")
        if str(array.dtype) == "bfloat16":
            return array.view(numpy.ndarray).view("uint16")
    # The compiled part reads uint16 as the bits of bfloat16.
    if str(getattr(array, "dtype", None)).rpartition(".")[2] == "uint16":
        raise ValueError(f"{name}: type uint16 given, bfloat16, float16 or float32 allowed")
    if not hasattr(array, "__dlpack__"):
        raise ValueError(f"{name}: a {type(array).__name__} given, an array (numpy, torch, cupy, jax) allowed")
    return array


def native(name: str, array: Any) -> Any:
    """take(), and the compiled part's own check that it can read it."""
    taken = take(name, array)
    try:
        _native.check_array(taken)
    except TypeError:
        dtype = getattr(array, "dtype", "unknown")
        raise ValueError(
            f"{name}: a {type(array).__name__} of {dtype} given, an array that DLPack can carry allowed"
        ) from None
    return taken


def take_offsets(name: str, offsets: Any) -> Any:
    """cu_seqlens: an int32 array as it is, or integers of a list or tuple."""
    if offsets is None:
        return None
    if isinstance(offsets, list | tuple):
        try:
            return _array.array("i", offsets)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: {error}; integers that int32 holds allowed") from None
    return native(name, offsets)


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
