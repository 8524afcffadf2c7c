"""From tensors to launches for long_conv's Triton candidates: what is packed, convolved and unpacked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bakeoff.launch import Launcher
from bakeoff.ops.long_conv.kernels import toeplitz
from bakeoff.ops.long_conv.kernels.toeplitz import BLOCK, COPIES
from bakeoff.ops.long_conv.rows import empty_rows, result, rows, unpack

__all__ = ["Gradients", "run_backward", "run_forward"]

_shift = Launcher(toeplitz._shift)
_convolve = Launcher(toeplitz._convolve)
_correlate = Launcher(toeplitz._correlate)
_gather = Launcher(toeplitz._gather)

_SHIFT_WIDTH, _GATHER_SIZE = 256, 1024


class Gradients(NamedTuple):
    """Of every argument; None where it isn't wanted."""

    u: torch.Tensor | None
    h: torch.Tensor | None
    skip: torch.Tensor | None
    gate_in: torch.Tensor | None
    gate_out: torch.Tensor | None


def run_forward(
    u: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None,
    gate_in: torch.Tensor | None,
    gate_out: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the output, and if `keep` what `gate_out` multiplied, which is its gradient's other factor)."""
    return _convolved(rows(u, gate_in), h, skip, u, gate_out, None, keep, False)


def run_backward(
    dout: torch.Tensor,
    u: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None,
    gate_in: torch.Tensor | None,
    gate_out: torch.Tensor | None,
    y: torch.Tensor | None,
    wanted: Sequence[bool],
) -> Gradients:
    """The gradients that are `wanted`, in the arguments' order."""
    du = dh = dskip = dgate_in = None
    if any(wanted[:4]):
        dy = rows(dout, gate_out)
        if wanted[0] or wanted[3]:
            du, dgate_in = _convolved(dy, h, skip, u, gate_in, u, wanted[3], True)
        if wanted[1] or wanted[2]:
            dh, dskip = _correlated(dy, rows(u, gate_in), u.shape[1], h, skip)
    dgate_out = dout * y if wanted[4] and y is not None else None
    return Gradients(du, dh, dskip, dgate_in, dgate_out)


def _convolved(
    v: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None,
    like: torch.Tensor,
    gate: torch.Tensor | None,
    other: torch.Tensor | None,
    both: bool,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y * gate, y * other if `both`), y the convolution of the rows v; see `unpack`."""
    if gate is None and not both:
        out, place = result(like)
        if place is not None:
            _convolve_rows(v, h, skip, place, backwards)
            return out, None
    y = empty_rows(like)
    _convolve_rows(v, h, skip, y, backwards)
    return unpack(y, like, gate, other, both=both)


def _convolve_rows(
    v: torch.Tensor, h: torch.Tensor, skip: torch.Tensor | None, y: torch.Tensor, backwards: bool
) -> None:
    """y = h * v (backwards: correlated with h) for rows [B, C, R]."""
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


def _correlated(
    dy: torch.Tensor, v: torch.Tensor, T: int, h: torch.Tensor, skip: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of h and skip from the rows of y's gradient and v."""
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
