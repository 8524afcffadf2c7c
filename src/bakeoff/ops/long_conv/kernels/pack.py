"""Kernels between tensors [B, T, C] of any strides and rows of time."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "C", "N", "x_b", "x_t", "x_c", "g_b", "g_t", "g_c", "rows_b", "rows_c"])
def _pack(
    x, gate, rows, T, C, N, x_b, x_t, x_c, g_b, g_t, g_c, rows_b, rows_c,
    X_LAST: tl.constexpr, G_LAST: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """rows[b, c, t] = x[b, t, c] * gate[b, t, c], and 0 from T on."""
    t, c, b = _place(N, TIMES, CHANNELS)
    there = (t[:, None] < T) & (c[None, :] < C)
    value = _load(x + b * x_b, t, c, x_t, x_c, there, X_LAST).to(tl.float32)
    if gate is not None:
        value *= _load(gate + b * g_b, t, c, g_t, g_c, there, G_LAST).to(tl.float32)
    where = rows + b * rows_b + c[None, :] * rows_c + t[:, None]
    tl.store(where, value.to(rows.dtype.element_ty), mask=c[None, :] < C)


@triton.jit(
    do_not_specialize=[
        "T", "C", "N", "rows_b", "rows_c", "g_b", "g_t", "g_c", "o_b", "o_t", "o_c",
        "out_b", "out_t", "out_c",
    ]
)  # fmt: skip
def _unpack(
    rows, gate, other, out, second, T, C, N, rows_b, rows_c,
    g_b, g_t, g_c, o_b, o_t, o_c, out_b, out_t, out_c,
    G_LAST: tl.constexpr, O_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = rows * gate and second = rows * other, both [B, T, C] with the strides of `out`."""
    t, c, b = _place(N, TIMES, CHANNELS)
    there = (t[:, None] < T) & (c[None, :] < C)
    y = tl.load(rows + b * rows_b + c[None, :] * rows_c + t[:, None], mask=there, other=0.0).to(tl.float32)
    product = y
    if gate is not None:
        product = y * _load(gate + b * g_b, t, c, g_t, g_c, there, G_LAST).to(tl.float32)
    where = _offsets(t, c, out_t, out_c, OUT_LAST) + b * out_b
    tl.store(out + where, product.to(out.dtype.element_ty), mask=there)
    if second is not None:
        if other is not None:
            y *= _load(other + b * o_b, t, c, o_t, o_c, there, O_LAST).to(tl.float32)
        tl.store(second + where, y.to(second.dtype.element_ty), mask=there)


@triton.jit
def _place(N, TIMES: tl.constexpr, CHANNELS: tl.constexpr):
    """The times, channels and sequence of this program; N tiles make up a sequence's time."""
    tile = tl.program_id(0).to(tl.int64)
    b = tile // N
    t = (tile - b * N) * TIMES + tl.arange(0, TIMES)
    return t, tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS), b


@triton.jit
def _offsets(t, c, step_t, step_c, LAST: tl.constexpr):
    """Of [t, c], the compiler told which of the two steps is 1."""
    if LAST:
        return t[:, None] * step_t + c[None, :]
    return t[:, None] + c[None, :] * step_c


@triton.jit
def _load(pointer, t, c, step_t, step_c, there, LAST: tl.constexpr):
    return tl.load(pointer + _offsets(t, c, step_t, step_c, LAST), mask=there, other=0.0)
