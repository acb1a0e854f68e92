"""Microscaling flash attention on packed documents, in 8 and 4 bits, causal by proof.

Arrays of numpy, torch, cupy or jax go in and out without copies (DLPack); none of them is needed to import this.
Shapes: q [tokens_q, heads, head_dim], k [tokens_k, kv_heads, head_dim], v [tokens_k, kv_heads, value_dim], all
bfloat16, all float16 or all float32; cu_seqlens int32 [documents + 1].

    import mxflash
    o, lse = mxflash.attention(q, k, v, cu_seqlens, recipe="mxfp8")
    dq, dk, dv = mxflash.attention_backward(do, q, k, v, o, lse, cu_seqlens, recipe="mxfp8")

`mxflash.torch` has the same as a differentiable torch operator, `mxflash.transformers` as an attention of Hugging Face
transformers, `mxflash.capture` records the inputs of a running model's attention, `mxflash.audit` puts any attention
to the proof.
"""

from mxflash._attention import attention, attention_backward, exact_attention, exact_attention_backward
from mxflash._audit import Report, audit
from mxflash._files import load, save
from mxflash._lists import engines, recipe, recipes
from mxflash._native import __version__
from mxflash._quantize import Quantized, quantize

__all__ = [
    "Quantized",
    "Report",
    "__version__",
    "attention",
    "attention_backward",
    "audit",
    "engines",
    "exact_attention",
    "exact_attention_backward",
    "load",
    "quantize",
    "recipe",
    "recipes",
    "save",
]
