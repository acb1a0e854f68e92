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
    deterministic: bool = True,
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
    backward, "exact" or "block" (None: the recipe's). deterministic: the same gradients bit for bit every time; False
    leaves dq of the CUDA engine to the order in which its blocks end, unless torch.use_deterministic_algorithms is on.
    seed: of stochastic rounding; None draws one from torch's generator where the recipe rounds so, and else takes 0.

    Under torch.compile a recipe of one's own goes as JSON text. Under autocast q, k and v take its type. A loss may use
    o, lse or both; create_graph=True raises. There is no forward-mode derivative (torch.func.jvp).
    On the host the backward needs q, k and v alone, which is what is saved.

    CUDA tensors, in a build with the CUDA engine: both passes on their device and torch's current stream. Nothing
    waits, a graph may capture it, and the workspaces are torch's. Values of cu_seqlens_* are checked on the device:
    malformed ones give NaN, or ValueError with validate=True, which waits for the stream. A graph keeps the seed of its
    capture. Where a gradient is required, o and the forward's workspace are saved (docs/training.md: how many bytes),
    q, k and v only where the recipe does not run in FP8; one without a backward on the device is refused then.
    """
    cuda = q.device.type == "cuda"
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    text = recipe_text(recipe)
    left, right = mask_of(causal, window)
    # Where no backward follows, less is made and nothing kept.
    training = cuda and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if seed is None and (training or not cuda):  # It is of the backward.
        draws = text in _STOCHASTIC or (text.startswith("{") and "stochastic" in text)
        if draws:
            seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        elif not cuda:  # There a tensor on the host would keep torch.compile from making graphs.
            seed = 0
    if seed is not None and not isinstance(seed, torch.Tensor):
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed: {seed!r} given, an integer from 0 to 2**63 - 1 or None allowed")
        seed = torch.tensor(seed, dtype=torch.int64, device="cpu")
    if seed is not None and (seed.dtype != torch.int64 or seed.device.type != "cpu"):
        raise ValueError(f"seed: {seed.dtype} on {seed.device} given, int64 on the host allowed")
    for name, tensor in (("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: on {tensor.device} given, {q.device} allowed (q's)")
    o, lse, *_ = (torch.ops.mxflash.attention_training if training else torch.ops.mxflash.attention)(
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
        deterministic or torch.are_deterministic_algorithms_enabled(),
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
        arguments = _device_arguments((q, k, v), offsets_q, offsets_k, left, right, scale)
        settings = _settings(seed, recipe, engine, causality, deterministic)
        o, lse, _ = _cuda.forward(arguments, settings, (q, k, v), validate)
    return o, lse


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
    raise RuntimeError(
        "mxflash::attention keeps nothing for a backward on cuda; mxflash::attention_training, which "
        "mxflash.torch.attention calls where a gradient is required, does"
    )


@library.custom_op("mxflash::attention_training", mutates_args=(), device_types="cuda")
def _training(
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
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _cuda.refuse_engine(engine, q.device)
    with torch.cuda.device(q.device):
        arguments = _device_arguments((q, k, v), cu_seqlens_q, cu_seqlens_k, window_left, window_right, scale)
        settings = _settings(seed, recipe, engine, causality, deterministic)
        three = q.ndim == k.ndim == v.ndim == 3  # Others are refused with the rest.
        saved = _cuda.saved_bytes((q, k, v), cu_seqlens_q, recipe, causality) if three else 0
        return _cuda.forward(arguments, settings, (q, k, v), validate, saved)


@library.custom_op("mxflash::attention_training_backward", mutates_args=(), device_types="cuda")
def _training_backward(
    do: torch.Tensor | None,
    o: torch.Tensor,
    saved: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    q: torch.Tensor | None,  # Where the recipe's backward reads them.
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    tokens_k: int,
    kv_heads: int,
    head_dim: int,
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
        do = o.new_zeros(()).expand(o.shape)
    with torch.cuda.device(o.device):
        gradients = _gradients_like(o, tokens_k, kv_heads, head_dim)
        # Another size: of another call.
        if saved.nbytes != (allowed := _cuda.saved_bytes(gradients, cu_seqlens_q, recipe, causality)):
            raise ValueError(f"saved: {saved.nbytes} bytes given, {allowed} allowed (those of the forward)")
        inputs = (q, k, v) if _cuda.reads_inputs(recipe, causality) else gradients  # Those have the shapes and types.
        for name, tensor in zip(("q", "k", "v"), inputs, strict=True):
            if tensor is None:
                raise ValueError(f"{name}: None given, the forward's allowed (this recipe's backward reads it)")
        rest = cu_seqlens_q, cu_seqlens_k, window_left, window_right, scale
        arguments = _device_arguments((*inputs, do, dlse), *rest)
        settings = _settings(seed, recipe, engine, causality, deterministic)
        _cuda.backward(arguments, settings, (o.contiguous(), saved), gradients)
    return gradients


def _gradients_like(o, tokens_k, kv_heads, head_dim):
    """dq, dk and dv: shapes and types of q, k and v, contiguous, whatever the inputs' strides."""
    tokens_q, heads, value_dim = o.shape
    shapes = (tokens_q, heads, head_dim), (tokens_k, kv_heads, head_dim), (tokens_k, kv_heads, value_dim)
    return tuple(o.new_empty(shape) for shape in shapes)


def _device_arguments(tensors, cu_seqlens_q, cu_seqlens_k, *rest) -> _native.Arguments:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = (_cuda.one_document(tensor) for tensor in tensors[:2])
    return _arguments(tensors, cu_seqlens_q, cu_seqlens_k, *rest)


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


@_training.register_fake
def _(q, k, v, cu_seqlens_q, _offsets_k, _seed, recipe, _left, _right, _scale, _engine, causality, *_):
    tokens, heads = q.shape[0], q.shape[1]
    saved = _cuda.saved_bytes((q, k, v), cu_seqlens_q, recipe, causality)
    return (
        q.new_empty((tokens, heads, v.shape[2])),
        q.new_empty((tokens, heads), dtype=torch.float32),
        q.new_empty((saved,), dtype=torch.uint8),
    )


@_training_backward.register_fake
def _(_do, o, _saved, _offsets_q, _offsets_k, _seed, _q, _k, _v, tokens_k, kv_heads, head_dim, *_):
    return _gradients_like(o, tokens_k, kv_heads, head_dim)


def _save(ctx, inputs, output):  # The names are torch's.
    del output  # Nothing of it is needed.
    q, k, v, cu_seqlens_q, cu_seqlens_k, seed, *ctx.rest, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, seed)


def _save_training(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, seed, *ctx.rest, _ = inputs
    recipe, _, _, _, _, causality, _ = ctx.rest
    kept = (q, k, v) if _cuda.reads_inputs(recipe, causality) else (None, None, None)
    o, _, saved = output
    ctx.sizes = k.shape[0], k.shape[1], q.shape[2]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(o, saved, cu_seqlens_q, cu_seqlens_k, seed, *kept)


def _refuse_create_graph():
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph: True given, False allowed (attention's gradients have no gradients)")


def _gradients(ctx, do, dlse):
    _refuse_create_graph()
    nothing = (None,) * (4 + len(ctx.rest))
    if do is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, *rest = ctx.saved_tensors
    return *torch.ops.mxflash.attention_backward(do, q, k, v, *rest, *ctx.rest, dlse), *nothing


_attention.register_autograd(_gradients, setup_context=_save)


def _training_gradients(ctx, do, dlse, _saved):
    _refuse_create_graph()
    nothing = (None,) * (4 + len(ctx.rest))
    if do is None and dlse is None:
        return None, None, None, *nothing
    gradients = torch.ops.mxflash.attention_training_backward(do, *ctx.saved_tensors, *ctx.sizes, *ctx.rest, dlse)
    return *gradients, *nothing


_training.register_autograd(_training_gradients, setup_context=_save_training)
