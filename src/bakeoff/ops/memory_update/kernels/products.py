"""Tiles of matrix products, and the activation: what every kernel of memory_update is made of."""

import triton
import triton.language as tl

from bakeoff.kernels.precision import turned

__all__: list[str] = []


@triton.jit
def _tile(N, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    # A program's group, its row tile (in the group and counted through all), the columns of its tile, and
    # which of its rows and columns exist.
    tiles: tl.constexpr = (WIDTH + COLS - 1) // COLS
    tile = tl.program_id(0) // tiles
    down = tl.cdiv(N, ROWS)
    group = tile // down
    first = (tile % down) * ROWS
    j = (tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS)
    row = group.to(tl.int64) * N + first
    return group, tile, row, tl.arange(0, ROWS) < N - first, j, j < WIDTH


@triton.jit
def _product(
    sums, a, a_row, b, here, j, there,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BY_ROWS: tl.constexpr, DEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # sums[i, j] += sum over d of a[i, d] * b[j, d] (BY_ROWS) or b[d, j]. `a` begins at the tile's first row.
    exactness: tl.constexpr = PRECISION if BY_ROWS else turned(PRECISION)
    i = tl.arange(0, sums.shape[0])
    d = tl.arange(0, DEEP)
    at_a = a + (i[:, None] * a_row + d[None, :])
    if BY_ROWS:  # noqa: SIM108  a choice between constants
        at_b = b + (j[None, :] * DEPTH + d[:, None])
    else:
        at_b = b + (d[:, None] * WIDTH + j[None, :])
    for start in range(0, DEPTH, DEEP):
        if DEPTH % DEEP == 0:
            x = tl.load(at_a, mask=here[:, None], other=0.0)
            y = tl.load(at_b, mask=there[None, :], other=0.0)
        else:
            left = d < DEPTH - start
            x = tl.load(at_a, mask=here[:, None] & left[None, :], other=0.0)
            y = tl.load(at_b, mask=there[None, :] & left[:, None], other=0.0)
        sums = tl.dot(x, y, sums, input_precision=exactness)
        at_a += DEEP
        at_b += DEEP if BY_ROWS else DEEP * WIDTH
    return sums


@triton.jit
def _outer(
    sums, a, b, b_row, i, j, N,
    A_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # sums[i, j] += sum over rows n of a[n, i] * b[n, j]; `a` and `b` begin at the group's first row.
    n = tl.arange(0, DEEP)
    at_a = a + (n[None, :] * A_WIDTH + i[:, None])
    at_b = b + (n[:, None] * b_row + j[None, :])
    wide, high = j < B_WIDTH, i < A_WIDTH
    for start in range(0, N, DEEP):
        left = n < N - start
        x = tl.load(at_a, mask=high[:, None] & left[None, :], other=0.0)
        y = tl.load(at_b, mask=left[:, None] & wide[None, :], other=0.0)
        sums = tl.dot(x, y, sums, input_precision=turned(PRECISION))
        at_a += DEEP * A_WIDTH
        at_b += DEEP * b_row.to(tl.int64)
    return sums


@triton.jit
def _down(parts, count, j, WIDTH: tl.constexpr):
    # Column sums of parts[count, WIDTH], in a fixed order.
    r = tl.arange(0, 16)
    at = parts + (r[:, None] * WIDTH + j[None, :])
    total = tl.zeros([j.shape[0]], tl.float32)
    for start in range(0, count, 16):
        some = tl.load(at, mask=(r < count - start)[:, None] & (j < WIDTH)[None, :], other=0.0)
        total += tl.sum(some, 0)
        at += 16 * WIDTH
    return total


@triton.jit
def _slope(z):
    # silu'(z).
    s = tl.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def _bend(z):
    # silu''(z).
    s = tl.sigmoid(z)
    return s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))


@triton.jit
def _finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))
