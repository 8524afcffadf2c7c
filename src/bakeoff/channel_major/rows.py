"""Between [B, T, C] of any strides and rows of time [B, C, R] that begin at 16-byte boundaries.

Rows have a multiple of ROW values; those beyond T are 0. Gates are multiplied on the way, in the data's own
dtype, as a model would.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff.channel_major import kernels
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel

__all__ = ["ROW", "TILE", "Rows", "channels_last", "empty_rows", "pack", "result_like", "rows_in", "unpack"]

ROW = 128
TILE = {"TIMES": 64, "CHANNELS": 64, "num_warps": 4}

_pack, _unpack = TritonKernel(kernels._pack), TritonKernel(kernels._unpack)


class Rows(NamedTuple):
    """Rows [B, C, R] in the memory of `data`, from its first element on."""

    data: Tensor
    shape: tuple[int, int, int]
    """B, C, R."""
    strides: tuple[int, int]
    """From sequence to sequence and from channel to channel, multiples of 8."""

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def strides_8(self) -> tuple[int, int]:
        """The strides in units of 8 values."""
        return self.strides[0] // 8, self.strides[1] // 8

    def view(self) -> Tensor:
        """As a tensor [B, C, R]."""
        return self.data.as_strided(self.shape, (*self.strides, 1))


def channels_last(x: Tensor) -> bool:
    """Whether neighbouring channels, not neighbouring times, lie side by side."""
    return x.stride(2) == 1 and not (x.stride(1) == 1 and x.shape[2] == 1)


def result_like(x: Tensor) -> Tensor:
    """An uninitialised result laid out like x, if x has times or channels side by side and offsets along time
    fit into 31 bits; else contiguous."""
    out = torch.empty_like(x)
    same = out.stride(2) == 1 if x.stride(2) == 1 else out.stride(1) == 1
    return out if same and out.stride(1) * x.shape[1] < 1 << 31 else x.new_empty(x.shape)


def rows_in(x: Tensor) -> Rows | None:
    """x [B, T, C] itself as rows, if it lies so in memory."""
    B, T, C = x.shape
    b, t, c = x.stride()
    if t == 1 and T % ROW == 0 and (b | c) % 8 == 0 and x.data_ptr() % 16 == 0:
        return Rows(x, (B, C, T), (b, c))
    return None


def empty_rows(plan: Plan, x: Tensor) -> Rows:
    """Uninitialised rows for x [B, T, C]."""
    B, T, C = x.shape
    R = -(-T // ROW) * ROW
    return Rows(plan.empty((B, C, R), x.dtype), (B, C, R), (C * R, R))


def pack(plan: Plan, x: Tensor, gate: Tensor | None = None) -> Rows:
    """x * gate as rows in x's dtype; x itself, seen so, where it is that already."""
    if gate is None and (rows := rows_in(x)) is not None:
        return rows
    x, gate = _readable(plan, x), None if gate is None else _readable(plan, gate)
    T, C = x.shape[1:]
    rows = empty_rows(plan, x)
    tiles = rows.shape[2] // TILE["TIMES"]
    plan.launch(
        _pack,
        _grid(rows, tiles),
        x=x, gate=gate, rows=rows.data, T=T, C=C, tiles=tiles, **_strides("x", x), **_strides("gate", gate),
        rows_b=rows.strides[0], rows_c=rows.strides[1],
        X_LAST=channels_last(x), GATE_LAST=gate is not None and channels_last(gate), **TILE,
    )  # fmt: skip
    return rows


def unpack(
    plan: Plan,
    rows: Rows,
    out: Tensor | None,
    gate: Tensor | None = None,
    product: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """out = rows * gate and product = rows * factor, for [B, T, C] of one layout; no gate or factor stands
    for 1, and either result may be absent."""
    like = product if out is None else out
    assert like is not None
    gate = None if gate is None else _readable(plan, gate)
    factor = None if factor is None else _readable(plan, factor)
    T, C = like.shape[1:]
    tiles = -(-T // TILE["TIMES"])
    plan.launch(
        _unpack,
        _grid(rows, tiles),
        rows=rows.data, gate=gate, factor=factor, out=out, product=product, T=T, C=C, tiles=tiles,
        rows_b=rows.strides[0], rows_c=rows.strides[1],
        **_strides("gate", gate), **_strides("factor", factor), **_strides("out", like),
        GATE_LAST=gate is not None and channels_last(gate),
        FACTOR_LAST=factor is not None and channels_last(factor),
        OUT_LAST=channels_last(like), **TILE,
    )  # fmt: skip


def _grid(rows: Rows, tiles: int) -> tuple[int, int]:
    B, C, _ = rows.shape
    return tiles * B, -(-C // TILE["CHANNELS"])


def _strides(name: str, x: Tensor | None) -> dict[str, int]:
    """The strides of x as arguments of a kernel; 0 where it is absent."""
    b, t, c = (0, 0, 0) if x is None else x.stride()
    return {f"{name}_b": b, f"{name}_t": t, f"{name}_c": c}


def _readable(plan: Plan, x: Tensor) -> Tensor:
    """`x` with times or channels side by side; a copy if need be."""
    return x if x.stride(2) == 1 or x.stride(1) == 1 else plan.contiguous(x)
