"""fp8_linear in Triton: rows to FP8 with a scale each, in one pass where a row fits in registers.

Reads 2 bytes an element in bf16 and writes 1, with about 12 FLOPs. PyTorch alone reads a row twice and writes
float32 in between. How rows lie in registers: `bakeoff.kernels.rows`.
"""

import triton
import triton.language as tl

from bakeoff.kernels.rows import columns, read

__all__: list[str] = []


@triton.jit(do_not_specialize=["N", "x_units", "K_padded"])
def _quantize(
    x, q, scale, N: tl.int64, x_units: tl.int64, K_padded: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, LARGEST: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS whole rows: scale = max|x| / LARGEST, or 1, and q = x / scale in q's format of BITS
    mantissa bits, whose least power is LEAST. q's rows are K_padded long, with zeros behind the first K: a
    multiple of 16, as BLOCK is, so that the pieces reach as far."""
    PIECES: tl.constexpr = (K + BLOCK - 1) // BLOCK
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    live = rows < N
    values = read(x, rows * (x_units * ALIGN), live, K, BLOCK, "")
    peaks = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        peaks = tl.maximum(peaks, tl.abs(values[i].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    found = _scale(tl.max(peaks, axis=1, keep_dims=True), LARGEST)
    tl.store(scale + rows, found, mask=live)
    for i in tl.static_range(PIECES):
        cols, _ = columns(i, K, BLOCK)
        code = _rounded(values[i].to(tl.float32), found, LARGEST, BITS, LEAST)
        tl.store(q + rows * K_padded + cols, code.to(q.dtype.element_ty), mask=live & (cols < K_padded))


@triton.jit(do_not_specialize=["x_units", "K_padded"])
def _quantize_long(
    x, q, scale, x_units: tl.int64, K_padded: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """One row a program, in two passes over chunks of BLOCK: the scale, then q, re-reading from L2."""
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_units * ALIGN)
    q += row * K_padded
    peaks = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + cols, mask=cols < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    found = _scale(tl.max(peaks, axis=0), LARGEST)
    tl.store(scale + row, found)
    for start in tl.range(0, K_padded, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + cols, mask=cols < K, other=0.0, eviction_policy="evict_first").to(tl.float32)
        code = _rounded(value, found, LARGEST, BITS, LEAST)
        tl.store(q + cols, code.to(q.dtype.element_ty), mask=cols < K_padded)


@triton.jit
def _scale(peak, LARGEST: tl.constexpr):
    # Rounded to nearest: an ordinary division of Triton's is not.
    found = tl.div_rn(peak, tl.full(peak.shape, LARGEST, tl.float32))
    return tl.where(found == 0.0, 1.0, found)


@triton.jit
def _rounded(value, scale, LARGEST: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr):
    # value / scale in float32, rounded to nearest even to BITS bits behind the leading one: a number is added
    # and taken off that is so large that no bits below have room. The cast that follows is exact. NaN stays.
    ratio = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    ratio = tl.where(ratio > LARGEST, LARGEST, tl.where(ratio < -LARGEST, -LARGEST, ratio))
    bits = ratio.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.where(power > LEAST, power, LEAST) * (1.5 * 2.0 ** (23 - BITS))
    rounded = ((ratio + large) - large).to(tl.int32, bitcast=True) | (bits & -0x80000000)  # -0 stays -0
    return tl.where(ratio == ratio, rounded.to(tl.float32, bitcast=True), ratio)
