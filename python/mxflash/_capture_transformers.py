"""Where models of transformers call their attention: mxflash.capture's way in."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from mxflash._documents import Dense, in_backward, of_call, of_dense, plain
from mxflash.transformers import causal_of, refuse, window_of


@contextlib.contextmanager
def intercepted(recording: Any, model: torch.nn.Module, counter: Callable, watch: Callable) -> Iterator[None]:
    """Shows `recording` every call that a module of `model` makes, until the block ends."""
    modules = set(model.modules())
    original = AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str | None, default: Callable) -> Callable:
        function = original(self, attn_implementation, default)

        def recorded(module: torch.nn.Module, query, key, value, attention_mask=None, **others: Any) -> tuple:
            # Activation checkpointing computes a forward again inside of the backward.
            if module not in modules or in_backward():
                return function(module, query, key, value, attention_mask, **others)
            layer = getattr(module, "layer_idx", None)
            layer = counter() if layer is None else layer
            if not recording.wants(layer):
                return function(module, query, key, value, attention_mask, **others)
            refuse(others.get("dropout", 0.0), {**others, "output_attentions": None})
            causal = causal_of(module, others.get("is_causal"))
            seen = _seen(attn_implementation or "eager", query, key, attention_mask, causal, others)
            call, pack = recording.add(layer, module, (query, key, value), seen, others.get("scaling"))
            output, weights = function(module, query, key, value, attention_mask, **others)
            watch(output, call, lambda gradient: pack(gradient.transpose(1, 2)))
            return output, weights

        return recorded

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


def _seen(implementation: str, query: torch.Tensor, key: torch.Tensor, mask: Any, causal: bool, others: dict) -> Dense:
    """What an attention function of transformers makes of its arguments."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ValueError(
            f"attention_mask: a {type(mask).__name__} given, a tensor allowed (attn_implementation='sdpa')"
        )
    batch, tokens_q, tokens_k = query.shape[0], query.shape[2], key.shape[2]
    if implementation in ("sdpa", "eager"):
        # These know of documents, padding and windows by their mask alone; without one sdpa is causal from the first
        # key on, and eager sees everything.
        if mask is not None:
            return of_dense(mask, batch, tokens_q, tokens_k)
        causal = causal and implementation == "sdpa" and tokens_q > 1
        length = tokens_q if causal else tokens_k
        if length > tokens_k:
            raise ValueError(f"query: {tokens_q} tokens on {tokens_k} keys given, at most as many allowed")
        # One query at the end sees all keys, causal or not; causal then agrees with the other calls of its layer.
        return Dense(plain(batch, tokens_q, length, query.device), causal or tokens_q == 1, None)
    given = (others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
    window = window_of(others.get("sliding_window"))
    documents = of_call(query, key, mask, *given, causal, window is not None)
    if window is not None and causal:
        window = (window[0], None)
    return Dense(documents, causal, window)
