"""Convolution with a few taps, one product after another, on tensors [B, T, C] as they lie in memory.

A tile has TIMES positions of CHANNELS channels of one sequence. It is read once for every tap; all but
the first reading come from the cache. One axis, the LAST or that of time, has a step of 1. Its size and the
other steps are in units of UNIT values, so that the compiler knows how rows are aligned.
"""

import triton
import triton.language as tl

__all__ = ["CHANNELS", "TIMES", "WARPS", "WAVES"]

TIMES, CHANNELS, WARPS = 8, 128, 4
WAVES = 4  # programs of the backward on a multiprocessor


@triton.jit(
    do_not_specialize=[
        "T", "C", "N", "u_b", "u_s", "in_b", "in_s", "gate_b", "gate_s", "out_b", "out_s", "h_c", "h_l",
    ]
)  # fmt: skip
def _forward(
    u, h, skip, gate_in, gate_out, out, T, C, N,
    u_b: tl.int64, u_s, in_b: tl.int64, in_s, gate_b: tl.int64, gate_s, out_b: tl.int64, out_s, h_c, h_l,
    TAPS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = (h * (u gate_in) + skip u gate_in) gate_out, in float32 until it is stored."""
    t, c, b = _place(tl.program_id(0).to(tl.int64), N, TIMES, CHANNELS)
    T, C = _sizes(T, C, LAST, UNIT)
    y = tl.zeros([TIMES, CHANNELS], tl.float32)
    for lag in tl.static_range(TAPS):
        v = _product(u, gate_in, b, t - lag, c, T, C, u_b, u_s, in_b, in_s, LAST, UNIT)
        y += _tap(h, skip, c, C, h_c, h_l, lag)[None, :] * v
    _put(out, y, gate_out, b, t, c, T, C, out_b, out_s, gate_b, gate_s, LAST, UNIT)


@triton.jit(
    do_not_specialize=[
        "T", "C", "N", "TILES", "dout_b", "dout_s", "u_b", "u_s", "in_b", "in_s", "gate_b", "gate_s",
        "du_b", "du_s", "h_c", "h_l",
    ]
)  # fmt: skip
def _backward(
    dout, u, h, skip, gate_in, gate_out, du, dgate_in, dgate_out, partial, T, C, N, TILES: tl.int64,
    dout_b: tl.int64, dout_s, u_b: tl.int64, u_s, in_b: tl.int64, in_s, gate_b: tl.int64, gate_s,
    du_b: tl.int64, du_s, h_c, h_l,
    TAPS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients of u and of the gates, and in partial[program, lag, c] the share of h's that a program's
    tiles, one after another, have. Those that are None aren't wanted."""
    T, C = _sizes(T, C, LAST, UNIT)
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([TIMES, CHANNELS], tl.float32),)  # noqa: RUF005
    share = tl.cdiv(TILES, tl.num_programs(0))
    first = tl.program_id(0) * share
    for tile in tl.range(first, tl.minimum(first + share, TILES)):
        t, c, b = _place(tile, N, TIMES, CHANNELS)
        dy = _product(dout, gate_out, b, t, c, T, C, dout_b, dout_s, gate_b, gate_s, LAST, UNIT)
        y = tl.zeros([TIMES, CHANNELS], tl.float32)
        dv = tl.zeros([TIMES, CHANNELS], tl.float32)
        added = ()
        for lag in tl.static_range(TAPS):
            tap = _tap(h, skip, c, C, h_c, h_l, lag)[None, :]
            if du is not None or dgate_in is not None:
                later = dy
                if lag > 0:
                    later = _product(
                        dout, gate_out, b, t + lag, c, T, C, dout_b, dout_s, gate_b, gate_s, LAST, UNIT
                    )
                dv += tap * later
            if dgate_out is not None or partial is not None:
                v = _product(u, gate_in, b, t - lag, c, T, C, u_b, u_s, in_b, in_s, LAST, UNIT)
                y += tap * v
                added = added + (sums[lag] + dy * v,)  # noqa: RUF005
        if partial is not None:
            sums = added
        _put(du, dv, gate_in, b, t, c, T, C, du_b, du_s, in_b, in_s, LAST, UNIT)
        _put(dgate_in, dv, u, b, t, c, T, C, du_b, du_s, u_b, u_s, LAST, UNIT)
        _put(dgate_out, y, dout, b, t, c, T, C, du_b, du_s, dout_b, dout_s, LAST, UNIT)
    if partial is not None:
        c = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
        for lag in tl.static_range(TAPS):
            where = partial + (tl.program_id(0).to(tl.int64) * TAPS + lag) * C + c
            tl.store(where, tl.sum(sums[lag], 0), mask=c < C)


@triton.jit
def _place(tile, N, TIMES: tl.constexpr, CHANNELS: tl.constexpr):
    """The times, channels and sequence of a tile; N tiles make up a sequence's time."""
    b = tile // N
    t = (tile - b * N) * TIMES + tl.arange(0, TIMES)
    return t, tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS), b


@triton.jit
def _sizes(T, C, LAST: tl.constexpr, UNIT: tl.constexpr):
    if LAST:
        C = C * UNIT
    else:
        T = T * UNIT
    return T, C


@triton.jit
def _where(b, t, c, step_b, step, LAST: tl.constexpr, UNIT: tl.constexpr):
    if LAST:
        return b * (step_b * UNIT) + t[:, None] * (step * UNIT) + c[None, :]
    return b * (step_b * UNIT) + t[:, None] + c[None, :] * (step * UNIT)


@triton.jit
def _values(x, b, t, c, T, C, x_b, x_s, LAST: tl.constexpr, UNIT: tl.constexpr):
    """x[b, t, c], 0 before the start, after the end and beyond the channels."""
    there = ((t >= 0) & (t < T))[:, None] & (c < C)[None, :]
    return tl.load(x + _where(b, t, c, x_b, x_s, LAST, UNIT), mask=there, other=0.0).to(tl.float32)


@triton.jit
def _product(x, gate, b, t, c, T, C, x_b, x_s, gate_b, gate_s, LAST: tl.constexpr, UNIT: tl.constexpr):
    value = _values(x, b, t, c, T, C, x_b, x_s, LAST, UNIT)
    if gate is not None:
        value *= _values(gate, b, t, c, T, C, gate_b, gate_s, LAST, UNIT)
    return value


@triton.jit
def _put(
    out, value, gate, b, t, c, T, C, out_b, out_s, gate_b, gate_s, LAST: tl.constexpr, UNIT: tl.constexpr
):
    """out = value * gate, where there is an out."""
    if out is not None:
        if gate is not None:
            value *= _values(gate, b, t, c, T, C, gate_b, gate_s, LAST, UNIT)
        there = (t < T)[:, None] & (c < C)[None, :]
        where = _where(b, t, c, out_b, out_s, LAST, UNIT)
        tl.store(out + where, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _tap(h, skip, c, C, h_c, h_l, lag):
    """h[c, lag], the skip added to the first."""
    tap = tl.load(h + c * h_c + lag * h_l, mask=c < C, other=0.0).to(tl.float32)
    if skip is not None:
        tap += tl.load(skip + c, mask=(c < C) & (lag == 0), other=0.0).to(tl.float32)
    return tap
