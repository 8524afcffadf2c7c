"""attention by the flash-attn packages. Each is imported on the first call.

Written against flash-attn 2.8.3, FlashAttention-3's flash_attn_interface and flash-attn-4 4.0.0b36. Heads lie
as this op has them, and queries are the last of S there, too.
"""

from typing import Any

import torch
from torch import Tensor

from bakeoff.attention_backends.inputs import readable, width_refused, with_ends, without_strays
from bakeoff.select.declare.case import Case

__all__ = ["flash_attn_2", "flash_attn_3", "flash_attn_4", "supports"]


def flash_attn_2(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """flash-attn 2; with `lengths` its kernels for static caches."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    return _run(functions, -1, q, k, v, causal, window, scale, cu_seqlens, lengths)


def flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlashAttention-3, for Hopper."""
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    return _run(functions, -1, q, k, v, causal, window, scale, cu_seqlens, lengths)


def flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlashAttention-4, in CuTe."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    functions = flash_attn_func, flash_attn_varlen_func, None
    return _run(functions, None, q, k, v, causal, window, scale, cu_seqlens, lengths)


def _run(
    functions: tuple[Any, Any, Any], unbounded: int | None, q: Tensor, k: Tensor, v: Tensor, causal: bool,
    window: int | None, scale: float | None, cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    dense, packed, cached = functions
    sides = (unbounded, unbounded) if window is None else (window - 1, 0)
    named: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "window_size": sides}
    q, k, v = readable(q), readable(k), readable(v)
    if cu_seqlens is not None:
        cu, T = with_ends(cu_seqlens, q.shape[1]), q.shape[1]
        rows = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": T, "max_seqlen_k": T}
        return without_strays(_first(packed(q[0], k[0], v[0], **rows, **named)), cu_seqlens)
    if lengths is not None:
        held = lengths.clamp(0, k.shape[1]).to(torch.int32)
        return _first(cached(q, k, v, cache_seqlens=held, **named))
    return _first(dense(q, k, v, **named))


def _first(made: Any) -> Tensor:
    """y; versions 3 and 4 return more beside it."""
    return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]


def supports(case: Case, name: str) -> str | None:
    """Why the package can't take `case`, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if any(meta.numel == 0 for meta in case.tensors.values()):
        return "takes no empty tensors"
    if case.lengths is not None and (name == "flash_attn_4" or case.needs_grad):
        return "has no kernel for static caches" if name == "flash_attn_4" else "has no gradients of caches"
    return width_refused(name, case.q.shape[-1], case.q.dtype)
