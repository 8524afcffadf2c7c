"""attention by one of PyTorch's kernels, called by name: without the look at what else there is, and without
the switches that `sdpa_kernel` sets and puts back, which take the host longer than the call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bakeoff.attention_backends.flex import flex_refused
from bakeoff.attention_backends.inputs import (
    differentiable,
    exact,
    readable,
    shares,
    width_refused,
    with_ends,
    without_strays,
)
from bakeoff.modes import kept_tensors
from bakeoff.ops.attention.plain import planned
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.compiled import compiled, compiler_missing

__all__ = ["cudnn", "efficient", "flash", "flex", "flex_flash", "flex_supports", "math", "supports"]

_SCORES = 1 << 30  # that `math` may hold at a time
aten = torch.ops.aten


def _given(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As kernels can read them. Tensors of a trace have no address; torch.compile aligns its own."""
    return tensors if is_compiling() else tuple(map(readable, tensors))


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlashAttention 2 as PyTorch has it: windows and packed rows, too; queries are the last of S."""
    q, k, v = _given(q, k, v)
    T, S = q.shape[1], k.shape[1]
    sides: dict[str, Any] = {"scale": scale}
    if window is not None:
        sides |= {"window_size_left": window - 1, "window_size_right": 0}
    if cu_seqlens is None:
        return differentiable(
            aten._flash_attention_forward(q, k, v, None, None, T, S, 0.0, causal, False, **sides)[0]
        )
    cu = with_ends(cu_seqlens, T)
    y = aten._flash_attention_forward(q[0], k[0], v[0], cu, cu, T, T, 0.0, causal, False, **sides)[0]
    return without_strays(differentiable(y), cu_seqlens)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """cuDNN's attention."""
    q, k, v = (x.transpose(1, 2) for x in _given(q, k, v))
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    y = aten._scaled_dot_product_cudnn_attention(q, k, v, None, recorded, 0.0, causal, scale=scale)[0]
    return differentiable(y).transpose(1, 2)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """The memory-efficient kernels, which take float32 and don't share heads."""
    G = q.shape[2] // k.shape[2]
    if G > 1:
        k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
    q, k, v = (x.transpose(1, 2) for x in _given(q, k, v))
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    y = aten._scaled_dot_product_efficient_attention(q, k, v, None, recorded, 0.0, causal, scale=scale)[0]
    return differentiable(y).transpose(1, 2)


@exact
def math(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Matrix products with all scores in memory."""
    shared = shares(q, k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = aten._scaled_dot_product_attention_math(
        q, k, v, None, 0.0, causal, None, scale=scale, enable_gqa=shared
    )[0]
    return y.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def _whole(case: Case) -> bool:
    """Whether all of S is seen, or with `causal` what a mask that begins at the top left shows."""
    plain = case.window is None and case.cu_seqlens is None and case.lengths is None
    return plain and (not case.causal or case.q.shape[1] == case.k.shape[1])


def supports(case: Case, name: str) -> str | None:
    """Why the back end `name` can't take `case`, or None."""
    (_, T, H, D), S = case.q.shape, case.k.shape[1]
    if name == "math":
        if not _whole(case):
            return "takes whole rows, without windows, documents or lengths"
        large = case.q.shape[0] * H * T * S > _SCORES
        return f"would hold {case.q.shape[0] * H * T * S:,} scores" if large else None
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if any(meta.numel == 0 for meta in case.tensors.values()):
        return "takes no empty tensors"
    if case.lengths is not None:
        return "takes no lengths"
    if name != "flash" and not _whole(case):
        return "takes whole rows, without windows and documents"
    if name == "cudnn" and not planned(T, S):
        return (
            f"plans anew for every length, so it is given whole rows of lengths in steps of 64 alone, not "
            f"{T} queries and {S} keys"
        )
    return width_refused(name, D, case.q.dtype)


# FlexAttention ------------------------------------------------------------------------------------------


def _flexible(
    mask: BlockMask | None, scale: float | None, options: str, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    shared = shares(q, k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    chosen: Any = {"BACKEND": options} if options else None
    y = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=shared, kernel_options=chosen)
    return y.transpose(1, 2).contiguous()


_flexed = compiled(_flexible)


@kept_tensors(maxsize=64)
def _blocks(T: int, S: int, window: int, device: torch.device) -> BlockMask:
    """Which blocks there are to look at for the last T of S positions; a window of 0 is none."""

    def there(b: Any, h: Any, t: Any, s: Any) -> Any:
        return (s <= t + (S - T)) & (s > t + (S - T) - (window or T + S))

    return create_block_mask(there, None, None, T, S, device=str(device))


def _flex(
    options: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    del cu_seqlens, lengths
    mask = _blocks(q.shape[1], k.shape[1], window or 0, q.device) if causal else None
    return _flexed(mask, scale, options, q, k, v)  # type: ignore[no-any-return]


@exact
def flex(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlexAttention in Triton."""
    return _flex("", q, k, v, causal, window, scale, cu_seqlens, lengths)


@exact
def flex_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlexAttention through FlashAttention 4, in CuTe."""
    return _flex("FLASH", q, k, v, causal, window, scale, cu_seqlens, lengths)


def flex_supports(case: Case, backend: str = "") -> str | None:
    """Why FlexAttention can't take `case`, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if case.cu_seqlens is not None or case.lengths is not None:
        return "makes a mask on the host, which documents and lengths would have to be copied to"
    if case.q.dtype == torch.float64:
        return "takes no float64"
    if case.q.shape[1] < 128 and case.q.shape[1] != case.k.shape[1]:
        return "compiles for every length, so it is given no row that grows"
    return flex_refused(backend, case.q.dtype) or compiler_missing(case)
