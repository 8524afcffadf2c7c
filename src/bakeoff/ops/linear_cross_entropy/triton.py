"""The ``triton`` candidate of linear_cross_entropy: PyTorch's products and one kernel between them."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.linear_cross_entropy import kernels
from bakeoff.ops.linear_cross_entropy.chunks import (
    Chunked,
    chunked_op,
    classes_at_once,
    default_rows,
    sums_are_wide,
)
from bakeoff.ops.linear_cross_entropy.method import Method, Terms

__all__ = ["Tiling", "default", "linear_cross_entropy"]

_short_kernel = TritonKernel(kernels._short)
_long_kernel = TritonKernel(kernels._long)
_part_kernel = TritonKernel(kernels._part)
_slopes_kernel = TritonKernel(kernels._part_slopes)
_finish_kernel = TritonKernel(kernels._finish)
_multiply_kernel = TritonKernel(kernels._multiply)

_BUDGET = 1 << 28  # bytes of a chunk's logits
_BLOCK_BUDGET = 1 << 27  # bytes of a block of classes, beside which there are float32 sums of x's gradient
_WHOLE = 16384  # a row that is read once
_TILE = 8192  # of a longer one
_FEW = 2048  # elements that a program has, or fewer, where rows are short
_FINISH = 4096  # losses that are added up at a time


class Tiling(NamedTuple):
    """How rows are cut, and how the kernel is launched."""

    rows: int
    """Of a chunk."""
    wide: int
    """1: the weight's gradient is summed up over chunks in float32, else in its own dtype."""
    block: int
    """Classes that a program reads at a time."""
    warps: int
    each: int = 1
    """Rows that a program has, where `block` holds a row."""
    classes: int = 0
    """Above 0: the weight's gradient is made in blocks of so many classes of all rows, not in chunks."""
    head: int = 0
    """Above 0: only that of so many rows, to which chunks of the others are added."""


def default(N: int, V: int, D: int, dtype: torch.dtype) -> Tiling:
    """For N rows, V classes and D features."""
    rows = default_rows(N, V, dtype.itemsize, _BUDGET)
    block = max(64, triton.next_power_of_2(V)) if V <= _WHOLE else _TILE
    each = max(1, min(_FEW // block, triton.next_power_of_2(rows)))
    return Tiling(
        rows,
        int(sums_are_wide(N, V, D, rows, dtype)),
        block,
        max(1, min(16, each * block // 512)),
        each,
        classes_at_once(N, V, D, rows, dtype, _BLOCK_BUDGET),
    )


def tilings(case: Any) -> list[Tiling]:
    """The default, other blocks or numbers of rows a program, chunks of half as many rows, float32 sums, and
    chunks for some or all rows instead of blocks of classes."""
    V, D = case.weight.shape
    N, dtype = case.target.numel, case.x.dtype
    first = default(N, V, D, dtype)
    found = [first]
    if V > _WHOLE:
        found += [first._replace(block=4096, warps=8), first._replace(block=16384, warps=32)]
        if V <= 2 * _WHOLE and not (case.label_smoothing or case.softcap):  # else registers run out
            found.append(first._replace(block=2 * _WHOLE, warps=32))
    else:
        if first.warps > 1:
            found.append(first._replace(warps=first.warps // 2))
        if first.block < _FEW:
            found.append(first._replace(each=2 * first.each, warps=min(2 * first.warps, 8)))
    if first.classes:
        found += [first._replace(head=max(D // 64, 1) * 64), first._replace(classes=0)]
    half = max(first.rows // 2, 1)
    wide = int(sums_are_wide(N, V, D, half, dtype))
    found += [first._replace(rows=half, wide=wide, classes=0), first._replace(wide=1, classes=0)]
    return list(dict.fromkeys(found))


def rows(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scale: Tensor,
    terms: Terms,
    gradients: bool,
    tiling: Tiling,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N, V = logits.shape
    short = tiling.block >= V
    programs = triton.cdiv(N, tiling.each) if short else N
    cut: dict[str, Any] = {"N": N, "ROWS": tiling.each} if short else {"TAIL": _tail(V, tiling.block)}
    kernel = _short_kernel if short else _long_kernel
    kernel(
        (programs,),
        logits=logits,
        target=target.contiguous(),
        losses=losses,
        scale=scale,
        row_units=logits.stride(0) // kernels.PADDED.value,
        scale_step=scale.stride(0),
        ignore_index=terms.ignore_index,
        smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        softcap=terms.softcap,
        V=V,
        BLOCK=tiling.block,
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        GRADIENTS=gradients,
        num_warps=tiling.warps,
        **cut,
    )


def part(
    logits: Tensor, target: Tensor, begin: int, state: Tensor, first: bool, terms: Terms, tiling: Tiling
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N, V = logits.shape
    block, warps = _cut(V, tiling)
    _part_kernel(
        (N,),
        logits=logits,
        target=target,
        state=state,
        row_units=logits.stride(0) // kernels.PADDED.value,
        begin=begin,
        N=N,
        ignore_index=terms.ignore_index,
        softcap=terms.softcap,
        V=V,
        BLOCK=block,
        TAIL=_tail(V, block),
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        FIRST=first,
        num_warps=warps,
    )


def slopes(
    logits: Tensor,
    target: Tensor,
    begin: int,
    most: Tensor,
    weights: Tensor,
    factors: Tensor,
    V: int,
    terms: Terms,
    tiling: Tiling,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N, here = logits.shape
    block, warps = _cut(here, tiling)
    _slopes_kernel(
        (N,),
        logits=logits,
        target=target,
        mosts=most,
        weights=weights,
        factors=factors,
        row_units=logits.stride(0) // kernels.PADDED.value,
        begin=begin,
        ignore_index=terms.ignore_index,
        even=terms.label_smoothing / V,
        rest=1.0 - terms.label_smoothing,
        softcap=terms.softcap,
        V=here,
        BLOCK=block,
        TAIL=_tail(here, block),
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        num_warps=warps,
    )


def _tail(V: int, block: int) -> int:
    """The tile of what is left of V behind whole blocks."""
    return max(64, int(triton.next_power_of_2(V % block)))


def _cut(V: int, tiling: Tiling) -> tuple[int, int]:
    """Block and warps for a row's part of V classes."""
    block = min(tiling.block, max(64, int(triton.next_power_of_2(V))))
    return block, max(1, tiling.warps * block // tiling.block)


def finish(
    losses: Tensor,
    target: Tensor,
    terms: Terms,
    reduction: str,
    share: float,
    loss: Tensor,
    factor: Tensor | None,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    N = losses.numel()
    _finish_kernel(
        (1,),
        losses=losses,
        target=target.contiguous(),
        loss=loss,
        factor=loss if factor is None else factor,
        ignore_index=terms.ignore_index,
        share=share,
        N=N,
        MEAN=reduction == "mean",
        FACTOR=factor is not None,
        BLOCK=max(128, min(_FINISH, triton.next_power_of_2(N))),
        num_warps=8,
    )


def multiply(kept: Tensor, dloss: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = kept * dloss * factor, where out may be kept."""
    N = out.numel()
    if N:
        block = 2048
        _multiply_kernel(
            (triton.cdiv(N, block),), kept=kept, dloss=dloss, factor=factor, out=out, N=N, BLOCK=block,
            SAME=out is kept, num_warps=4,
        )  # fmt: skip


linear_cross_entropy = Chunked(
    chunked_op(
        "linear_cross_entropy",
        Method(rows, part, slopes, finish, multiply, default),
        Tilings(Tiling, tilings),
    )
)
"""For float16, bfloat16 and float32."""
