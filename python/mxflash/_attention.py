"""Attention and its gradients on arrays of any framework."""

from typing import Any, NamedTuple

from mxflash import _native
from mxflash._arrays import Framework, native, put, take_offsets
from mxflash._lists import recipe_text


class Mask(NamedTuple):
    """Keys that a query sees, counted from its own (aligned at the last of both): None is no bound."""

    left: int | None
    right: int | None


def mask_of(causal: bool, window: tuple[int | None, int | None] | None) -> Mask:
    """`causal` and `window` together: no query sees a later key in any case where `causal`."""
    try:
        left, right = (None, None) if window is None else window
    except (TypeError, ValueError):
        raise ValueError(f"window: {window!r} given, (left, right) or None allowed") from None
    for bound in (left, right):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
            raise ValueError(f"window: {window!r} given, integers or None (no bound) allowed")
    if causal:
        right = 0 if right is None else min(right, 0)
    return Mask(left, right)


def arguments_of(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    mask: Mask,
    scale: float | None,
    dlse: Any = None,
) -> _native.Arguments:
    """The compiled part's view of one call."""
    arrays = [native(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
    gradients = [None if array is None else native(name, array) for name, array in (("do", do), ("dlse", dlse))]
    arguments = _native.Arguments(*arrays, *gradients)
    arguments.documents(take_offsets("cu_seqlens", cu_seqlens), take_offsets("cu_seqlens_k", cu_seqlens_k))
    put(arguments, window=mask, scale=scale)
    return arguments


def settings_of(
    recipe: Any = "mxfp8",
    engine: str = "auto",
    causality: str | None = None,
    threads: int = 0,
    seed: int = 0,
    deterministic: bool = True,
) -> _native.Settings:
    """What runs, and how."""
    settings = _native.Settings()
    settings.recipe = recipe_text(recipe)
    put(settings, engine=engine, causality=causality, threads=threads, seed=seed, deterministic=deterministic)
    return settings


def _run(function: Any, framework: Framework, arguments: _native.Arguments, settings: _native.Settings) -> tuple:
    settings.numpy = framework.numpy
    return tuple(framework.give(result) for result in function(arguments, settings))


def attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any = None,
    recipe: Any = "mxfp8",
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    *,
    cu_seqlens_k: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """Attention of packed documents: (o [tokens_q, heads, value_dim], lse float32 [tokens_q, heads]).

    cu_seqlens: int32 offsets of the documents, or integers in a list; None: one document. cu_seqlens_k: those of k and
    v where they differ; queries and keys are then aligned at the end of each document.
    recipe: a name of recipes(), a dictionary as recipes() gives them, or the path of a JSON file.
    window: (left, right) keys around a query's own, None: no bound. scale: None is 1 / sqrt(head_dim).
    settings: engine ("auto"), causality (of the backward, "exact" or "block"; None: the recipe's), threads (0: one a
    core), seed (of stochastic rounding), deterministic (True).

    o has the inputs' type, lse is the natural log; a query that sees no key has o = 0 and lse = -inf. Any strides are
    taken as they come. Raises ValueError for what the arguments have wrong, RuntimeError for what cannot run here.
    """
    arguments = arguments_of(q, k, v, None, cu_seqlens, cu_seqlens_k, mask_of(causal, window), scale)
    return _run(_native.forward, Framework(q), arguments, settings_of(recipe, **settings))


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any = None,
    lse: Any = None,
    cu_seqlens: Any = None,
    recipe: Any = "mxfp8",
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    *,
    cu_seqlens_k: Any = None,
    dlse: Any = None,
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """Gradients (dq, dk, dv) of attention() for do, the gradient of o; each has its input's shape and type.

    dlse: the gradient of the loss with respect to lse, float32 [tokens_q, heads], where the loss uses lse; None: zero.
    o and lse are attention()'s own; the CPU engines make both again from q, k and v, so None will do: where given,
    their shapes must be right. The rest as for attention().
    """
    arguments = arguments_of(q, k, v, do, cu_seqlens, cu_seqlens_k, mask_of(causal, window), scale, dlse)
    for name, given, shape in (("o", o, (*q.shape[:2], *v.shape[2:])), ("lse", lse, tuple(q.shape[:2]))):
        if given is not None and tuple(getattr(given, "shape", ())) != shape:
            what = f"shape {list(given.shape)}" if hasattr(given, "shape") else f"a {type(given).__name__}"
            raise ValueError(f"{name}: {what} given, shape {list(shape)} allowed (attention's own result)")
    return _run(_native.backward, Framework(q), arguments, settings_of(recipe, **settings))


def exact_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    *,
    cu_seqlens_k: Any = None,
    threads: int = 0,
) -> tuple[Any, Any]:
    """attention() without any quantization, computed in float64: (o, lse), both float32."""
    arguments = arguments_of(q, k, v, None, cu_seqlens, cu_seqlens_k, mask_of(causal, window), scale)
    return _run(_native.exact_forward, Framework(q), arguments, settings_of(threads=threads))


def exact_attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    *,
    cu_seqlens_k: Any = None,
    dlse: Any = None,
    threads: int = 0,
) -> tuple[Any, Any, Any]:
    """The gradients of exact_attention(), computed in float64: (dq, dk, dv), all float32; dlse as in the other."""
    arguments = arguments_of(q, k, v, do, cu_seqlens, cu_seqlens_k, mask_of(causal, window), scale, dlse)
    return _run(_native.exact_backward, Framework(q), arguments, settings_of(threads=threads))
