"""Copies between tensors [B, T, C] of any strides and rows of time, multiplied by gates on the way.

A program copies a tile of TIMES by CHANNELS of one sequence. Tensors are read and written along the dimension
whose stride is 1: channels where LAST, else time.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "T", "C", "tiles", "x_b", "x_t", "x_c", "gate_b", "gate_t", "gate_c", "rows_b", "rows_c",
    ]
)  # fmt: skip
def _pack(
    x, gate, rows, T, C, tiles, x_b, x_t, x_c, gate_b, gate_t, gate_c, rows_b, rows_c,
    X_LAST: tl.constexpr, GATE_LAST: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """rows[b, c, t] = x[b, t, c] * gate[b, t, c], and 0 from T on."""
    t, c, b = _tile(tiles, TIMES, CHANNELS)
    inside = (t[:, None] < T) & (c[None, :] < C)
    value = _load(x + b * x_b, t, c, x_t, x_c, inside, X_LAST).to(tl.float32)
    if gate is not None:
        value *= _load(gate + b * gate_b, t, c, gate_t, gate_c, inside, GATE_LAST).to(tl.float32)
    target = rows + b * rows_b + c[None, :] * rows_c + t[:, None]
    tl.store(target, value.to(rows.dtype.element_ty), mask=c[None, :] < C)


@triton.jit(
    do_not_specialize=[
        "T", "C", "tiles", "rows_b", "rows_c", "gate_b", "gate_t", "gate_c", "factor_b", "factor_t",
        "factor_c", "out_b", "out_t", "out_c",
    ]
)  # fmt: skip
def _unpack(
    rows, gate, factor, out, product, T, C, tiles, rows_b, rows_c,
    gate_b, gate_t, gate_c, factor_b, factor_t, factor_c, out_b, out_t, out_c,
    GATE_LAST: tl.constexpr, FACTOR_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = rows * gate and product = rows * factor, both [B, T, C] with the strides of `out`; either may be
    absent."""
    t, c, b = _tile(tiles, TIMES, CHANNELS)
    inside = (t[:, None] < T) & (c[None, :] < C)
    source = rows + b * rows_b + c[None, :] * rows_c + t[:, None]
    y = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    target = _offsets(t, c, out_t, out_c, OUT_LAST) + b * out_b
    if out is not None:
        value = y
        if gate is not None:
            value = y * _load(gate + b * gate_b, t, c, gate_t, gate_c, inside, GATE_LAST).to(tl.float32)
        tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)
    if product is not None:
        if factor is not None:
            y *= _load(factor + b * factor_b, t, c, factor_t, factor_c, inside, FACTOR_LAST).to(tl.float32)
        tl.store(product + target, y.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _tile(tiles, TIMES: tl.constexpr, CHANNELS: tl.constexpr):
    """The times, channels and sequence of this program; so many tiles make up a sequence's time."""
    tile = tl.program_id(0).to(tl.int64)
    b = tile // tiles
    t = (tile - b * tiles) * TIMES + tl.arange(0, TIMES)
    return t, tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS), b


@triton.jit
def _offsets(t, c, stride_t, stride_c, LAST: tl.constexpr):
    """Of [t, c]; the compiler learns which of the two strides is 1."""
    if LAST:
        return t[:, None] * stride_t + c[None, :]
    return t[:, None] + c[None, :] * stride_c


@triton.jit
def _load(pointer, t, c, stride_t, stride_c, inside, LAST: tl.constexpr):
    return tl.load(pointer + _offsets(t, c, stride_t, stride_c, LAST), mask=inside, other=0.0)
