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
    Method,
    Terms,
    chunked_op,
    default_rows,
    sums_are_wide,
)

__all__ = ["Tiling", "default", "linear_cross_entropy"]

_rows_kernel = TritonKernel(kernels._rows)
_finish_kernel = TritonKernel(kernels._finish)
_multiply_kernel = TritonKernel(kernels._multiply)

_BUDGET = 1 << 28  # bytes of a chunk's logits
_WHOLE = 16384  # a row that is read once
_PIECE = 8192  # of a longer one
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


def default(N: int, V: int, D: int, dtype: torch.dtype) -> Tiling:
    """For N rows, V classes and D features."""
    rows = default_rows(N, V, dtype.itemsize, _BUDGET)
    block = max(64, triton.next_power_of_2(V)) if V <= _WHOLE else _PIECE
    return Tiling(rows, int(sums_are_wide(N, V, D, rows, dtype)), block, max(1, min(16, block // 512)))


def tilings(case: Any) -> list[Tiling]:
    """The default, other blocks, chunks of half as many rows, and float32 sums."""
    V, D = case.weight.shape
    N, dtype = case.target.numel, case.x.dtype
    first = default(N, V, D, dtype)
    found = [first]
    if V > _WHOLE:
        found += [first._replace(block=4096, warps=8), first._replace(warps=8)]
    elif first.warps > 1:
        found.append(first._replace(warps=first.warps // 2))
    half = max(first.rows // 2, 1)
    found.append(first._replace(rows=half, wide=int(sums_are_wide(N, V, D, half, dtype))))
    return list(dict.fromkeys([*found, first._replace(wide=1)]))


def rows(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scale: Tensor,
    terms: Terms,
    gradients: bool,
    tiling: Tiling,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.chunks.Method`."""
    _rows_kernel(
        (logits.shape[0],),
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
        V=logits.shape[1],
        BLOCK=tiling.block,
        SMOOTH=terms.label_smoothing > 0,
        CAP=terms.softcap > 0,
        GRADIENTS=gradients,
        num_warps=tiling.warps,
    )


def finish(
    losses: Tensor,
    target: Tensor,
    terms: Terms,
    reduction: str,
    share: float,
    loss: Tensor,
    factor: Tensor | None,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.chunks.Method`."""
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
    chunked_op("linear_cross_entropy", Method(rows, finish, multiply, default), Tilings(Tiling, tilings))
)
"""For float16, bfloat16 and float32."""
