"""What attention kernels need of their inputs, and don't check themselves."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

__all__ = [
    "differentiable",
    "exact",
    "laid_as",
    "readable",
    "shares",
    "watched",
    "width_refused",
    "with_ends",
    "without_strays",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_WIDEST = {"cudnn": 128, "efficient": 1 << 16, "flash_attn_4": 128}
"""The widest heads that a back end takes, where these aren't 256."""


def readable(x: Tensor) -> Tensor:
    """x, or a dense copy where kernels that read 16 bytes at a time would fault: they don't look where x
    begins, nor how far apart its rows are."""
    *outer, inner = x.stride()
    step = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and inner == 1 and all(stride and stride % step == 0 for stride in outer):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def differentiable(y: Tensor) -> Tensor:
    """y, made by such a kernel, whose gradient then comes laid out as y is, and readable 16 bytes at a time.

    Backwards don't look at that either. cuDNN's plans are kept by the strides of q, k and v alone: a gradient
    that lies in another way is read at the wrong places. Inside torch.compile layouts are its own affair.
    """
    if y.requires_grad and not is_compiling():
        y.register_hook(partial(_with_strides, y.stride()))
    return y


def _with_strides(strides: tuple[int, ...], x: Tensor) -> Tensor:
    if x.stride() == strides and x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def laid_as(q: Tensor, x: Tensor) -> Tensor:
    """x with the strides that a new tensor like q has."""
    like = torch.empty_like(q, device="meta", dtype=x.dtype).stride()
    if x.stride() == like:
        return x
    return torch.empty_strided(x.shape, like, dtype=x.dtype, device=x.device).copy_(x)


def exact(function: Function) -> Function:
    """`function` of q and more, with products in the dtypes it names: autocast would round its scores."""

    @wraps(function)
    def run(q: Tensor, *rest: Any, **named: Any) -> Any:
        if q.is_meta or not torch.is_autocast_enabled(q.device.type):
            return function(q, *rest, **named)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *rest, **named)

    return cast("Function", run)


def with_ends(cu_seqlens: Tensor, T: int) -> Tensor:
    """The borders with what stands before the first and behind the last as two documents more: kernels write
    nothing for positions outside all documents. What lies beyond T is cut off."""
    cu = cu_seqlens.clamp(0, T).to(torch.int32)
    return torch.cat([torch.zeros_like(cu[:1]), cu, torch.full_like(cu[:1], T)])


def without_strays(y: Tensor, cu_seqlens: Tensor) -> Tensor:
    """y [T, H, D] as [1, T, H, D], 0 outside all documents."""
    t = torch.arange(y.shape[0], device=y.device)
    stray = (t < cu_seqlens[0]) | (t >= cu_seqlens[-1])
    return y.masked_fill(stray[:, None, None], 0.0)[None]


def shares(q: Tensor, k: Tensor) -> bool:
    """Whether heads of q [B, T, H, D] share those of k. Comparing sizes that torch.compile keeps open gives a
    symbol; this is a flag."""
    shared = False
    if q.shape[2] != k.shape[2]:
        shared = True
    return shared


def watched() -> bool:
    """Whether torch.jit.trace or a transform of torch.func looks on: only the definition will do for them."""
    return torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()


def width_refused(name: str, D: int, dtype: torch.dtype) -> str | None:
    """Why the back end `name` can't take heads that are D wide in this dtype, or None."""
    half = dtype in (torch.float16, torch.bfloat16)
    if not half and (name != "efficient" or dtype != torch.float32):
        return f"takes float16 and bfloat16, not {dtype}"
    limit, step = _WIDEST.get(name, 256), 8 if half else 4
    if limit < D or D % step:
        return f"takes heads up to {limit} wide, in steps of {step}, not {D}"
    return None
