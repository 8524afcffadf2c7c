"""Products over a large chunk's tokens, and what stands behind each, before it leaves the registers.

A program has a tile of ROWS tokens and COLS columns, and takes DEEP elements of the sum at a time. Tiles of
the same tokens follow each other, so that the L2 reads these once. What is kept for the backward has a row
for each of a group's T tokens, the rest for each of the chunk's b, which begin at `first`. Z lies without its
bias.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _slope
from bakeoff.ops.memory_update.kernels.products import _product

__all__ = ["_answers", "_errors", "_from_errors", "_from_queries", "_from_slopes", "_hidden", "_slopes",
           "_to_hidden", "_to_keys"]  # fmt: skip


@triton.jit
def _place(T, first, b, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    # A program's group, row tile, column tile, first row of what has T rows a group and of what has b, which
    # of its rows exist, its columns, what exists.
    tiles: tl.constexpr = (WIDTH + COLS - 1) // COLS
    tile = (tl.program_id(0) // tiles).to(tl.int64)
    down = tl.cdiv(b, ROWS)
    g, start = tile // down, (tile % down) * ROWS
    here = tl.arange(0, ROWS) < b - start
    column = tl.program_id(0) % tiles
    j = column * COLS + tl.arange(0, COLS)
    inside = here[:, None] & (j < WIDTH)[None, :]
    return g, tile, column, g * T + first + start, g * b + start, here, j, inside


@triton.jit
def _read(x, row, j, STRIDE: tl.constexpr, inside):
    at = tl.arange(0, inside.shape[0])[:, None] * STRIDE + j[None, :]
    return tl.load(x + row * STRIDE + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(x, value, row, j, STRIDE: tl.constexpr, inside):
    at = tl.arange(0, inside.shape[0])[:, None] * STRIDE + j[None, :]
    tl.store(x + row * STRIDE + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _bias(x, g, j, WIDTH: tl.constexpr):
    return tl.load(x + g * WIDTH + j, mask=j < WIDTH, other=0.0)[None, :]


@triton.jit
def _weights(tables, row, G, T, here):
    # What the tokens' gradients count in the memory and in the momentum, [ROWS, 1].
    at = tables + row + tl.arange(0, here.shape[0])
    in_memory = tl.load(at + 3 * G * T, mask=here, other=0.0)
    in_momentum = tl.load(at + 4 * G * T, mask=here, other=0.0)
    return in_memory[:, None], in_momentum[:, None]


@triton.jit(do_not_specialize=["T", "first", "b"])
def _hidden(
    x, w1, b1, z, h, T: tl.int64, first: tl.int64, b: tl.int64,
    D: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Z = x W1' and s(Z + b1): 2 D H FLOPs a token, D elements read and 2 H written.
    g, _, _, row, _, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    found = tl.zeros((ROWS, COLS), tl.float32)
    found = _product(found, x + row * D, D, w1 + g * H * D, here, j, j < H, D, H, True, DEEP, PRECISION)
    kept = found.to(h.dtype.element_ty)
    if z is not None:
        _write(z, kept, row, j, H, inside)
    found = kept.to(tl.float32) + _bias(b1, g, j, H)
    _write(h, found * tl.sigmoid(found), row, j, H, inside)


@triton.jit(do_not_specialize=["T", "first", "b"])
def _answers(
    hq, w2, b2, o, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # s(Zq) W2' + b2: 2 H V FLOPs a token, H elements read and V written.
    g, _, _, row, _, here, j, inside = _place(T, first, b, V, ROWS, COLS)
    found = tl.zeros((ROWS, COLS), tl.float32)
    found = _product(found, hq + row * H, H, w2 + g * V * H, here, j, j < V, H, V, True, DEEP, PRECISION)
    _write(o, found + _bias(b2, g, j, V), row, j, V, inside)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _errors(
    h, w2, b2, v, tables, e, sums, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # E = 2 (s(Z) W2' + b2 - v) and, next to each other, its tile's sums over rows in memory and in momentum:
    # 2 H V FLOPs a token, H + V elements read and V written.
    g, tile, _, row, _, here, j, inside = _place(T, first, b, V, ROWS, COLS)
    error = tl.zeros((ROWS, COLS), tl.float32)
    error = _product(error, h + row * H, H, w2 + g * V * H, here, j, j < V, H, V, True, DEEP, PRECISION)
    error = 2 * (error + _bias(b2, g, j, V) - _read(v, row, j, V, inside))
    _write(e, error, row, j, V, inside)
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    sums += tile * 2 * V + j  # rows that don't exist weigh 0
    tl.store(sums, tl.sum(in_memory * error, 0), mask=j < V)
    tl.store(sums + V, tl.sum(in_momentum * error, 0), mask=j < V)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _slopes(
    e, w2, z, b1, tables, dh, dz, sums, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dH = E W2 and dZ = dH s'(Z + b1), with sums as in `_errors`: 2 H V FLOPs a token, V + H elements read
    # and 2 H written.
    g, tile, _, row, _, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    carried = tl.zeros((ROWS, COLS), tl.float32)
    carried = _product(carried, e + row * V, V, w2 + g * V * H, here, j, j < H, V, H, False, DEEP, PRECISION)
    if dh is not None:
        _write(dh, carried, row, j, H, inside)
    _, slope, _ = _slope(_read(z, row, j, H, inside) + _bias(b1, g, j, H))
    slope *= carried
    _write(dz, slope, row, j, H, inside)
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    sums += tile * 2 * H + j
    tl.store(sums, tl.sum(in_memory * slope, 0), mask=j < H)
    tl.store(sums + H, tl.sum(in_momentum * slope, 0), mask=j < H)


# Backward. What arrives for y is called y_bar. ------------------------------------------------------------


@triton.jit
def _row_dots(dots, along, asked, row, part, here, PARTS, rows):
    # A column tile's share of what arrives for the tokens' weights in memory or in momentum; `dots`
    # [2, PARTS, rows].
    at = dots + part * rows + row + tl.arange(0, here.shape[0])
    tl.store(at, -tl.sum(along * asked, 1), mask=here)


@triton.jit
def _in_both(
    x, STRIDE: tl.constexpr, narrow, here, j, in_memory, in_momentum,
    WIDE: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # x's products with both of what arrives for a matrix [STRIDE, WIDE] in memory and in momentum, weighted.
    there = j < WIDE
    found = tl.zeros((here.shape[0], j.shape[0]), tl.float32)
    found = _product(found, x, STRIDE, narrow, here, j, there, STRIDE, WIDE, False, DEEP, PRECISION)
    both = in_memory * found
    narrow += STRIDE * WIDE
    found = tl.zeros((here.shape[0], j.shape[0]), tl.float32)
    found = _product(found, x, STRIDE, narrow, here, j, there, STRIDE, WIDE, False, DEEP, PRECISION)
    return both + in_momentum * found


@triton.jit
def _asked(
    x, DEPTH: tl.constexpr, narrow, of_memory, of_momentum, along, row_dots, row, part, rows, here, g, j,
    in_memory, in_momentum, WIDTH: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # What arrives for `along` [tokens, WIDTH], the gradients' factor beside x: x's products with both of what
    # arrives for the matrix [WIDTH, DEPTH], weighted. To `row_dots` their products with `along`.
    there, inside = j < WIDTH, here[:, None] & (j < WIDTH)[None, :]
    found = tl.zeros((here.shape[0], j.shape[0]), tl.float32)
    found = _product(found, x, DEPTH, narrow, here, j, there, DEPTH, WIDTH, True, DEEP, PRECISION)
    found += _bias(of_memory, g, j, WIDTH)
    _row_dots(row_dots, _read(along, row, j, WIDTH, inside), found, row, part, here, PARTS, rows)
    both = in_memory * found
    narrow += WIDTH * DEPTH
    found = tl.zeros((here.shape[0], j.shape[0]), tl.float32)
    found = _product(found, x, DEPTH, narrow, here, j, there, DEPTH, WIDTH, True, DEEP, PRECISION)
    found += _bias(of_momentum, g, j, WIDTH)
    _row_dots(row_dots, _read(along, row, j, WIDTH, inside), found, row, PARTS + part, here, PARTS, rows)
    return both + in_momentum * found


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _from_slopes(
    k, narrow1, z, dh, dz, b1, b1_bar, c1_bar, tables, dh_bar, z_bar, row_dots,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    D: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Asks what arrives for W1 and S1 with the keys. Gives what arrives for dH, and for Z from dZ alone.
    # 4 D H FLOPs a token, D + 3 H elements read and 2 H written.
    g, _, column, row, own, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    arrives = -_asked(
        k + row * D, D, narrow1 + g * 3 * H * D, b1_bar, c1_bar, dz, row_dots, row, column, G * T, here, g, j,
        in_memory, in_momentum, H, PARTS, DEEP, PRECISION,
    )  # fmt: skip
    _, slope, bend = _slope(_read(z, row, j, H, inside) + _bias(b1, g, j, H))
    _write(dh_bar, arrives * slope, own, j, H, inside)
    _write(z_bar, arrives * bend * _read(dh, row, j, H, inside), own, j, H, inside)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _from_errors(
    h, dh_bar, narrow2, e, do, b2_bar, c2_bar, tables, dv, sums, row_dots,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Asks what arrives for W2 and S2 with the hidden units, and W2 with what arrives for dH. Gives dv, the
    # negative of what arrives for the answers to keys. 6 H V FLOPs a token, 2 H + 2 V elements read and V
    # written.
    g, tile, column, row, own, here, j, inside = _place(T, first, b, V, ROWS, COLS)
    matrix = narrow2 + g * 3 * V * H
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    arrives = -_asked(
        h + row * H, H, matrix, b2_bar, c2_bar, e, row_dots, row, PART + column, G * T, here, g, j,
        in_memory, in_momentum, V, PARTS, DEEP, PRECISION,
    )  # fmt: skip
    arrives = 2 * _product(
        arrives, dh_bar + own * H, H, matrix + 2 * V * H, here, j, j < V, H, V, True, DEEP, PRECISION
    )
    _write(dv, -arrives, row, j, V, inside)
    # Rows that don't exist have biases alone, weighed with 0.
    total = tl.sum(arrives + _read(do, row, j, V, inside), 0)
    tl.store(sums + tile * V + j, total, mask=j < V)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _to_hidden(
    e, dv, narrow2, z, b1, tables, z_bar, sums, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # What arrives for Z of keys, added up in z_bar: 6 H V FLOPs a token, 2 V + 2 H elements read and H
    # written.
    g, tile, _, row, own, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    matrix = narrow2 + g * 3 * V * H
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    less = _in_both(e + row * V, V, matrix, here, j, in_memory, in_momentum, H, DEEP, PRECISION)
    matrix += 2 * V * H
    less = _product(less, dv + row * V, V, matrix, here, j, j < H, V, H, False, DEEP, PRECISION)
    _, slope, _ = _slope(_read(z, row, j, H, inside) + _bias(b1, g, j, H))
    arrives = _read(z_bar, own, j, H, inside) - less * slope
    _write(z_bar, arrives, own, j, H, inside)
    tl.store(sums + tile * 2 * H + j, tl.sum(arrives, 0), mask=j < H)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _to_keys(
    dz, z_bar, narrow1, tables, dk, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    D: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # What arrives for keys: 6 D H FLOPs a token, 2 H elements read and D written.
    g, _, _, row, own, here, j, inside = _place(T, first, b, D, ROWS, COLS)
    matrix = narrow1 + g * 3 * H * D
    in_memory, in_momentum = _weights(tables, row, G, T, here)
    found = -_in_both(dz + row * H, H, matrix, here, j, in_memory, in_momentum, D, DEEP, PRECISION)
    matrix += 2 * H * D
    found = _product(found, z_bar + own * H, H, matrix, here, j, j < D, H, D, False, DEEP, PRECISION)
    _write(dk, found, row, j, D, inside)


@triton.jit(do_not_specialize=["T", "first", "b"])
def _from_queries(
    do, narrow2, zq, b1, zq_bar, sums, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # What arrives for Z of queries: 2 H V FLOPs a token, V + H elements read and H written.
    g, tile, _, row, own, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    w2 = narrow2 + (g * 3 + 2) * V * H
    asks = tl.zeros((ROWS, COLS), tl.float32)
    asks = _product(asks, do + row * V, V, w2, here, j, j < H, V, H, False, DEEP, PRECISION)
    _, slope, _ = _slope(_read(zq, row, j, H, inside) + _bias(b1, g, j, H))
    asks *= slope
    _write(zq_bar, asks, own, j, H, inside)
    tl.store(sums + tile * 2 * H + H + j, tl.sum(asks, 0), mask=j < H)
