"""fp8_linear in Triton: rows to FP8 with a scale each, in one pass where a row fits in registers.

Reads 2 bytes an element in bf16 and writes 1. PyTorch alone reads a row twice and writes float32 in between.
How rows lie in registers: `bakeoff.kernels.rows`. Rows of q are padded by zeros to a multiple of PAD, as
torch._scaled_mm wants them; BLOCK is a multiple of it, so that the pieces reach as far.

ROUND: the conversion's rounding is done here. GPUs round to nearest even, stop at the largest number and keep
NaN, as the definition does; Triton's interpreter converts only what needs no rounding.
"""

import triton
import triton.language as tl

from bakeoff.kernels.rows import columns, read

__all__ = ["PAD"]

PAD = 16
_PAD = tl.constexpr(PAD)


@triton.jit(do_not_specialize=["N", "x_units"])
def _quantize(
    x, q, scale, N: tl.int64, x_units: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS whole rows: scale = max|x| / LARGEST, or 1, and q = x / scale in q's format. About
    16 instructions an element, most of them the division's."""
    PIECES: tl.constexpr = (K + BLOCK - 1) // BLOCK
    PADDED: tl.constexpr = (K + _PAD - 1) // _PAD * _PAD
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    live = rows < N
    values = read(x, rows * (x_units * ALIGN), live, K, BLOCK, "")
    peaks = tl.zeros([ROWS, BLOCK], tl.int32)
    for i in tl.static_range(PIECES):
        peaks = tl.maximum(peaks, _magnitude(values[i]))
    found = _scale(tl.max(peaks, axis=1, keep_dims=True), LARGEST)
    tl.store(scale + rows, found, mask=live)
    for i in tl.static_range(PIECES):
        cols, inside = columns(i, PADDED, BLOCK)
        ratio = _ratio(values[i].to(tl.float32), found, LARGEST, q.dtype.element_ty == tl.float8e4nv, ROUND)
        tl.store(q + rows * PADDED + cols, ratio.to(q.dtype.element_ty), mask=inside & live)


@triton.jit(do_not_specialize=["x_units"])
def _quantize_long(
    x, q, scale, x_units: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, LARGEST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One row a program, in two passes over chunks of BLOCK: the scale, then q, re-reading from L2."""
    PADDED: tl.constexpr = (K + _PAD - 1) // _PAD * _PAD
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_units * ALIGN)
    q += row * PADDED
    peaks = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + cols, mask=cols < K, other=0.0, eviction_policy="evict_last")
        peaks = tl.maximum(peaks, _magnitude(value))
    found = _scale(tl.max(peaks, axis=0), LARGEST)
    tl.store(scale + row, found)
    for start in tl.range(0, PADDED, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + cols, mask=cols < K, other=0.0, eviction_policy="evict_first").to(tl.float32)
        ratio = _ratio(value, found, LARGEST, q.dtype.element_ty == tl.float8e4nv, ROUND)
        tl.store(q + cols, ratio.to(q.dtype.element_ty), mask=cols < PADDED)


@triton.jit
def _magnitude(value):
    # The bits of |value| in float32, which as integers are in the same order, with NaN as the largest.
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(peak, LARGEST: tl.constexpr):
    # Of the bits of max|x|. Rounded to nearest: an ordinary division of Triton's is not.
    found = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.full(peak.shape, LARGEST, tl.float32))
    return tl.where(found == 0.0, 1.0, found)


@triton.jit
def _ratio(value, scale, LARGEST: tl.constexpr, E4M3: tl.constexpr, ROUND: tl.constexpr):
    # value / scale in float32; with ROUND, to 3 (e4m3) or 2 (e5m2) bits behind the leading one: a number is
    # added and taken off that is so large that the bits below have no room.
    ratio = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    if ROUND:
        BITS: tl.constexpr = 3 if E4M3 else 2
        LEAST: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14  # below, numbers are denormal
        ratio = tl.where(ratio > LARGEST, LARGEST, tl.where(ratio < -LARGEST, -LARGEST, ratio))
        bits = ratio.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.where(power > LEAST, power, LEAST) * (1.5 * 2.0 ** (23 - BITS))
        rounded = ((ratio + large) - large).to(tl.int32, bitcast=True) | (bits & -0x80000000)  # -0 stays -0
        ratio = tl.where(ratio == ratio, rounded.to(tl.float32, bitcast=True), ratio)
    return ratio
