"""Attention as a differentiable torch operator: torch.compile, autocast, activation checkpointing.

from mxflash.torch import attention
o = attention(q, k, v, cu_seqlens, recipe="mxfp8")
o.backward(do)
"""

import torch
from torch import library

from mxflash import _cuda, _native
from mxflash._arrays import put, take
from mxflash._attention import mask_of
from mxflash._lists import recipe_text, recipes

_UNBOUNDED = 2**31 - 1
_STOCHASTIC = frozenset(name for name, entry in recipes().items() if "stochastic" in str(entry))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    recipe="mxfp8",
    causal: bool = True,
    return_lse: bool = False,
    deterministic: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    engine: str = "auto",
    causality: str | None = None,
    seed: torch.Tensor | int | None = None,
    validate: bool = False,
):
    """Attention of packed documents: o [tokens_q, heads, value_dim], or (o, lse float32 [tokens_q, heads]).

    q [tokens_q, heads, head_dim], k [tokens_k, kv_heads, head_dim], v [tokens_k, kv_heads, value_dim]: bfloat16,
    float16 or float32, any strides; cu_seqlens_*: int32 offsets of the documents (None: one document; those of k: q's).
    recipe: a name of mxflash.recipes(), a dictionary as it gives them, or the path of a JSON file. causality: of the
    backward, "exact" or "block" (None: the recipe's). deterministic: the CPU engines are in any case.
    seed: of stochastic rounding; None draws one from torch's generator where the recipe rounds so, and else takes 0.

    Under torch.compile a recipe of one's own goes as JSON text. Under autocast q, k and v take its type. The backward
    needs q, k and v alone, which is what is saved. A loss may use o, lse or both; create_graph=True raises.
    There is no forward-mode derivative (torch.func.jvp).

    CUDA tensors, in a build with the CUDA engine: the forward on their device and torch's current stream. Nothing
    waits, a graph may capture it, and the workspace is torch's. Values of cu_seqlens_* are checked on the device:
    malformed ones give NaN, or ValueError with validate=True, which waits for the stream. There is no backward there
    yet: tensors that require a gradient are refused.
    """
    cuda = q.device.type == "cuda"
    if cuda:
        _cuda.refuse_gradients(q, k, v)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    text = recipe_text(recipe)
    left, right = mask_of(causal, window)
    if seed is None and not cuda:  # It is of the backward.
        draws = text in _STOCHASTIC or (text.startswith("{") and "stochastic" in text)
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if draws else 0
    if seed is not None and not isinstance(seed, torch.Tensor):
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed: {seed!r} given, an integer from 0 to 2**63 - 1 or None allowed")
        seed = torch.tensor(seed, dtype=torch.int64, device="cpu")
    if seed is not None and (seed.dtype != torch.int64 or seed.device.type != "cpu"):
        raise ValueError(f"seed: {seed.dtype} on {seed.device} given, int64 on the host allowed")
    for name, tensor in (("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: on {tensor.device} given, {q.device} allowed (q's)")
    o, lse = torch.ops.mxflash.attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seed,
        text,
        _UNBOUNDED if left is None else left,
        _UNBOUNDED if right is None else right,
        scale,
        engine,
        causality,
        deterministic,
        validate,
    )
    return (o, lse) if return_lse else o


@library.custom_op("mxflash::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    recipe: str,
    window_left: int,
    window_right: int,
    scale: float | None,
    engine: str,
    causality: str | None,
    deterministic: bool,
    validate: bool = False,  # Offsets on the host are checked in any case.
) -> tuple[torch.Tensor, torch.Tensor]:
    del validate
    arguments = _arguments((q, k, v), cu_seqlens_q, cu_seqlens_k, window_left, window_right, scale)
    o, lse = _native.forward(arguments, _settings(seed, recipe, engine, causality, deterministic))
    return torch.from_dlpack(o), torch.from_dlpack(lse)


@_attention.register_kernel("cuda")
def _(
    q, k, v, offsets_q, offsets_k, seed, recipe, left, right, scale, engine, causality, deterministic, validate=False
):
    _cuda.refuse_engine(engine, q.device)
    with torch.cuda.device(q.device):
        if offsets_q is None and offsets_k is None:
            offsets_q, offsets_k = _cuda.one_document(q), _cuda.one_document(k)
        arguments = _arguments((q, k, v), offsets_q, offsets_k, left, right, scale)
        settings = _settings(seed, recipe, engine, causality, deterministic)
        return _cuda.forward(arguments, settings, (q, k, v), validate)


@library.custom_op("mxflash::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seed: torch.Tensor,
    recipe: str,
    window_left: int,
    window_right: int,
    scale: float | None,
    engine: str,
    causality: str | None,
    deterministic: bool,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if do is None:
        do = q.new_zeros(()).expand(*q.shape[:2], v.shape[2])
    arguments = _arguments((q, k, v, do, dlse), cu_seqlens_q, cu_seqlens_k, window_left, window_right, scale)
    gradients = _native.backward(arguments, _settings(seed, recipe, engine, causality, deterministic))
    dq, dk, dv = (torch.from_dlpack(gradient) for gradient in gradients)
    return dq, dk, dv


@_attention_backward.register_kernel("cuda")
def _(*_):
    raise RuntimeError("cuda has no backward yet; on the host there is one")


def _arguments(tensors, cu_seqlens_q, cu_seqlens_k, window_left, window_right, scale) -> _native.Arguments:
    names = ("q", "k", "v", "do", "dlse")
    taken = (tensor if tensor is None else take(name, tensor) for name, tensor in zip(names, tensors, strict=False))
    arguments = _native.Arguments(*taken)
    arguments.documents(cu_seqlens_q, cu_seqlens_k)
    arguments.window = (window_left, window_right)
    arguments.scale = scale
    return arguments


def _settings(seed, recipe, engine, causality, deterministic) -> _native.Settings:
    settings = _native.Settings()
    settings.recipe = recipe
    seed = 0 if seed is None else int(seed)
    put(settings, engine=engine, causality=causality, seed=seed, deterministic=deterministic)
    return settings


@_attention.register_fake
def _(q, _k, v, *_):
    tokens, heads = q.shape[0], q.shape[1]
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((tokens, heads), dtype=torch.float32)


@_attention_backward.register_fake
def _(_do, q, k, v, *_):
    # Contiguous, whatever the inputs' strides.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):  # The names are torch's.
    del output  # Nothing of it is needed.
    q, k, v, cu_seqlens_q, cu_seqlens_k, seed, *ctx.rest, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, seed)


def _gradients(ctx, do, dlse):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph: True given, False allowed (attention's gradients have no gradients)")
    nothing = (None,) * (4 + len(ctx.rest))
    if do is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, *rest = ctx.saved_tensors
    return *torch.ops.mxflash.attention_backward(do, q, k, v, *rest, *ctx.rest, dlse), *nothing


_attention.register_autograd(_gradients, setup_context=_save)
