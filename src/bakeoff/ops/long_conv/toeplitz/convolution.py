"""The `toeplitz` candidate of long_conv: products with Toeplitz matrices on rows of time."""

import torch
from torch import Tensor

from bakeoff.channel_major.rows import Rows
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.long_conv.declaration import long_conv_op
from bakeoff.ops.long_conv.on_rows import planners
from bakeoff.ops.long_conv.toeplitz import kernels
from bakeoff.ops.long_conv.toeplitz.kernels import (
    BLOCK,
    COPIES,
    GATHER_SIZE,
    SHIFT_WIDTH,
    BackwardTiling,
    Tiling,
)

__all__ = ["toeplitz"]

_shift = TritonKernel(kernels._shift)
_convolve = TritonKernel(kernels._convolve)
_correlate = TritonKernel(kernels._correlate)
_gather = TritonKernel(kernels._gather)


def convolve(
    plan: Plan,
    x: Rows,
    h: Tensor,
    skip: Tensor | None,
    y: Rows,
    T: int,
    *,
    backwards: bool,
    tiling: Tiling | BackwardTiling | None,
) -> None:
    """y = h * x (correlated with h if `backwards`) + skip x."""
    del T
    B, C, R = x.shape
    blocks = R // BLOCK
    L = min(h.shape[1], R)
    lags = min((L + BLOCK - 2) // BLOCK + 1, blocks)
    width = (lags + 2) * BLOCK
    parts = 1 if h.dtype == x.dtype or x.dtype == torch.float32 else 2
    copies = plan.empty((C, parts, COPIES, width), x.dtype)
    skip = None if skip is None else plan.contiguous(skip)
    tiles = -(-width // SHIFT_WIDTH)
    plan.launch(
        _shift, (C * tiles,),
        h=h, copies=copies, L=L, W=width, tiles=tiles, h_c=h.stride(0), h_l=h.stride(1),
        BACKWARDS=backwards, PARTS=parts, BLOCK=BLOCK, COPIES=COPIES, WIDTH=SHIFT_WIDTH, num_warps=4,
    )  # fmt: skip
    numbers = kernels.products(blocks * B, x.dtype, tiling)
    tiles = -(-blocks * B // numbers["COLUMNS"])
    x_b, x_c = x.strides_8
    y_b, y_c = y.strides_8
    plan.launch(
        _convolve, (C * tiles,),
        v=x.data, copies=copies, skip=skip, y=y.data, G=blocks, B=B, LAGS=lags, tiles=tiles, W8=width // 8,
        v_b8=x_b, v_c8=x_c, y_b8=y_b, y_c8=y_c, BACKWARDS=backwards, PARTS=parts, **numbers,
    )  # fmt: skip


def differentiate(
    plan: Plan,
    x: Rows,
    dy: Rows,
    h: Tensor,
    skip: Tensor | None,
    dx: Rows | None,
    dh: Tensor | None,
    dskip: Tensor | None,
    T: int,
    *,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients of h and skip; that of x into dx if it is given."""
    if dx is not None:
        convolve(plan, dy, h, skip, dx, T, backwards=True, tiling=tiling)
    B, C, R = x.shape
    L = h.shape[1]
    numbers = kernels.correlation(x.dtype, tiling)
    piece, wide = numbers["PIECE"], numbers["WIDE"]
    spans = (min(L, T) + piece - 2) // wide + 1
    inner, outer = (plan.empty((C, spans, wide), torch.float32) for _ in range(2))
    x_b, x_c = x.strides_8
    dy_b, dy_c = dy.strides_8
    plan.launch(
        _correlate, (C * spans,),
        dy=dy.data, v=x.data, inner=inner, outer=outer, G=R // piece, B=B, spans=spans, ONE=1.0,
        dy_b8=dy_b, dy_c8=dy_c, v_b8=x_b, v_c8=x_c, **numbers,
    )  # fmt: skip
    tiles = -(-L // GATHER_SIZE)
    plan.launch(
        _gather, (C * tiles,),
        inner=inner, outer=outer, dh=dh, dskip=dskip, L=L, T=T, spans=spans, tiles=tiles,
        PIECE=piece, WIDE=wide, SIZE=GATHER_SIZE, num_warps=4,
    )  # fmt: skip


toeplitz = long_conv_op(
    "toeplitz",
    *planners(convolve, differentiate),
    tilings={
        "forward": Tilings(Tiling, kernels.tilings),
        "backward": Tilings(BackwardTiling, kernels.backward_tilings),
    },
)
"""For float16, bfloat16 and float32."""
