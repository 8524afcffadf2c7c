"""Rows convolved by products with Toeplitz matrices: the launches of `kernels.toeplitz`."""

import torch
from torch import Tensor

from bakeoff.launch import Launcher
from bakeoff.ops.long_conv.kernels import toeplitz
from bakeoff.ops.long_conv.kernels.toeplitz import BLOCK, COPIES

__all__ = ["TOEPLITZ"]

_shift = Launcher(toeplitz._shift)
_convolve = Launcher(toeplitz._convolve)
_correlate = Launcher(toeplitz._correlate)
_gather = Launcher(toeplitz._gather)

_SHIFT_WIDTH, _GATHER_SIZE = 256, 1024


class Toeplitz:
    """See `bakeoff.ops.long_conv.run.Convolver`."""

    def convolve(self, x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
        """y = h * x (correlated with h where `sign` is -1) + skip x."""
        del T
        _products(x, h, skip, y, backwards=sign < 0)

    def differentiate(
        self, x: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, dx: Tensor | None, T: int
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of h and skip; that of x goes into `dx` if it is given."""
        if dx is not None:
            _products(dy, h, skip, dx, backwards=True)
        return _filters(x, dy, h, skip, T)


TOEPLITZ = Toeplitz()


def _products(v: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, *, backwards: bool) -> None:
    """y = h * v (backwards: correlated with h) + skip v."""
    B, C, R = v.shape
    G = R // BLOCK
    L = min(h.shape[1], R)
    lags = min((L + BLOCK - 2) // BLOCK + 1, G)
    width = (lags + 2) * BLOCK
    parts = 1 if h.dtype == v.dtype or v.dtype == torch.float32 else 2
    copies = v.new_empty((C, parts, COPIES, width))
    tiles = -(-width // _SHIFT_WIDTH)
    _shift(
        (C * tiles, 1, 1),
        h, copies, L, width, tiles, h.stride(0), h.stride(1),
        BACKWARDS=backwards, PARTS=parts, BLOCK=BLOCK, COPIES=COPIES, WIDTH=_SHIFT_WIDTH, num_warps=4,
    )  # fmt: skip
    how = toeplitz.convolving(G * B, v.dtype)
    tiles = -(-G * B // how.columns)
    _convolve(
        (C * tiles, 1, 1),
        v, copies, None if skip is None else skip.contiguous(), y, G, B, lags, tiles, width // 8,
        v.stride(0) // 8, v.stride(1) // 8, y.stride(0) // 8, y.stride(1) // 8,
        BACKWARDS=backwards, PARTS=parts, COLUMNS=how.columns, DEEP=how.deep, BLOCK=BLOCK, COPIES=COPIES,
        PRECISION=how.precision, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def _filters(v: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, T: int) -> tuple[Tensor, Tensor | None]:
    """The gradients of h and skip from the rows v and those of y's gradient."""
    B, C, R = v.shape
    how = toeplitz.correlating(v.dtype)
    L = h.shape[1]
    spans = (min(L, T) + how.piece - 2) // how.wide + 1
    inner, outer = torch.empty((2, C, spans, how.wide), dtype=torch.float32, device=v.device)
    _correlate(
        (C * spans, 1, 1),
        dy, v, inner, outer, R // how.piece, B, spans, 1.0,
        dy.stride(0) // 8, dy.stride(1) // 8, v.stride(0) // 8, v.stride(1) // 8,
        PIECE=how.piece, WIDE=how.wide, DEEP=how.deep, PRECISION=how.precision,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    dh = torch.empty((C, L), dtype=h.dtype, device=h.device)
    dskip = None if skip is None else torch.empty_like(skip, memory_format=torch.contiguous_format)
    tiles = -(-L // _GATHER_SIZE)
    _gather(
        (C * tiles, 1, 1),
        inner, outer, dh, dskip, L, T, spans, tiles,
        PIECE=how.piece, WIDE=how.wide, SIZE=_GATHER_SIZE, num_warps=4,
    )  # fmt: skip
    return dh, dskip
