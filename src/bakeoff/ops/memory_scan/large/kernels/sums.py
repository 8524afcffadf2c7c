"""Sums over a large chunk's tokens: the step that they make of the state, and what arrives for its matrices.

A program has a tile of ROWS x COLS of a matrix, and takes DEEP tokens at a time.
"""

import triton
import triton.language as tl

from bakeoff.kernels.precision import turned
from bakeoff.ops.memory_scan.large.kernels.state import _down, _ends

__all__ = ["_arrived", "_learn"]


@triton.jit
def _over_tokens(
    total, a, x, i, j, b,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # total[i, j] += sum over b tokens t of a[t, i] x[t, j].
    t = tl.arange(0, DEEP)
    at_a = a + (t[None, :] * HIGH + i[:, None])
    at_x = x + (t[:, None] * WIDE + j[None, :])
    for start in range(0, b, DEEP):
        left = t < b - start
        rows = tl.load(at_a, mask=(i < HIGH)[:, None] & left[None, :], other=0.0)
        columns = tl.load(at_x, mask=left[:, None] & (j < WIDE)[None, :], other=0.0)
        total = tl.dot(rows, columns, total, input_precision=turned(PRECISION))
        at_a += DEEP * HIGH
        at_x += DEEP * WIDE
    return total


@triton.jit
def _tile(t, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    # Rows and columns of tile t, and its place in its row of tiles.
    across: tl.constexpr = (WIDE + COLS - 1) // COLS
    i = (t // across) * ROWS + tl.arange(0, ROWS)
    j = (t % across) * COLS + tl.arange(0, COLS)
    return i, j, t % across


@triton.jit
def _move(m, s, new_m, new_s, at, inside, in_memory, in_momentum, left):
    # M = beta M + f S - in_memory and S = m S - in_momentum.
    old = tl.load(s + at, mask=inside, other=0.0)
    step = left[1] * old - in_memory
    if m is not None:
        step += left[0] * tl.load(m + at, mask=inside, other=0.0)
    tl.store(new_m + at, step, mask=inside)
    tl.store(new_s + at, left[2] * old - in_momentum, mask=inside)


@triton.jit
def _learn_matrix(
    m, s, new_m, new_s, bias, speed, new_bias, new_speed, a, x, weights, apart, sums, left, g, t, b, tiles,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A tile of memory and momentum; the first of a row of tiles moves the row's biases, too. The tokens'
    # weights in the momentum lie `apart` behind those in the memory.
    i, j, column = _tile(t, WIDE, ROWS, COLS)
    r = tl.arange(0, DEEP)
    at_a = a + (r[None, :] * HIGH + i[:, None])
    at_x = x + (r[:, None] * WIDE + j[None, :])
    weights += r
    in_memory, in_momentum = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, b, DEEP):
        here = r < b - start
        rows = tl.load(at_a, mask=(i < HIGH)[:, None] & here[None, :], other=0.0)
        columns = tl.load(at_x, mask=here[:, None] & (j < WIDE)[None, :], other=0.0)
        weight = tl.load(weights, mask=here, other=0.0)
        weighted = (rows * weight[None, :]).to(rows.dtype)
        in_memory = tl.dot(weighted, columns, in_memory, input_precision=turned(PRECISION))
        weight = tl.load(weights + apart, mask=here, other=0.0)
        weighted = (rows * weight[None, :]).to(rows.dtype)
        in_momentum = tl.dot(weighted, columns, in_momentum, input_precision=turned(PRECISION))
        at_a += DEEP * HIGH
        at_x += DEEP * WIDE
        weights += DEEP
    inside = (i < HIGH)[:, None] & (j < WIDE)[None, :]
    at = g * HIGH * WIDE + (i[:, None] * WIDE + j[None, :])
    _move(m, s, new_m, new_s, at, inside, in_memory, in_momentum, left)
    if column == 0:
        sums += g * tiles * 2 * HIGH
        of_memory = _down(sums, tiles, i, HIGH, 2 * HIGH)
        of_momentum = _down(sums + HIGH, tiles, i, HIGH, 2 * HIGH)
        _move(bias, speed, new_bias, new_speed, g * HIGH + i, i < HIGH, of_memory, of_momentum, left)


@triton.jit(do_not_specialize=["G", "T", "first", "b", "tiles", "c", "C"])
def _learn(
    k, h, dz, e, tables, w1, b1, w2, b2, s1, c1, s2, c2,
    new_w1, new_b1, new_w2, new_b2, new_s1, new_c1, new_s2, new_c2, sums1, sums2, ends,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64, tiles: tl.int64, c: tl.int64, C: tl.int64,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # M = beta M + f S - sums and S = m S - sums. Where w1 and w2 are None, new_w1 and new_w2 are what would
    # be added to beta M. 4 H (D + V) FLOPs a token; 16 bytes an element of the matrices.
    upto1: tl.constexpr = ((H + ROWS - 1) // ROWS) * ((D + COLS - 1) // COLS)
    programs: tl.constexpr = upto1 + ((V + ROWS - 1) // ROWS) * ((H + COLS - 1) // COLS)
    g, t = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    left = _ends(ends, g, c, C)
    row = g * T + first
    weights = tables + 3 * G * T + row
    if t < upto1:
        _learn_matrix(
            w1, s1, new_w1, new_s1, b1, c1, new_b1, new_c1, dz + row * H, k + row * D, weights, G * T,
            sums1, left, g, t, b, tiles, H, D, ROWS, COLS, DEEP, PRECISION,
        )  # fmt: skip
    else:
        _learn_matrix(
            w2, s2, new_w2, new_s2, b2, c2, new_b2, new_c2, e + row * V, h + row * H, weights, G * T, sums2,
            left, g, t - upto1, b, tiles, V, H, ROWS, COLS, DEEP, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _arrived(
    k, q, h, hq, e, do, dv, dh_bar, z_bar, zq_bar, matrix1, matrix2,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # What arrives for the matrices through the tokens, in two parts [2, G, matrix]: Z_bar' k and Zq_bar' q;
    # -dv' s(Z) and E' dH_bar, each with half of the tokens of do' s(Zq). The longest programs come first,
    # so that each of the others shares a multiprocessor with one. 2 H (2 D + 3 V) FLOPs a token.
    each1: tl.constexpr = ((H + ROWS - 1) // ROWS) * ((D + COLS - 1) // COLS)
    each2: tl.constexpr = ((V + ROWS - 1) // ROWS) * ((H + COLS - 1) // COLS)
    p = tl.program_id(0).to(tl.int64)
    longest = 2 * G * each2
    total = tl.zeros((ROWS, COLS), tl.float32)
    if p < longest:
        part, g, t = p // (G * each2), (p // each2) % G, (p % each2).to(tl.int32)
        i, j, _ = _tile(t, H, ROWS, COLS)
        row, own = g * T + first, g * b
        half = tl.minimum(tl.cdiv(b, 2 * DEEP) * DEEP, b)
        for product in range(2):
            if product == 0:
                if part == 0:
                    a, x, count = dv + row * V, h + row * H, b
                else:
                    a, x, count = e + row * V, dh_bar + own * H, b
            else:
                total = tl.where(part == 0, -total, total)
                row += part * half
                a, x = do + row * V, hq + row * H
                count = tl.where(part == 0, half, b - half)
            total = _over_tokens(total, a, x, i, j, count, V, H, DEEP, PRECISION)
        at = (part * G + g) * V * H + (i[:, None] * H + j[None, :])
        tl.store(matrix2 + at, total, mask=(i < V)[:, None] & (j < H)[None, :])
    else:
        p -= longest
        part, g, t = p // (G * each1), (p // each1) % G, (p % each1).to(tl.int32)
        i, j, _ = _tile(t, D, ROWS, COLS)
        if part == 0:
            a, x = z_bar + g * b * H, k + (g * T + first) * D
        else:
            a, x = zq_bar + g * b * H, q + (g * T + first) * D
        total = _over_tokens(total, a, x, i, j, b, H, D, DEEP, PRECISION)
        at = (part * G + g) * H * D + (i[:, None] * D + j[None, :])
        tl.store(matrix1 + at, total, mask=(i < H)[:, None] & (j < D)[None, :])
