"""Attention of Hugging Face transformers (5 or later).

    import mxflash.transformers
    mxflash.transformers.register("mx", recipe="mxfp8")
    model.set_attn_implementation("mx")          # or from_pretrained(..., attn_implementation="mx")

Taken as that library passes them: rows of a batch, padding masks (left or right; padded tokens are removed, and their
results are 0), packed documents as cu_seq_lens_q and cu_seq_lens_k or as position_ids that start anew, key/value
caches, sliding windows, grouped heads, modules that are not causal. Everything else raises, see register().
"""

from collections.abc import Callable
from typing import Any

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    raise ImportError(
        "mxflash.transformers: transformers 5 or later allowed (pip install 'mxflash[transformers]')"
    ) from error

from mxflash._documents import of_call, rows
from mxflash._lists import recipe as checked_recipe
from mxflash._lists import recipe_text
from mxflash.torch import attention

# Arguments of the library's attention functions that change the result, and that we do not have.
REFUSED = {
    "softcap": "a cap on the logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the logits",
    "head_mask": "a mask of heads",
    "indices": "sparse keys",
    "block_indices": "sparse keys",
    "block_table": "a paged cache",
}
_SETTINGS = ("engine", "causality", "seed", "deterministic")


def register(name: str = "mx", recipe: Any = "mxfp8", **settings: Any) -> str:
    """Makes `attn_implementation=name` mean this recipe; gives the name back. A name once registered may be replaced.

    recipe: a name of mxflash.recipes(), a dictionary as it gives them, or the path of a JSON file. settings: engine,
    causality, seed and deterministic, as mxflash.torch.attention takes them.
    name: must not contain "flash", "flex_attention" or "sdpa", nor "/" or "|": the library gives such names a meaning
    of its own (it looks for the flash_attn package, for one).

    A model then raises ValueError, naming the argument, for what cannot be honoured: attention dropout in training, a
    softcap, attention sinks, a bias or a head mask, sparse or paged keys, dense (4-D) masks, masks that are neither
    causal nor full (image blocks, chunks), output_attentions. Under torch.compile all of it makes one graph; with
    padding the number of tokens is data, which older versions of torch break the graph for.
    """
    for taken in ("flash", "flex_attention", "sdpa", "/", "|"):
        if taken in name:
            raise ValueError(
                f"name: {name!r} given, one without {taken!r} allowed (it means something to transformers)"
            )
    if name == "eager":
        raise ValueError("name: 'eager' given, another allowed (it is the model's own attention)")
    for setting in settings:
        if setting not in _SETTINGS:
            raise ValueError(f"{setting}: not a setting, {', '.join(_SETTINGS)} allowed")
    checked_recipe(recipe)
    AttentionInterface.register(name, _attention_of(recipe_text(recipe), settings))
    AttentionMaskInterface.register(name, padding_mask)
    return name


def _attention_of(text: str, settings: dict[str, Any]) -> Callable:
    def mx_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [batch, heads, tokens, dim], key, value [batch, kv_heads, ...]: [batch, tokens, heads, value_dim]."""
        refuse(dropout, others)
        causal = causal_of(module, is_causal)
        window = window_of(sliding_window)
        if window is None:
            _no_window_meant(module, key.shape[2])
        documents = of_call(
            query,
            key,
            attention_mask,
            others.get("cu_seq_lens_q"),
            others.get("cu_seq_lens_k"),
            others.get("position_ids"),
            causal,
            window is not None,
        )
        if documents.key_length < key.shape[2]:
            key, value = key[:, :, : documents.key_length], value[:, :, : documents.key_length]
        if torch.is_autocast_enabled(query.device.type):  # Rotary positions leave query and key in float32.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        o = attention(
            rows(query, documents.queries),
            rows(key, documents.keys),
            rows(value, documents.keys),
            documents.offsets_q,
            documents.offsets_k,
            recipe=text,
            causal=causal,
            window=window,
            scale=scaling,
            **settings,
        )
        batch, heads, tokens, _ = query.shape
        if documents.queries is not None:
            o = o.new_zeros((batch * tokens, heads, o.shape[2])).index_copy(0, documents.queries, o)
        return o.view(batch, tokens, heads, o.shape[2]), None

    return mx_attention


def refuse(dropout: float, others: dict[str, Any]) -> None:
    """ValueError for what our attention does not have."""
    if dropout:
        raise ValueError(f"dropout: {dropout} given, 0 allowed (attention_dropout of the config, or model.eval())")
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(f"{name}: {meaning} given, None allowed")
    if others.get("output_attentions"):
        raise ValueError("output_attentions: True given, False allowed (the weights are never all there)")


def causal_of(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def window_of(sliding_window: int | None) -> tuple[int, int] | None:
    """The library counts a query's own key: a window of w has w - 1 others, where not causal on either side."""
    if sliding_window is None:
        return None
    if sliding_window < 1:
        raise ValueError(f"sliding_window: {sliding_window} given, 1 or more, or None allowed")
    return sliding_window - 1, sliding_window - 1


def _no_window_meant(module: torch.nn.Module, keys: int) -> None:
    """Raises where a layer's window is in its dense mask alone, which is not built here."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or keys <= window:
        return
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is None or (layer is not None and types[layer] == "sliding_attention"):
        raise ValueError(
            f"sliding_window: None given by {type(module).__name__} though its configuration has {window}; models that "
            f"tell attention, or at most {window} keys, allowed"
        )


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """What attention gets instead of a dense mask: bool [batch, keys], or None where there is no padding.

    Of a cache of fixed size it has the columns that are filled, the last q_length of them the queries' own.
    """
    if others.get("use_vmap"):
        raise ValueError("or_mask_function, and_mask_function: a function given, None allowed")
    chunk = getattr(others.get("config"), "attention_chunk_size", None)
    if chunk is not None and others.get("local_size") == chunk and kv_length + kv_offset > chunk:
        raise ValueError(
            f"attention_chunk_size: {kv_length + kv_offset} keys in chunks of {chunk} given, one chunk allowed"
        )
    if "allow_is_bidirectional_skip" in others:  # Not causal: the keys may be other tokens than the queries.
        if attention_mask is None:
            return None
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
        return attention_mask if torch.compiler.is_compiling() or not bool(attention_mask.all()) else None
    if mask_function is not causal_mask_function and not torch.compiler.is_compiling():
        _only_causal(mask_function, batch_size, q_length, int(q_offset), others.get("device"))
    filled = int(q_offset) + q_length - kv_offset
    if attention_mask is None:
        if filled == kv_length:
            return None
        return torch.ones((batch_size, filled), dtype=torch.bool, device=others.get("device"))
    attention_mask = attention_mask[:, kv_offset : kv_offset + filled]
    if attention_mask.shape[1] != filled:
        given = attention_mask.shape[1] + kv_offset
        raise ValueError(f"attention_mask: {given} columns given, {filled + kv_offset} allowed (past and new tokens)")
    if filled == kv_length and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    return attention_mask


def _only_causal(mask_function: Callable, batch: int, q_length: int, q_offset: int, device: Any) -> None:
    """Raises where a query sees the key after its own, as in blocks of image tokens."""
    row = torch.arange(batch, device=device)[:, None]
    query = torch.arange(q_length - 1, device=device)[None] + q_offset
    later = mask_function(row, torch.zeros((), dtype=torch.int64, device=device), query, query + 1)
    if bool(later.any()):
        raise ValueError("mask: one given that shows some queries later keys, causal or full allowed (image blocks?)")
