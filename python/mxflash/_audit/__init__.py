"""The audit of any attention: does anything reach where it must not?"""

from typing import Any

from mxflash._attention import mask_of
from mxflash._audit.report import Check, Report

__all__ = ["Check", "Report", "audit"]


def audit(
    fn: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any = None,
    *,
    cu_seqlens_k: Any = None,
    do: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    backward: Any = None,
    probes: int = 64,
    reach: int = 0,
    seed: int = 0,
    name: str | None = None,
    progress: Any = None,
) -> Report:
    """Audits `fn(q, k, v, cu_seqlens)`, any attention of packed documents; docs/auditing.md says what each check is.

    fn returns o [tokens_q, heads, value_dim] or (o, lse [tokens_q, heads]). It is called some dozens of times, with new
    arrays of q's framework, type and device: shapes as given, contiguous, cu_seqlens int32. With cu_seqlens_k it is
    called as fn(q, k, v, cu_seqlens, cu_seqlens_k). causal, window and scale say what fn computes; they are not passed
    to it.

    q [tokens_q, heads, head_dim], k [tokens_k, kv_heads, head_dim], v [tokens_k, kv_heads, value_dim]: bfloat16,
    float16 or float32. cu_seqlens: int32 offsets or a list, None: one document.
    backward: None audits the gradients by torch.autograd where o of torch has them; True demands them; False leaves
    them out; a function (do, q, k, v, cu_seqlens[, cu_seqlens_k]) -> (dq, dk, dv) makes them in any framework.
    do: the gradient of o, None: random normal values. probes: later tokens to change, over all documents, rounded up
    to whole rounds of one a document, at least ten. reach: how many tokens back a later one may be felt: 0, or 31 where
    fn claims no more than to be causal by blocks of 32. name: fn's, for the report. progress: called with the share
    done.

    What fn raises goes through. ValueError for arguments, for results of a wrong shape, and where backward is True and
    fn cannot be differentiated. Needs numpy.
    """
    from mxflash._audit.run import Auditor
    from mxflash._audit.subject import Subject

    if not callable(fn):
        raise ValueError(f"fn: {fn!r} given, a function of (q, k, v, cu_seqlens) allowed")
    if not isinstance(probes, int) or probes < 1:
        raise ValueError(f"probes: {probes!r} given, an integer from 1 allowed")
    if not isinstance(reach, int) or reach < 0:
        raise ValueError(f"reach: {reach!r} given, an integer from 0 allowed")
    if progress is not None and not callable(progress):
        raise ValueError(f"progress: {progress!r} given, a function of the share done or None allowed")
    subject = Subject(fn, q, k, v, do, cu_seqlens, cu_seqlens_k, mask_of(causal, window), scale, backward, seed)
    return Auditor(subject, probes, reach, seed, progress).run(name or getattr(fn, "__name__", type(fn).__name__))
