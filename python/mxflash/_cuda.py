"""The forward on CUDA tensors: torch's device, memory and stream; it waits for nothing unless asked to."""

import torch

from mxflash import _native

ENGINES = ("auto", "cuda")


def refuse_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """RuntimeError where autograd would later ask for what there is not."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: one that requires a gradient given, none on {tensor.device} allowed (torch.no_grad(), or "
                "detach(): the cuda engine has no backward yet; on the host there is one)"
            )


def refuse_engine(engine: str, device: torch.device) -> None:
    """ValueError for an engine of the host: tensors are not copied there behind anybody's back."""
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} given, 'auto' or 'cuda' allowed (tensors on {device})")


def one_document(tensor: torch.Tensor) -> torch.Tensor:
    """Offsets [0, tokens] made on the device: a copy from the host would wait, and cannot be captured in a graph."""
    tokens = tensor.shape[0] if tensor.ndim else 0  # Of too few dimensions: refused with the rest.
    return torch.arange(2, dtype=torch.int32, device=tensor.device).mul_(tokens)


def forward(
    arguments: _native.Arguments,
    settings: _native.Settings,
    tensors: tuple[torch.Tensor, ...],
    validate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of tensors q, k and v, which `arguments` holds too; their device is the current one."""
    q, _, v = tensors
    if validate and torch.cuda.is_current_stream_capturing():
        raise ValueError("validate: True given while a graph is captured, False allowed (it waits for the stream)")
    # Sizes that are wrong are refused before anything is written.
    o = q.new_empty((*q.shape[:2], *v.shape[2:]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    device = _native.Device()
    device.o, device.lse = o.data_ptr(), lse.data_ptr()
    device.stream = torch.cuda.current_stream().cuda_stream
    device.workspace_bytes = _native.cuda_workspace_bytes(arguments, settings, device)
    # Torch gives it back at the end of the call, to those who use it on this stream after the call.
    workspace = q.new_empty(device.workspace_bytes, dtype=torch.uint8)
    device.workspace = workspace.data_ptr()
    _native.cuda_forward(arguments, settings, device)
    if validate:
        _native.cuda_check(device)
    return o, lse
