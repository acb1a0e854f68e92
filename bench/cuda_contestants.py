"""Who is compared on a GPU, each made for one pack, and what is right. Whoever cannot take part says why."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cuda_report import HEADS

DIM = 128
# Rows of a document that are checked: its first, its middle and its last ones.
ROWS = 64
DOCUMENTS = 8


class AbsentError(Exception):
    """Why a contestant does not take part."""


def package(module, wheel):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AbsentError(f"package {wheel} does not load ({error})") from None


def as_is(tensor):
    return tensor


@dataclass
class Contestant:
    """Attention of one pack, with tensors that lie as it likes them best."""

    attend: Callable[..., torch.Tensor]  # (q, k, v) -> o
    inputs: list[torch.Tensor]
    to_pack: Callable[[torch.Tensor], torch.Tensor] = as_is  # Any of the four as [tokens, heads, dims].
    from_pack: Callable[[torch.Tensor], torch.Tensor] = as_is  # The other way.
    factor: float = 1.0  # What o is multiplied by.
    phases: tuple[str, ...] = ("forward", "backward", "training")

    def call(self, phase: str, do: torch.Tensor) -> Callable[[], object]:
        """What is timed. forward: without gradients, o. backward: after a forward, the gradients. training: both."""
        if phase == "forward":
            return torch.no_grad()(lambda: self.attend(*self.inputs))
        leaves = [tensor.detach().requires_grad_() for tensor in self.inputs]
        do = self.from_pack(do)
        if phase == "training":
            return lambda: torch.autograd.grad(self.attend(*leaves), leaves, do)
        o = self.attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def heads_first(tensor):
    """[tokens, heads, dims] as [1, heads, tokens, dims], and back."""
    return tensor.transpose(0, 1)[None] if tensor.ndim == 3 else tensor[0].transpose(0, 1)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def largest(errors):
    """NaN is larger than anything."""
    return max(errors, key=lambda error: float("inf") if error[0] != error[0] else error[0])


class Pack:
    """Random BF16 tensors [tokens, heads, dims] of one packing, and what is right for some of the rows and heads."""

    def __init__(self, lengths, kv_heads, causal):
        self.lengths, self.kv_heads, self.causal, self.tokens = lengths, kv_heads, causal, sum(lengths)
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, DIM), (HEADS, DIM))
        self.q, self.k, self.v, self.do = (
            torch.randn(self.tokens, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)
            for shape in shapes
        )
        self.offsets = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def tensors(self):
        return [self.q, self.k, self.v]

    def to_dense(self, tensor):
        """As [documents, heads, length, dims]."""
        if len(set(self.lengths)) != 1:
            raise AbsentError("takes documents of one length")
        return tensor.view(len(self.lengths), self.lengths[0], -1, DIM).transpose(1, 2)

    def from_dense(self, tensor):
        return tensor.transpose(1, 2).reshape(self.tokens, -1, DIM)

    def repeated(self):
        """k and v with a head for each of q."""
        return [x.repeat_interleave(HEADS // self.kv_heads, 1).contiguous() for x in (self.k, self.v)]

    def _checked(self):
        """The shortest and the longest document and some between."""
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        return {order[round(i * (len(order) - 1) / (DOCUMENTS - 1))] for i in range(DOCUMENTS)}

    def _exact(self, document, head):
        """(rows of the pack, head, their attention in float64)."""
        begin, length = sum(self.lengths[:document]), self.lengths[document]
        middle = length // 2
        parts = (range(ROWS), range(middle, middle + ROWS), range(length - ROWS, length))
        rows = torch.tensor(sorted({row for part in parts for row in part if 0 <= row < length}), device="cuda")
        kv = head // (HEADS // self.kv_heads)
        q, k, v = (x[begin : begin + length, h].double() for x, h in ((self.q, head), (self.k, kv), (self.v, kv)))
        scores = q[rows] @ k.T / DIM**0.5
        if self.causal:
            scores.masked_fill_(torch.arange(length, device="cuda") > rows[:, None], -torch.inf)
        return begin + rows, head, scores.softmax(-1) @ v

    def _exact_gradients(self, document, kv):
        """(dq, dk, dv) of a document in one head of k and v and those of q that it serves, in float64."""
        begin, group = sum(self.lengths[:document]), HEADS // self.kv_heads
        rows, heads = slice(begin, begin + self.lengths[document]), range(kv * group, (kv + 1) * group)
        k, v = self.k[rows, kv].double(), self.v[rows, kv].double()
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for head in heads:
            q, do = self.q[rows, head].double(), self.do[rows, head].double()
            weights = q @ k.T / DIM**0.5
            if self.causal:
                weights.masked_fill_(torch.ones_like(weights, dtype=torch.bool).triu_(1), -torch.inf)
            weights = weights.softmax(-1)
            dv += weights.T @ do
            slopes = do @ v.T
            slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) / DIM**0.5
            dq.append(slopes @ k)
            dk += slopes.T @ q
        return torch.stack(dq, 1), dk, dv

    @functools.cached_property
    def _truth(self):
        return [self._exact(document, head) for document in self._checked() for head in (0, HEADS - 1)]

    @functools.cached_property
    def _true_gradients(self):
        """(rows, head of k and v, its gradients): whole documents, in the first and the last of these heads."""
        checked = [(document, kv) for document in self._checked() for kv in {0, self.kv_heads - 1}]
        begins = [sum(self.lengths[:document]) for document, _ in checked]
        return [
            (slice(begin, begin + self.lengths[document]), kv, self._exact_gradients(document, kv))
            for begin, (document, kv) in zip(begins, checked, strict=True)
        ]

    def worst(self, contestant):
        """(the largest relative L2 error of o over the documents and heads that are checked, where)."""
        o = contestant.to_pack(contestant.call("forward", self.do)())
        o = o.float().reshape(self.tokens, HEADS, DIM) / contestant.factor
        return largest(
            (relative(o[rows, head], want), f"rows from {rows[0].item()}, head {head}")
            for rows, head, want in self._truth
        )

    def worst_gradient(self, contestant):
        """The same of dq, dk and dv."""
        dq, dk, dv = (contestant.to_pack(x) for x in contestant.call("training", self.do)())
        # Of k and v that were repeated: added up over the heads that are one.
        dk, dv = (x.float().reshape(self.tokens, self.kv_heads, -1, DIM).sum(2) for x in (dk, dv))
        group, errors = HEADS // self.kv_heads, []
        for rows, kv, truth in self._true_gradients:
            got = dq[rows, kv * group : (kv + 1) * group], dk[rows, kv], dv[rows, kv]
            for name, a, b in zip(("dq", "dk", "dv"), got, truth, strict=True):
                errors.append((relative(a, b), f"{name} of rows from {rows.start}, kv head {kv}"))
        return largest(errors)


def mxflash(recipe, deterministic=True):
    def make(pack):
        from mxflash.torch import attention

        def attend(q, k, v):
            settings = {"recipe": recipe, "causal": pack.causal, "deterministic": deterministic}
            return attention(q, k, v, pack.offsets, **settings)

        contestant = Contestant(attend, pack.tensors())
        if not deterministic:
            contestant.phases = ("backward", "training")  # The forward is the same.
        return contestant

    return make


def varlen(pack):
    function = package("torch.nn.attention.varlen", "torch").varlen_attn
    longest = max(pack.lengths)
    # The mask's argument has had two names.
    named = "is_causal" in inspect.signature(function).parameters
    settings = {"is_causal": pack.causal} if named else {"window_size": (-1, 0 if pack.causal else -1)}
    # Grouped heads are taken by later versions only.
    groups = "enable_gqa" in inspect.signature(function).parameters
    if groups:
        settings["enable_gqa"] = pack.kv_heads != HEADS
    return Contestant(
        lambda q, k, v: function(q, k, v, pack.offsets, pack.offsets, longest, longest, **settings),
        pack.tensors() if groups else [pack.q, *pack.repeated()],
    )


def flex(pack):
    documents = torch.arange(len(pack.lengths), device="cuda")
    document = documents.repeat_interleave(torch.tensor(pack.lengths, device="cuda"))

    def full(_batch, _head, query, key):
        return document[query] == document[key]

    def causal(_batch, _head, query, key):
        return (document[query] == document[key]) & (query >= key)

    dynamo_config.recompile_limit = 64  # It compiles a function so many times, and then no more: here once a shape.
    functorch_config.donated_buffer = False  # A backward is run more than once here.
    mask = causal if pack.causal else full
    # Not compiled: a mask of all pairs fits the device for a moment, and compiling takes longer than everything else.
    block_mask = create_block_mask(mask, None, None, pack.tokens, pack.tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = pack.kv_heads != HEADS
    return Contestant(
        lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa),
        [heads_first(x).contiguous() for x in pack.tensors()],
        heads_first,
        lambda x: heads_first(x).contiguous(),
    )


def flash4(pack):
    function = package("flash_attn.cute", "flash-attn-4").flash_attn_varlen_func
    longest = max(pack.lengths)
    settings = {
        "cu_seqlens_q": pack.offsets,
        "cu_seqlens_k": pack.offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": pack.causal,
    }

    def attend(q, k, v):
        out = function(q, k, v, **settings)
        return out[0] if isinstance(out, tuple) else out

    return Contestant(attend, pack.tensors())


def cudnn(pack):
    gqa = pack.kv_heads != HEADS

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=pack.causal, enable_gqa=gqa)

    inputs = [pack.to_dense(x) for x in pack.tensors()]
    # dO lies as o does: [documents, length, heads, dims] in memory.
    return Contestant(attend, inputs, pack.from_dense, pack.to_dense)


def cudnn_fp8(pack):
    """Forward only. One scale a tensor; making the codes is not in it. O in E4M3: cuDNN 9.19 has no other on Hopper."""
    dense = [pack.to_dense(x) for x in pack.tensors()]
    library = package("cudnn", "nvidia-cudnn-frontend")
    real, e4m3 = library.data_type.FLOAT, library.data_type.FP8_E4M3
    scales = [x.abs().amax().float() / 448 for x in dense]
    # Weights are at most 1 and values of O at most V's: E4M3 holds 448.
    weights, result = (torch.tensor(factor, device="cuda") for factor in (256.0, 64.0))
    factors = [*scales, 1 / weights, weights, result]
    codes = [(x / scale).to(torch.float8_e4m3fn) for x, scale in zip(dense, scales, strict=True)]
    o = torch.empty_like(codes[0])
    largest = torch.empty((2, 1, 1, 1, 1), device="cuda")  # Of S and O; cuDNN wants to write them.

    handle = library.create_handle()
    library.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = library.pygraph(io_data_type=e4m3, intermediate_data_type=real, compute_data_type=real, handle=handle)
    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    inputs = [graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=e4m3) for x in codes]
    scalars = [graph.tensor(**one, data_type=real) for _ in factors]
    names = ("q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    out, _, *maxima = graph.sdpa_fp8(
        **dict(zip(names, inputs + scalars, strict=True)),
        generate_stats=False,
        attn_scale=DIM**-0.5,
        use_causal_mask=pack.causal,
    )
    out.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride())).set_data_type(e4m3)
    for maximum in maxima:
        maximum.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(real)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except (RuntimeError, library.cudnnGraphNotSupportedError) as error:
        raise AbsentError(f"cuDNN has no plan for it ({str(error).splitlines()[0]})") from None
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    handed = dict(zip([*inputs, *scalars, out, *maxima], [*codes, *factors, o, *largest], strict=True))

    def attend():
        graph.execute(handed, workspace, handle=handle)
        return o

    return Contestant(attend, [], pack.from_dense, factor=result.item(), phases=("forward",))


# (how it is made, its largest relative L2 error). BF16 rounds by 2^-9 of a value. E4M3 rounds by about 2.6 % of a value
# (2^-4 at most), and q, k, v and the weights each do, so that 5 % of O are its due.
PEERS = {
    "torch varlen": (varlen, 1e-2),
    "FlexAttention": (flex, 1e-2),
    "FlashAttention 4": (flash4, 1e-2),
    "cuDNN": (cudnn, 1e-2),
    "cuDNN FP8, codes made": (cudnn_fp8, 8e-2),
}
# Those whose first call compiles for longer than everybody's times take, and that keep the result in files.
COMPILED = ("FlexAttention", "FlashAttention 4")
