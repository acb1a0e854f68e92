"""What is audited: a function of somebody's, called with arrays of its own framework, answering in numpy."""

from typing import Any

import numpy as np

from mxflash._arrays import take_offsets
from mxflash._attention import Mask, exact_attention, exact_attention_backward
from mxflash._audit_layout import Layout

# Unit roundoffs: half the distance from 1 to the next number.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
_LARGEST = {"bfloat16": 3.3895e38, "float16": 65504.0, "float32": 3.4e38}
_SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}


def _type_name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _to_numpy(array: Any) -> np.ndarray:
    """Every value as it is, in float64 where it needs that and float32 where not."""
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        array = array.detach().cpu()
        return (array if array.dtype == torch.float64 else array.to(torch.float32)).numpy()
    array = array.get() if hasattr(array, "get") and not isinstance(array, np.ndarray) else np.asarray(array)
    return array if array.dtype == np.float64 else array.astype(np.float32)


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
        # Also checks all arguments, with the library's own messages.
        left, right = mask
        settings = {"causal": False, "window": (left, right), "scale": scale}
        given_k = {} if cu_seqlens_k is None else {"cu_seqlens_k": cu_seqlens_k}
        exact_attention(q, k, v, cu_seqlens, **settings, **given_k)

        self.dtype = _type_name(q)
        self.largest = _LARGEST[self.dtype]
        self.smallest_normal = _SMALLEST_NORMAL[self.dtype]
        self.inputs = {name: _to_numpy(array) for name, array in (("q", q), ("k", k), ("v", v))}
        tokens_q, tokens_k = self.inputs["q"].shape[0], self.inputs["k"].shape[0]
        cu_q = self._offsets("cu_seqlens", cu_seqlens, tokens_q)
        cu_k = self._offsets("cu_seqlens_k", cu_seqlens_k, tokens_k) if self._two_offsets else None
        if cu_k is None:
            cu_k = cu_q if cu_seqlens is not None else np.array([0, tokens_k])
        self.layout = Layout(cu_q, cu_k, mask)
        self.scale = self.inputs["q"].shape[2] ** -0.5 if scale is None else scale
        self.o_shape = (*self.inputs["q"].shape[:2], self.inputs["v"].shape[2])
        if do is not None and tuple(do.shape) != self.o_shape:
            raise ValueError(f"do: shape {list(do.shape)} given, {list(self.o_shape)} allowed (o's)")
        gradient = np.random.default_rng(seed).standard_normal(self.o_shape, np.float32) if do is None else do
        # None until the first call has shown whether there are gradients.
        self.differentiates: bool | None = {None: None, True: None, False: False}.get(backward, True)
        self.inputs["do"] = _to_numpy(self._give(_to_numpy(gradient)))
        self.roundoff = _ROUNDOFF[self.dtype]

    @staticmethod
    def _offsets(name: str, given: Any, tokens: int) -> np.ndarray:
        if given is None:
            return np.array([0, tokens])
        taken = take_offsets(name, given)
        return _to_numpy(taken).astype(np.int64) if not isinstance(taken, np.ndarray) else taken.astype(np.int64)

    def exact(self) -> dict[str, np.ndarray]:
        """Everything in float64, rounded to float32."""
        layout = self.layout
        where = {"cu_seqlens_k": layout.cu_k.astype(np.int32)}
        settings = {"causal": False, "window": tuple(layout.mask), "scale": self.scale}
        arrays = [np.ascontiguousarray(self.inputs[name]) for name in ("q", "k", "v")]
        cu_q = layout.cu_q.astype(np.int32)
        o, lse = exact_attention(*arrays, cu_q, **settings, **where)
        exact = {"o": o, "lse": lse}
        if self.differentiates:
            do = np.ascontiguousarray(self.inputs["do"])
            gradients = exact_attention_backward(do, *arrays, cu_q, **settings, **where)
            exact |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            # dV of dO = 1 is the sum of each key's weights: what the tolerances of dK and dV are made of.
            ones = exact_attention_backward(np.ones_like(do), *arrays, cu_q, **settings, **where)[2]
            exact["key_weight"] = ones[:, :, 0]
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
        return np.array(_to_numpy(array))

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
