"""rms_norm in Triton: the kernels and their tilings.

Rows that fit in registers cross device memory once: 4 bytes an element forward and 6 backward in bf16. Longer
rows take a second pass (forward, mostly from L2) or a second kernel (backward, 10 bytes an element).

Row strides come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need
(`tl.multiple_of` on a kernel argument is dropped without a word).
"""

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Tiling", "backward_tiling", "forward_tiling", "sum_tiling"]


@triton.jit(do_not_specialize=["N", "x_units", "residual_units", "eps", "offset"])
def _forward(
    x, residual, weight, y, s,
    N: tl.int64, x_units: tl.int64, residual_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS whole rows a program; EVEN: N is a multiple of ROWS.

    Reads x (and the residual), writes y (and s); about 4 FLOPs an element. Masks are constant, hence free,
    where nothing is cut.
    """
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = tl.full([1, BLOCK], True, tl.int1) if BLOCK == D else cols < D
    mask = inside & (tl.full([ROWS, 1], True, tl.int1) if EVEN else rows < N)
    value = tl.load(x + rows * (x_units * ALIGN) + cols, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        other = tl.load(residual + rows * (residual_units * ALIGN) + cols, mask=mask, other=0.0)
        # What is normalised is s as stored: the backward sees no other.
        total = (value + other.to(tl.float32)).to(s.dtype.element_ty)
        tl.store(s + rows * D + cols, total, mask=mask)
        value = total.to(tl.float32)
    if weight is not None:  # asked for after x, so that x's load never waits for it
        scale = tl.load(weight + cols, mask=inside, other=0.0)
    mean_square = tl.sum(value * value, axis=1, keep_dims=True) * (1.0 / D)
    value *= tl.rsqrt(mean_square + eps)
    if weight is not None:
        value *= scale.to(tl.float32) + offset
    tl.store(y + rows * D + cols, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_units", "residual_units", "eps", "offset"])
def _forward_long(
    x, residual, weight, y, s,
    x_units: tl.int64, residual_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One row a program, in two passes over chunks of BLOCK: the mean square, then y, re-reading from L2."""
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_units * ALIGN)
    y += row * D
    if residual is not None:
        residual += row * (residual_units * ALIGN)
        s += row * D
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        value = tl.load(x + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if residual is not None:
            value += tl.load(residual + cols, mask=inside, other=0.0).to(tl.float32)
            stored = value.to(s.dtype.element_ty)
            tl.store(s + cols, stored, mask=inside)
            value = stored.to(tl.float32)
        total += value * value
    scaling = tl.rsqrt(tl.sum(total, axis=0) * (1.0 / D) + eps)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        value = tl.load(x + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if residual is not None:
            value += tl.load(residual + cols, mask=inside, other=0.0).to(tl.float32)
            value = value.to(s.dtype.element_ty).to(tl.float32)
        value *= scaling
        if weight is not None:
            value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(y + cols, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units", "eps", "offset"])
def _backward(
    dy, ds, s, weight, dx, dresidual, partial,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64,
    eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
    ALIGN: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows, walked by persistent programs that keep the weight's gradient in registers.

    r from s again (cheaper than storing it), n = s*r, g = dy*(offset+w): dx = r*(g - n*mean(g*n)) + ds;
    partial[program] = sum over its rows of dy*n. Reads dy and s, writes dx; about 11 FLOPs an element.
    """
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < D
    if weight is not None and HOLD:
        scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    if partial is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        mask = (rows < N) & inside
        at = rows * (dy_units * ALIGN) + cols
        grad = tl.load(dy + at, mask=mask, other=0.0, eviction_policy=LOAD).to(tl.float32)
        at = rows * (s_units * ALIGN) + cols
        value = tl.load(s + at, mask=mask, other=0.0, eviction_policy=LOAD).to(tl.float32)
        if weight is not None and not HOLD:
            scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
        if BLOCK < 16384:  # both row sums in one reduction across the program's threads
            scaled = grad if weight is None else grad * scale
            square, dot = tl.split(tl.sum(tl.join(value * value, scaled * value), axis=1) * (1.0 / D))
            scaling = tl.rsqrt(square + eps)[:, None]
            value *= scaling
            mean = dot[:, None] * scaling
            if partial is not None:
                dw += grad * value
        else:  # one after the other, because registers are short
            square = tl.sum(value * value, axis=1) * (1.0 / D)
            scaling = tl.rsqrt(square + eps)[:, None]
            value *= scaling
            if partial is not None:
                dw += grad * value
            scaled = grad if weight is None else grad * scale
            mean = (tl.sum(scaled * value, axis=1) * (1.0 / D))[:, None]
        if dx is not None:
            grad = (scaled - value * mean) * scaling
            if ds is not None:
                at = rows * (ds_units * ALIGN) + cols
                through = tl.load(ds + at, mask=mask, other=0.0, eviction_policy=LOAD)
                grad += through.to(tl.float32)
            at = rows * D + cols
            tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask, cache_modifier=STORE)
            if dresidual is not None:
                tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=mask)
    if partial is not None:
        dw = tl.sum(dw, axis=0, keep_dims=True).to(partial.dtype.element_ty)
        tl.store(partial + tl.program_id(0).to(tl.int64) * D + cols, dw, mask=inside)


@triton.jit(do_not_specialize=["dy_units", "s_units", "eps", "offset"])
def _row_sums(
    dy, s, weight, sums, dy_units: tl.int64, s_units: tl.int64, eps: tl.float32, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """r and mean(g*n) of one long row a program, which `_backward_long` needs before it can start a row."""
    row = tl.program_id(0).to(tl.int64)
    dy += row * (dy_units * ALIGN)
    s += row * (s_units * ALIGN)
    square = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < D
        grad = tl.load(dy + cols, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            grad *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
        value = tl.load(s + cols, mask=inside, other=0.0).to(tl.float32)
        square += value * value
        dot += grad * value
    scaling = tl.rsqrt(tl.sum(square, axis=0) * (1.0 / D) + eps)
    tl.store(sums + 2 * row, scaling)
    tl.store(sums + 2 * row + 1, tl.sum(dot, axis=0) * (1.0 / D) * scaling)


@triton.jit(do_not_specialize=["N", "dy_units", "ds_units", "s_units", "offset"])
def _backward_long(
    dy, ds, s, weight, sums, dx, dresidual, partial,
    N: tl.int64, dy_units: tl.int64, ds_units: tl.int64, s_units: tl.int64, offset: tl.float32,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of columns (axis 1) of every P-th row (axis 0) a program; `_backward` with its sums given."""
    first = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    if weight is not None:
        scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, N, tl.num_programs(0)):
        grad = tl.load(dy + row * (dy_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(s + row * (s_units * ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        scaling = tl.load(sums + 2 * row)
        normed *= scaling
        dw += grad * normed
        if dx is not None:
            if weight is not None:
                grad *= scale
            grad = (grad - normed * tl.load(sums + 2 * row + 1)) * scaling
            if ds is not None:
                through = tl.load(ds + row * (ds_units * ALIGN) + cols, mask=inside, other=0.0)
                grad += through.to(tl.float32)
            tl.store(dx + row * D + cols, grad.to(dx.dtype.element_ty), mask=inside)
            if dresidual is not None:
                tl.store(dresidual + row * D + cols, grad.to(dresidual.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + first * D + cols, dw.to(partial.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["P"])
def _sum_partials(
    partial, dw, P: tl.int32, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """dw[d] = sum of partial[p, d] over p, always in the same order; a block of columns a program."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in tl.range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < D)[None, :]
        total += tl.load(partial + rows[:, None].to(tl.int64) * D + cols[None, :], mask=mask, other=0.0)
    tl.store(dw + cols, tl.sum(total, axis=0).to(dw.dtype.element_ty), mask=cols < D)


class Tiling(NamedTuple):
    """How a kernel cuts [N, D] into tiles. `block` < D selects the kernels for long rows."""

    block: int
    rows: int
    stages: int
    warps: int
    programs: int
    """Programs at most; each walks several tiles when there are more tiles."""
    hold: bool = True
    """Backward: keep the weight in registers between tiles rather than load it again."""
    stream: bool = False
    """Mark what is read and written as not worth keeping in L2."""

    @property
    def hints(self) -> dict[str, str]:
        return {"LOAD": "evict_first", "STORE": ".cs"} if self.stream else {"LOAD": "", "STORE": ""}


FORWARD_LIMIT = 16384
BACKWARD_LIMIT = 16384
_UNLIMITED = 2**31 - 1
_STREAM = 2**25  # bytes: a tensor of this size is gone from a 50 MB L2 before its next reader comes


@lru_cache(maxsize=4096)
def forward_tiling(N: int, D: int, read: int, sms: int) -> Tiling:
    """The forward's tiling for N rows of D elements, for each of which `read` bytes come from memory, on a
    device of `sms` multiprocessors.

    One tile a program, without cache hints: sweeps over the benchmark's shapes on an H100 and an H200 found
    persistent programs and streaming hints slower nearly everywhere, and one pass over 16,384 columns faster
    than two. Long tiles want 16-byte accesses from 8 warps, short ones as few warps as hold them, and a
    device that isn't filled shorter ones.
    """
    block = triton.next_power_of_2(D)
    many = 16 * sms <= N
    if block > FORWARD_LIMIT:
        return Tiling(8192, 1, 1, 16, _UNLIMITED)
    if block <= 512:
        return Tiling(block, (1024 if many else 512) // block, 1, 1, _UNLIMITED)
    if block == 1024:
        return Tiling(block, 4 if many else 1, 1, 8 if many and read == 2 else 4, _UNLIMITED)
    return Tiling(block, 1, 1, 8 if block <= 4096 else 16, _UNLIMITED)


@lru_cache(maxsize=4096)
def backward_tiling(N: int, D: int, itemsize: int, sums: bool, sms: int) -> Tiling:
    """The backward's tiling for N rows of D elements on a device of `sms` multiprocessors; `sums`: with the
    weight's gradient.

    Few programs keep the partial weight gradients small; asynchronous copies (stages) keep enough loads in
    flight for them. Without these gradients a tile a program is faster. Summing r again in the same reduction
    as g*n costs as much as reading it from memory.
    """
    block = triton.next_power_of_2(D)
    if block > BACKWARD_LIMIT:
        return Tiling(2048, 1, 1, 4, 8 * sms)
    if not sums:
        tile = max(block, 4096 if 16 * sms <= N else 1024)
        return Tiling(block, tile // block, 1, tile // 1024, _UNLIMITED, hold=block < 16384)
    if block <= 1024:
        tile, warps, resident = (2048, 2, 4) if block <= 512 else (2048, 4, 3)
    elif itemsize == 2:
        tile, warps, resident = 8192, 8 if block == 2048 else 16, 1
    else:
        tile, warps, resident = 4096, 8 if block <= 4096 else 16, 1
    rows = max(1, tile // block)
    while rows > 1 and rows * sms > N:
        rows //= 2
    stages = 3 if block * rows * itemsize <= 2**14 else 2 if itemsize == 2 else 1
    stream = N * D * itemsize >= _STREAM
    return Tiling(block, rows, stages, warps, resident * sms, hold=block < 16384, stream=stream)


def sum_tiling(D: int) -> tuple[int, int, int]:
    """Partials and columns of a tile of the final sum, and its warps."""
    return (512, 8, 8) if D < 2048 else (256, 32, 4)
