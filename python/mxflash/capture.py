"""Records q, k, v and dO of a running model's attention, for `mxflash run`, `mxflash audit` and everything else here.

    import mxflash.capture
    with mxflash.capture.record(model, layers=[0, 3]) as recording:
        model(input_ids, position_ids=position_ids, labels=labels, use_cache=False).loss.backward()
    recording.save("layer{layer}.safetensors")

Models of transformers are read where they call their attention, whichever it is; plain torch models where they call
scaled_dot_product_attention, on jagged tensors too (nn.MultiheadAttention calls it with need_weights=False). Nothing
changes in their results.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mxflash._documents import Dense, Documents, in_backward, of_dense, plain, rows
from mxflash._files import save as save_file

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass
class _Call:
    """One call of one layer's attention, on the host."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    scale: float
    causal: bool
    window: tuple[int | None, int | None] | None
    do: torch.Tensor | None = None


class Recording:
    """What record() saw. `layers` are the recorded ones; `recording[layer]` their tensors."""

    def __init__(self, model: torch.nn.Module, layers: Iterable[int] | None, heads: Iterable[int] | None):
        self.wanted = None if layers is None else _integers("layers", layers)
        self.heads = None if heads is None else _integers("heads", heads)
        self._model = type(model).__name__
        self._calls: dict[int, list[_Call]] = {}
        self._modules: dict[int, Any] = {}
        self._seen: set[int] = set()

    @property
    def layers(self) -> list[int]:
        return sorted(self._calls)

    def __getitem__(self, layer: int) -> dict[str, torch.Tensor]:
        """q [tokens_q, heads, dim], k, v, do (where there was a backward), and cu_seqlens, or cu_seqlens_q and _k.

        On the host, contiguous, in the model's type. Several calls of a layer follow each other as more documents.
        """
        calls = self._of(layer)
        missing = sum(call.do is None for call in calls)
        if 0 < missing < len(calls):
            raise ValueError(
                f"layer: {layer} given, whose do is known of {len(calls) - missing} of {len(calls)} calls; "
                "a recording of calls with a backward, or of calls without, allowed"
            )
        names = ("q", "k", "v") if missing else ("q", "k", "v", "do")
        tensors = {name: torch.cat([getattr(call, name) for call in calls]) for name in names}
        lengths_q = [length for call in calls for length in call.lengths_q]
        lengths_k = [length for call in calls for length in call.lengths_k]
        if lengths_q == lengths_k:
            tensors["cu_seqlens"] = _offsets(lengths_q)
        else:
            tensors["cu_seqlens_q"], tensors["cu_seqlens_k"] = _offsets(lengths_q), _offsets(lengths_k)
        return tensors

    def metadata(self, layer: int) -> dict[str, str]:
        """softmax_scale, causal, source, layer; heads where chosen; window where the layer has one (see save())."""
        call = self._of(layer)[0]
        metadata = {
            "softmax_scale": repr(call.scale),
            "causal": "true" if call.causal else "false",
            "source": f"{self._model}, layer {layer}",
            "layer": str(layer),
        }
        if self.heads is not None:
            metadata["heads"] = ",".join(map(str, self.heads))
        if call.window is not None:
            metadata["window"] = ",".join("inf" if bound is None else str(bound) for bound in call.window)
        return metadata

    def save(self, path: str | os.PathLike = "layer{layer}.safetensors") -> list[str]:
        """Writes one file a layer, `{layer}` in the path replaced, and gives the paths back.

        The file format has no window: where the model slides one, the file's metadata `window` says what to give to
        `mxflash run --window` (or `window=`).
        """
        pattern = os.fspath(path)
        if not self._seen:
            raise ValueError("recording: no attention seen, a model that ran inside the with block allowed")
        for layer in self.wanted or ():
            if layer not in self._calls:
                raise ValueError(f"layers: {layer} given, {_listed(sorted(self._seen))} allowed (those that ran)")
        if len(self._calls) > 1 and "{layer}" not in pattern:
            raise ValueError(f"path: {pattern!r} given for {len(self._calls)} layers, one with {{layer}} allowed")
        paths = {layer: pattern.replace("{layer}", str(layer)) for layer in self.layers}
        for layer, target in paths.items():
            save_file(target, self[layer], self.metadata(layer))
        return list(paths.values())

    def _of(self, layer: int) -> list[_Call]:
        if layer not in self._calls:
            raise ValueError(f"layer: {layer} given, {_listed(self.layers)} recorded")
        return self._calls[layer]

    def wants(self, layer: int) -> bool:
        """Whether this layer, which is about to run, is to be recorded."""
        self._seen.add(layer)
        return self.wanted is None or layer in self.wanted

    def add(
        self, layer: int, module: Any, tensors: tuple[torch.Tensor, ...], seen: Dense, scale: float | None
    ) -> tuple[_Call, Callable]:
        """Keeps one call's q, k, v [batch, heads, tokens, dim]; gives it and the packer of its dO."""
        if self._modules.setdefault(layer, module) is not module:
            kinds = f"{type(self._modules[layer]).__name__} and {type(module).__name__}"
            raise ValueError(f"layers: two attentions have index {layer} ({kinds}), one allowed; record its submodule")
        documents, causal, window = seen
        q, k, v = (tensor.detach() for tensor in tensors)
        if torch.is_autocast_enabled(q.device.type):  # Which then casts inside of attention.
            q, k, v = (tensor.to(torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
        types = {str(tensor.dtype) for tensor in (q, k, v)}
        if len(types) > 1 or q.dtype not in _DTYPES:
            raise ValueError(f"q, k, v: {' and '.join(sorted(types))} given, all bfloat16, float16 or float32 allowed")
        k, v = k[:, :, : documents.key_length], v[:, :, : documents.key_length]
        heads_q, heads_k = _chosen(self.heads, q.shape[1], k.shape[1])

        def pack(tensor: torch.Tensor, chosen: list[int] | None, kept: torch.Tensor | None) -> torch.Tensor:
            tensor = tensor.detach() if chosen is None else tensor.detach()[:, chosen]
            # A copy in any case: caches and gradients are written again in place.
            return rows(tensor, kept).to("cpu", q.dtype, copy=True).contiguous()

        lengths_q = _lengths(documents.offsets_q, q.shape[2])
        offsets_k = documents.offsets_q if documents.offsets_k is None else documents.offsets_k
        call = _Call(
            pack(q, heads_q, documents.queries),
            pack(k, heads_k, documents.keys),
            pack(v, heads_k, documents.keys),
            lengths_q,
            _lengths(offsets_k, documents.key_length),
            float(q.shape[3] ** -0.5 if scale is None else scale),
            causal,
            window,
        )
        calls = self._calls.setdefault(layer, [])
        for name in ("scale", "causal"):
            if calls and getattr(calls[0], name) != getattr(call, name):
                given = f"{getattr(calls[0], name)}, then {getattr(call, name)}"
                raise ValueError(f"{name}: {given} given by layer {layer}, the same in all calls allowed")
        calls.append(call)
        self._share_window(layer, calls)
        return call, lambda gradient: pack(gradient, heads_q, documents.queries)

    def _share_window(self, layer: int, calls: list[_Call]) -> None:
        """Calls whose documents are too short to show a window have that of the others."""
        windows = {call.window for call in calls if call.window is not None}
        if not windows:
            return
        window = windows.pop()
        bounds = [bound for bound in window if bound is not None]
        for call in calls:
            if windows or (call.window is None and max(call.lengths_k, default=0) > min(bounds) + 1):
                raise ValueError(f"window: one that changes between calls given by layer {layer}, the same allowed")
            call.window = window


@contextlib.contextmanager
def record(
    model: torch.nn.Module, layers: Iterable[int] | None = None, heads: Iterable[int] | None = None
) -> Iterator[Recording]:
    """Records the attention of `model` while the with block runs, and gives the Recording.

    layers: a module's layer_idx in transformers; else counted from 0 in the order of the calls, anew in each forward of
    `model`; None: all. heads: query heads, in rising order; their key/value heads come along, so that each must get as
    many of the chosen ones. None: all.

    Documents are what the attention saw: rows of the batch, padding removed, packed documents by cu_seq_lens,
    position_ids or a dense mask. Forward alone gives q, k and v; a backward inside the block adds do. What activation
    checkpointing computes again in a backward is not recorded twice.
    A file holds attention without dropout, softcap, sinks, biases, sparse keys, in bfloat16, float16 or float32: a
    model that does otherwise (float64, too) raises ValueError in its forward. Compiled models must be recorded
    uncompiled.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: a {type(model).__name__} given, a torch.nn.Module allowed")
    recording = Recording(model, layers, heads)
    handles: list[Any] = []
    counter = _Counter()

    def watch(output: torch.Tensor, call: _Call, pack: Callable) -> None:
        """Keeps the gradient of output, as pack leaves it, as the call's do; of several backwards the sum."""

        def keep(gradient: torch.Tensor) -> None:
            packed = pack(gradient)
            call.do = packed if call.do is None else call.do + packed

        if output.requires_grad:
            handles.append(output.register_hook(keep))

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [handle.remove() for handle in handles])
        handles.append(model.register_forward_pre_hook(counter.begin))
        handles.append(model.register_forward_hook(counter.end, always_call=True))
        if _of_transformers(model):
            from mxflash._capture_transformers import intercepted

            stack.enter_context(intercepted(recording, model, counter, watch))
        else:
            stack.enter_context(_Intercepted(recording, counter, watch))
        yield recording


class _Counter:
    """Numbers the calls of one forward of the model; outside of it, None: they are somebody else's."""

    def __init__(self):
        self._next, self._depth = 0, 0

    def begin(self, *_: Any) -> None:
        if not self._depth:
            self._next = 0
        self._depth += 1

    def end(self, *_: Any) -> None:
        self._depth -= 1

    def __call__(self) -> int | None:
        if not self._depth:
            return None
        self._next += 1
        return self._next - 1


class _Intercepted(TorchFunctionMode):
    """Sees scaled_dot_product_attention of any torch code."""

    def __init__(self, recording: Recording, counter: _Counter, watch: Callable):
        super().__init__()
        self._recording, self._counter, self._watch = recording, counter, watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        functional = torch.nn.functional
        if function is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(function, *args, **(kwargs or {}))
        if function is not functional.multi_head_attention_forward:
            return function(*args, **(kwargs or {}))
        # Inside of it no mode sees anything: for its time the function it calls is ours.
        original = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = lambda *a, **k: self._attention(original, *a, **k)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            functional.scaled_dot_product_attention = original

    def _attention(self, function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest) -> Any:
        layer = None if in_backward() else self._counter()
        recorded = None
        if layer is not None and self._recording.wants(layer):
            if dropout_p:
                raise ValueError(f"dropout_p: {dropout_p} given, 0 allowed (model.eval(), or a dropout of 0)")
            tensors = tuple(_four_dimensions(tensor) for tensor in (query, key, value))
            if query.is_nested:
                seen = Dense(_of_nested(query, key, attn_mask, is_causal), is_causal, None)
            else:
                seen = _seen_by_torch(tensors[0], tensors[1], attn_mask, is_causal)
            recorded = self._recording.add(layer, None, tensors, seen, rest.get("scale"))
        output = function(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        if recorded is not None:
            call, pack = recorded
            self._watch(output, call, lambda gradient: pack(_four_dimensions(gradient)))
        return output


def _four_dimensions(tensor: torch.Tensor) -> torch.Tensor:
    """[..., heads, tokens, dim] with a batch; of a nested tensor its documents one after the other, as one row."""
    if tensor.is_nested:
        if tensor.layout != torch.jagged or tensor.ndim != 4 or tensor.lengths() is not None:
            raise ValueError(
                "query, key, value: a nested tensor given, of those jagged [batch, heads, tokens, dim] allowed"
            )
        return tensor.transpose(1, 2).values().transpose(0, 1)[None]
    if tensor.ndim > 4 or tensor.ndim < 2:
        raise ValueError(f"query: {tensor.ndim} dimensions given, 2 to 4 allowed (batch, heads, tokens, dim)")
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)


def _of_nested(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> Documents:
    offsets_q, offsets_k = query.offsets().to(torch.int32), key.offsets().to(torch.int32)
    same = torch.equal(offsets_q, offsets_k)
    if mask is not None or (is_causal and not same):
        raise ValueError("attn_mask, is_causal: given for nested tensors, none, or causal with equal lengths allowed")
    return Documents(int(offsets_k[-1]), None, None, offsets_q, None if same else offsets_k)


def _seen_by_torch(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> Dense:
    batch, tokens_q, tokens_k = query.shape[0], query.shape[2], key.shape[2]
    if mask is not None:
        return of_dense(mask, batch, tokens_q, tokens_k)
    if is_causal and tokens_q != tokens_k:
        raise ValueError(
            f"is_causal: {tokens_q} queries on {tokens_k} keys given, as many allowed (ours align at the end)"
        )
    return Dense(plain(batch, tokens_q, tokens_k, query.device), is_causal, None)


def _of_transformers(model: torch.nn.Module) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and any(isinstance(module, library.PreTrainedModel) for module in model.modules())


def _chosen(heads: list[int] | None, heads_q: int, heads_k: int) -> tuple[list[int] | None, list[int] | None]:
    """The query heads and key/value heads to keep."""
    if heads is None:
        return None, None
    if heads[-1] >= heads_q:
        raise ValueError(f"heads: {heads[-1]} given, 0 to {heads_q - 1} allowed")
    group = heads_q // heads_k
    taken: dict[int, int] = {}
    for head in heads:
        taken[head // group] = taken.get(head // group, 0) + 1
    if len(set(taken.values())) > 1:
        shares = ", ".join(f"{count} of key/value head {head}" for head, count in taken.items())
        raise ValueError(f"heads: {_listed(heads)} given ({shares}), as many of each key/value head allowed")
    return heads, list(taken)


def _integers(name: str, values: Iterable[int]) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    right = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
    if not values or not right or values != sorted(set(values)):
        raise ValueError(f"{name}: {values} given, integers from 0 in rising order, or None (all) allowed")
    return values


def _lengths(offsets: torch.Tensor | None, tokens: int) -> list[int]:
    return [tokens] if offsets is None else offsets.diff().tolist()


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"
