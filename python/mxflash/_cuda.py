"""Attention on CUDA tensors: torch's device, memory and stream; it waits for nothing unless asked to."""

import torch

from mxflash import _native
from mxflash._arrays import put
from mxflash._lists import recipe as checked_recipe

ENGINES = ("auto", "cuda")


def refuse_engine(engine: str, device: torch.device) -> None:
    """ValueError for an engine of the host: tensors are not copied there behind anybody's back."""
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} given, 'auto' or 'cuda' allowed (tensors on {device})")


def one_document(tensor: torch.Tensor) -> torch.Tensor:
    """Offsets [0, tokens] made on the device: a copy from the host would wait, and cannot be captured in a graph."""
    tokens = tensor.shape[0] if tensor.ndim else 0  # Of too few dimensions: refused with the rest.
    return torch.arange(2, dtype=torch.int32, device=tensor.device).mul_(tokens)


def reads_inputs(recipe: str, causality: str | None) -> bool:
    """Whether the backward reads q, k and v; otherwise the forward's codes are all that it needs of them."""
    settings = _native.Settings()
    settings.recipe = recipe
    put(settings, causality=causality)
    return _native.cuda_backward_reads_inputs(settings)


def saved_bytes(
    tensors: tuple[torch.Tensor, ...], cu_seqlens_q: torch.Tensor | None, recipe: str, causality: str | None
) -> int:
    """Room for the forward's workspace where a backward follows: what the compiled part plans, which checks it, and up
    to 40 KiB and 13 bytes a slot more.

    An expression of the shapes, which torch.compile does not know yet: asking the compiled part would need numbers.
    tensors: of the shapes and the type of q, k and v.
    """
    q, k, v = tensors
    documents = 1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    slots = q.shape[0] // 128 + documents
    # Beside slots of queries and of keys: the sort, of which CUB alone knows the size (13 bytes a slot and 18 KiB, or
    # next to nothing), and what aligns the arrays.
    schedule = (56 + 13) * slots + 20 * (k.shape[0] // 128 + documents) + 2**15
    if reads_inputs(recipe, causality):
        # A recipe without operands for cut tiles has the key too: with None.
        kinds = 1 if checked_recipe(recipe)["o"]["cut"] is None else 2
        return schedule + _table_bytes(q, k, v, kinds)
    return schedule + _code_bytes(q, k, v, documents)


def _kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Dims of q and k, dims of v in a pass, passes: as choose_kernel of the compiled part."""
    if max(head_dim, value_dim) <= 64:
        return 64, 64, 1
    return 128 if head_dim <= 128 else 256, 128, 1 if value_dim <= 128 else 2


def _table_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kinds: int) -> int:
    """BF16 tables, those of values once for each kind of tile; of a token a factor, of a key also fold and height."""
    (queries, heads, head_dim), (keys, kv_heads, value_dim) = q.shape, (*k.shape[:2], v.shape[2])
    dims, value_dims, parts = _kernel_dims(head_dim, value_dim)
    of_key = 2 * dims + kinds * (2 * parts * value_dims + 12)
    return queries * heads * (2 * dims + 4) + keys * kv_heads * of_key


def _code_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: int) -> int:
    """E4M3 codes of rows in whole tiles. What lies along keys has 16 columns more for each document."""
    (queries, heads, head_dim), (keys, kv_heads, value_dim) = q.shape, (*k.shape[:2], v.shape[2])
    dims, value_dims, parts = _kernel_dims(head_dim, value_dim)
    rows_q = (queries // 128 + 1) * 128 * heads
    rows_k = (keys // 128 + 1) * 128 * kv_heads + 128
    columns = ((keys + 16 * documents) // 128 + 2) * 128 * kv_heads
    ranges = 16 * (keys // 128 + documents) * kv_heads
    residual = 0 if q.dtype == torch.float32 else queries * heads * value_dim * q.element_size()
    # Beside codes of queries: scales and records of rows.
    codes = rows_q * (dims + 8 + 16) + rows_k * dims + columns * (parts * (value_dims + 1) + 8)
    return codes + ranges + residual


def forward(
    arguments: _native.Arguments,
    settings: _native.Settings,
    tensors: tuple[torch.Tensor, ...],
    validate: bool,
    saved: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse, workspace) of tensors q, k and v, which `arguments` holds too; their device is the current one.

    saved: bytes of a workspace that a backward will read; None: none will, and it is done with.
    """
    q, _, v = tensors
    if validate and torch.cuda.is_current_stream_capturing():
        raise ValueError("validate: True given while a graph is captured, False allowed (it waits for the stream)")
    # Sizes that are wrong are refused before anything is written.
    o = q.new_empty((*q.shape[:2], *v.shape[2:]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    device = _native.Device()
    device.o, device.lse = o.data_ptr(), lse.data_ptr()
    device.training = saved is not None
    device.stream = torch.cuda.current_stream().cuda_stream
    needed = _native.cuda_workspace_bytes(arguments, settings, device)
    device.workspace_bytes = needed if saved is None else saved
    # Where nobody keeps it, torch gives it to those who use it on this stream after the call.
    workspace = q.new_empty(device.workspace_bytes, dtype=torch.uint8)
    device.workspace = workspace.data_ptr()
    _native.cuda_forward(arguments, settings, device)
    if validate:
        _native.cuda_check(device)
    return o, lse, workspace


def backward(
    arguments: _native.Arguments,
    settings: _native.Settings,
    kept: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, ...],
) -> None:
    """Fills dq, dk and dv, which may stand for q, k and v in `arguments`; kept: the forward's o and workspace."""
    o, saved = kept
    device = _native.Device()
    device.o, device.saved, device.saved_bytes = o.data_ptr(), saved.data_ptr(), saved.nbytes
    device.dq, device.dk, device.dv = (gradient.data_ptr() for gradient in gradients)
    device.stream = torch.cuda.current_stream().cuda_stream
    device.workspace_bytes = _native.cuda_backward_workspace_bytes(arguments, settings, device)
    workspace = o.new_empty(device.workspace_bytes, dtype=torch.uint8)
    device.workspace = workspace.data_ptr()
    _native.cuda_backward(arguments, settings, device)
