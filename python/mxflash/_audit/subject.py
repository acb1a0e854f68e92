"""What is audited: a function of somebody's, called with arrays of its own framework, answering in numpy."""

from typing import Any

import numpy as np

from mxflash._arrays import take_offsets
from mxflash._attention import Mask, exact_attention, exact_attention_backward
from mxflash._audit.layout import Layout

# Unit roundoffs: half the distance from 1 to the next number.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
_LARGEST = {"bfloat16": 3.3895e38, "float16": 65504.0, "float32": 3.4e38}
_SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}
# What a result below the normal numbers may lose: half a step of float16; all, where matrix units flush to zero.
_TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-25, "float32": 2.0**-126}


def _type_name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _type_of_all(**arrays: Any) -> str:
    """The one type of q, k and v."""
    types = {}
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            raise ValueError(f"{name}: a {type(array).__name__} given, an array allowed")
        types[name] = _type_name(array)
        if types["q"] not in _LARGEST:
            raise ValueError(f"q: type {types['q']} given, {', '.join(_LARGEST)} allowed")
        if types[name] != types["q"]:
            raise ValueError(f"{name}: type {types[name]} given, {types['q']} allowed (q's)")
    return types["q"]


def _offsets(name: str, given: Any) -> np.ndarray | None:
    """On the host, of the type given."""
    if given is None:
        return None
    if isinstance(given, list | tuple):
        return np.array(take_offsets(name, given), np.int32)
    given = _on_host(given)
    return given.numpy() if hasattr(given, "detach") else np.asarray(given)


def _on_host(array: Any) -> Any:
    """An array of a device as one of the host; lists and None as they are."""
    if hasattr(array, "detach"):
        return array.detach().cpu()
    return array.get() if hasattr(array, "get") and hasattr(array, "__dlpack__") else array


def _values(array: Any) -> np.ndarray:
    """A contiguous copy of every value as it is: in float64 where it needs that, else in float32."""
    array = _on_host(array)
    if hasattr(array, "detach"):
        import torch

        array = (array if array.dtype == torch.float64 else array.to(torch.float32)).numpy()
    array = np.asarray(array)
    return np.array(array, dtype=np.float64 if array.dtype == np.float64 else np.float32, order="C")


class Subject:
    """The function, its inputs as float32 (which holds all three types), and how to call it."""

    def __init__(
        self,
        fn: Any,
        q: Any,
        k: Any,
        v: Any,
        do: Any,
        cu_seqlens: Any,
        cu_seqlens_k: Any,
        mask: Mask,
        scale: float | None,
        backward: Any,
        seed: int,
    ):
        self.torch = type(q).__module__.partition(".")[0] == "torch"
        if not (backward in (None, True, False) or callable(backward)):
            raise ValueError(f"backward: {backward!r} given, None, True, False or a function allowed")
        if backward is True and not self.torch:
            raise ValueError(
                "backward: True given, None, False or a function (do, q, k, v, cu_seqlens) -> (dq, dk, dv) "
                f"allowed for arrays of {type(q).__module__.partition('.')[0]}"
            )
        self._fn = fn
        self._like = q
        self._backward = backward
        self._two_offsets = cu_seqlens_k is not None
        self.dtype = _type_of_all(q=q, k=k, v=v)
        self.largest = _LARGEST[self.dtype]
        self.smallest_normal = _SMALLEST_NORMAL[self.dtype]
        self.roundoff = _ROUNDOFF[self.dtype]
        self.tiny = _TINY[self.dtype]
        self.inputs = {name: _values(array) for name, array in (("q", q), ("k", k), ("v", v))}
        cu_q, cu_k = _offsets("cu_seqlens", cu_seqlens), _offsets("cu_seqlens_k", cu_seqlens_k)
        self._settings = {"causal": False, "window": tuple(mask), "scale": scale}
        # Also checks shapes and offsets, with the library's own messages.
        self._exact_forward = exact_attention(*self.inputs.values(), cu_q, **self._settings, cu_seqlens_k=cu_k)
        tokens_q, tokens_k = self.inputs["q"].shape[0], self.inputs["k"].shape[0]
        if cu_q is None:
            cu_q, cu_k = np.array([0, tokens_q]), np.array([0, tokens_k])
        self.layout = Layout(cu_q, cu_q if cu_k is None else cu_k, mask)
        self.scale = self.inputs["q"].shape[2] ** -0.5 if scale is None else scale
        self.o_shape = (*self.inputs["q"].shape[:2], self.inputs["v"].shape[2])
        if do is not None and tuple(do.shape) != self.o_shape:
            raise ValueError(f"do: shape {list(do.shape)} given, {list(self.o_shape)} allowed (o's)")
        gradient = np.random.default_rng(seed).standard_normal(self.o_shape, np.float32) if do is None else do
        # None until the first call has shown whether there are gradients.
        self.differentiates: bool | None = {None: None, True: None, False: False}.get(backward, True)
        self.inputs["do"] = _values(self._give(_values(gradient)))

    def exact(self) -> dict[str, np.ndarray]:
        """What is right: o, lse and, where there are any, gradients, in float64, rounded to float32."""
        exact = dict(zip(("o", "lse"), self._exact_forward, strict=True))
        if self.differentiates:
            inputs = (self.inputs[name] for name in ("do", "q", "k", "v"))
            cu_q, cu_k = (offsets.astype(np.int32) for offsets in (self.layout.cu_q, self.layout.cu_k))
            gradients = exact_attention_backward(*inputs, cu_q, **self._settings, cu_seqlens_k=cu_k)
            exact |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        return exact

    def run(self, inputs: dict[str, np.ndarray], layout: Layout | None = None, forward_only: bool = False) -> dict:
        """o, and lse, dq, dk, dv where there are any, of new arrays with these values."""
        layout = layout or self.layout
        arrays = [self._give(inputs[name]) for name in ("q", "k", "v")]
        offsets = [self._give_offsets(layout.cu_q)] + [self._give_offsets(layout.cu_k)] * self._two_offsets
        gradients: Any = None
        if self.torch and self._backward in (None, True) and self.differentiates is not False and not forward_only:
            o, lse, gradients = self._run_autograd(arrays, offsets, inputs["do"])
        else:
            o, lse = self._run_forward(arrays, offsets)
            if callable(self._backward) and not forward_only:
                gradients = self._backward(self._give(inputs["do"]), *arrays, *offsets)
        if self.differentiates is None and not forward_only:
            self.differentiates = gradients is not None
        results = {"o": o} if lse is None else {"o": o, "lse": lse}
        if gradients is not None:
            if not isinstance(gradients, tuple | list) or len(gradients) != 3:
                raise ValueError("backward: the function's result given, (dq, dk, dv) allowed")
            results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        return {name: self._taken(name, array) for name, array in results.items()}

    def _run_forward(self, arrays: list, offsets: list) -> tuple[Any, Any]:
        if not self.torch:
            return self._unpacked(self._fn(*arrays, *offsets))
        import torch

        with torch.no_grad():
            return self._unpacked(self._fn(*arrays, *offsets))

    def _run_autograd(self, arrays: list, offsets: list, do: np.ndarray) -> tuple[Any, Any, Any]:
        import torch

        with torch.enable_grad():
            leaves = [array.requires_grad_() for array in arrays]
            o, lse = self._unpacked(self._fn(*leaves, *offsets))
            if getattr(o, "grad_fn", None) is None:
                if self._backward is True:
                    raise ValueError("backward: True given, but o of fn has no grad_fn; None or False allowed")
                return o, lse, None
            self._check("o", o)
            return o, lse, torch.autograd.grad(o, leaves, self._give(do).to(o.dtype))

    @staticmethod
    def _unpacked(result: Any) -> tuple[Any, Any]:
        if not isinstance(result, tuple | list):
            return result, None
        if len(result) != 2:
            raise ValueError(f"fn: a tuple of {len(result)} returned, o or (o, lse) allowed")
        return result[0], result[1]

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in ("dq", "dk", "dv"):
            return self.inputs[name[1]].shape
        return self.o_shape[:2] if name == "lse" else self.o_shape

    def _check(self, name: str, array: Any) -> None:
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name}: fn returned a {type(array).__name__}, an array allowed")
        if tuple(array.shape) != self._shape(name):
            raise ValueError(f"{name}: fn returned shape {list(array.shape)}, {list(self._shape(name))} allowed")

    def _taken(self, name: str, array: Any) -> np.ndarray:
        self._check(name, array)
        # Results may be rounded to a coarser type than the inputs; unknown ones (8 bits) have no tolerance of ours.
        if name == "o":
            self.roundoff = max(self.roundoff, _ROUNDOFF.get(_type_name(array), 0.0))
        return _values(array)

    def _give(self, values: np.ndarray) -> Any:
        """A new array of the inputs' framework, type and device."""
        if self.torch:
            import torch

            return torch.tensor(values).to(dtype=self._like.dtype, device=self._like.device)
        if isinstance(self._like, np.ndarray):
            return np.array(values, dtype=self._like.dtype, order="C")
        return self._like.__array_namespace__().asarray(values, dtype=self._like.dtype, copy=True)

    def _give_offsets(self, offsets: np.ndarray) -> Any:
        offsets = offsets.astype(np.int32)
        if self.torch:
            import torch

            return torch.tensor(offsets, device=self._like.device)
        return offsets if isinstance(self._like, np.ndarray) else self._like.__array_namespace__().asarray(offsets)
