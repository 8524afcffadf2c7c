"""What stands between the products over a large chunk's tokens.

A program has a tile of ROWS tokens and COLS columns. What is kept for the backward has a row for each of a
group's T tokens, the rest for each of the chunk's b, which begin at `first`. Z lies without its bias.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _slope

__all__ = ["_errors", "_from_errors", "_from_slopes", "_hidden", "_slopes", "_to_hidden"]


@triton.jit
def _place(T, first, b, WIDTH, ROWS: tl.constexpr, COLS: tl.constexpr):
    # A program's group, row tile, rows of what has T rows a group and of what has b, columns, what exists.
    tiles = tl.cdiv(b, ROWS)
    tile = tl.program_id(0).to(tl.int64)
    g = tile // tiles
    t = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (t < b)[:, None] & (j < WIDTH)[None, :]
    return g, tile, g * T + first + t, g * b + t, t < b, j, inside


@triton.jit
def _read(x, row, j, WIDTH, inside):
    return tl.load(x + row[:, None] * WIDTH + j[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(x, value, row, j, WIDTH, inside):
    tl.store(x + row[:, None] * WIDTH + j[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _bias(x, g, j, WIDTH):
    return tl.load(x + g * WIDTH + j, mask=j < WIDTH, other=0.0)[None, :]


@triton.jit
def _weights(lr, tables, rows, G, T, here):
    # What the tokens' gradients count in the memory and in the momentum, [ROWS, 1].
    rate = tl.load(lr + rows, mask=here, other=0.0).to(tl.float32)
    total = tl.load(tables + rows, mask=here, other=0.0)
    left = tl.load(tables + G * T + rows, mask=here, other=0.0)
    return (rate * total)[:, None], (rate * left)[:, None]


@triton.jit(do_not_specialize=["T", "first", "b"])
def _hidden(
    z, zq, b1, h, hq, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # s(Z + b1) of keys and queries: 4 elements a hidden unit and token.
    g, _, rows, own, _, j, inside = _place(T, first, b, H, ROWS, COLS)
    bias = _bias(b1, g, j, H)
    x = _read(z, rows, j, H, inside) + bias
    _write(h, x * tl.sigmoid(x), own, j, H, inside)
    x = _read(zq, rows, j, H, inside) + bias
    _write(hq, x * tl.sigmoid(x), own, j, H, inside)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _errors(
    y, v, o, b2, lr, tables, e, weighted, sums, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # E = 2 (y + b2 - v) and, next to each other, E in memory and in momentum, with their tile's sums over
    # rows. `o` gets its bias. 7 elements an output and token.
    g, tile, rows, own, here, j, inside = _place(T, first, b, V, ROWS, COLS)
    bias = _bias(b2, g, j, V)
    _write(o, _read(o, rows, j, V, inside) + bias, rows, j, V, inside)
    error = 2 * (_read(y, own, j, V, inside) + bias - _read(v, rows, j, V, inside))
    _write(e, error, rows, j, V, inside)
    in_memory, in_momentum = _weights(lr, tables, rows, G, T, here)
    _write(weighted, in_memory * error, own, j, 2 * V, inside)
    _write(weighted, in_momentum * error, own, V + j, 2 * V, inside)
    sums += tile * 2 * V + j  # rows that don't exist weigh 0
    tl.store(sums, tl.sum(in_memory * error, 0), mask=j < V)
    tl.store(sums + V, tl.sum(in_momentum * error, 0), mask=j < V)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _slopes(
    z, dh, b1, lr, tables, weighted, sums, G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # dZ = dH s'(Z + b1) in memory and in momentum, as in `_errors`: 4 elements a hidden unit and token.
    g, tile, rows, own, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    _, slope, _ = _slope(_read(z, rows, j, H, inside) + _bias(b1, g, j, H))
    slope *= _read(dh, rows, j, H, inside)
    in_memory, in_momentum = _weights(lr, tables, rows, G, T, here)
    _write(weighted, in_memory * slope, own, j, 2 * H, inside)
    _write(weighted, in_momentum * slope, own, H + j, 2 * H, inside)
    sums += tile * 2 * H + j
    tl.store(sums, tl.sum(in_memory * slope, 0), mask=j < H)
    tl.store(sums + H, tl.sum(in_momentum * slope, 0), mask=j < H)


# Backward. What arrives for y is called y_bar. ------------------------------------------------------------


@triton.jit
def _row_dots(dots, along, asked, row, part, here, PARTS):
    # A column tile's share of what arrives for the tokens' weights in memory and in momentum.
    at = dots + (row * PARTS + part) * 2
    tl.store(at, -tl.sum(along[0] * asked, 1), mask=here)
    tl.store(at + 1, -tl.sum(along[1] * asked, 1), mask=here)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _from_slopes(
    z, dh, asked, b1, b1_bar, c1_bar, lr, tables, h, dh_bar, rows1, row_dots,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # `asked` are the keys' products with what arrives for W1 and S1. Gives s(Z), what arrives for dH, and
    # in rows1 [3 H] dZ in memory and in momentum, both negative, and what arrives for Z from dZ alone.
    # 9 elements a hidden unit and token.
    g, _, rows, own, here, j, inside = _place(T, first, b, H, ROWS, COLS)
    unit, slope, bend = _slope(_read(z, rows, j, H, inside) + _bias(b1, g, j, H))
    carried = _read(dh, rows, j, H, inside)
    to_memory = _read(asked, own, j, 2 * H, inside) + _bias(b1_bar, g, j, H)
    to_momentum = _read(asked, own, H + j, 2 * H, inside) + _bias(c1_bar, g, j, H)
    in_memory, in_momentum = _weights(lr, tables, rows, G, T, here)
    arrives = -(in_memory * to_memory + in_momentum * to_momentum)
    _row_dots(row_dots, (to_memory, to_momentum), carried * slope, rows, tl.program_id(1), here, PARTS)
    _write(h, unit, own, j, H, inside)
    _write(dh_bar, arrives * slope, own, j, H, inside)
    _write(rows1, -in_memory * carried * slope, own, j, 3 * H, inside)
    _write(rows1, -in_momentum * carried * slope, own, H + j, 3 * H, inside)
    _write(rows1, arrives * carried * bend, own, 2 * H + j, 3 * H, inside)


@triton.jit(do_not_specialize=["G", "T", "first", "b"])
def _from_errors(
    e, asked, back, do, b2_bar, c2_bar, lr, tables, rows2, dv, sums, row_dots,
    G: tl.int64, T: tl.int64, first: tl.int64, b: tl.int64,
    V: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # `asked` are the hidden units' products with what arrives for W2 and S2, `back` those of what arrives
    # for dH with W2. Gives in rows2 [3 V] E in memory and in momentum, both negative, and what arrives for
    # the answers to keys, whose negative is dv. 9 elements an output and token.
    g, tile, rows, own, here, j, inside = _place(T, first, b, V, ROWS, COLS)
    error = _read(e, rows, j, V, inside)
    to_memory = _read(asked, own, j, 2 * V, inside) + _bias(b2_bar, g, j, V)
    to_momentum = _read(asked, own, V + j, 2 * V, inside) + _bias(c2_bar, g, j, V)
    in_memory, in_momentum = _weights(lr, tables, rows, G, T, here)
    arrives = 2 * (_read(back, own, j, V, inside) - (in_memory * to_memory + in_momentum * to_momentum))
    part = PART + tl.program_id(1)
    _row_dots(row_dots, (to_memory, to_momentum), error, rows, part, here, PARTS)
    _write(rows2, -in_memory * error, own, j, 3 * V, inside)
    _write(rows2, -in_momentum * error, own, V + j, 3 * V, inside)
    _write(rows2, arrives, own, 2 * V + j, 3 * V, inside)
    _write(dv, -arrives, rows, j, V, inside)
    total = tl.sum(arrives + _read(do, rows, j, V, inside), 0)
    tl.store(sums + tile * V + j, total, mask=j < V)


@triton.jit(do_not_specialize=["T", "first", "b"])
def _to_hidden(
    z, zq, b1, h_bar, hq_bar, rows1, hq, zq_bar, sums, T: tl.int64, first: tl.int64, b: tl.int64,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # What arrives for Z, added up in rows1, and for the queries' Z; s of the latter. 8 elements a hidden
    # unit and token.
    g, tile, rows, own, _, j, inside = _place(T, first, b, H, ROWS, COLS)
    bias = _bias(b1, g, j, H)
    _, slope, _ = _slope(_read(z, rows, j, H, inside) + bias)
    arrives = _read(rows1, own, 2 * H + j, 3 * H, inside) + _read(h_bar, own, j, H, inside) * slope
    _write(rows1, arrives, own, 2 * H + j, 3 * H, inside)
    unit, slope, _ = _slope(_read(zq, rows, j, H, inside) + bias)
    asks = _read(hq_bar, own, j, H, inside) * slope
    _write(hq, unit, own, j, H, inside)
    _write(zq_bar, asks, own, j, H, inside)
    tl.store(sums + tile * H + j, tl.sum(arrives + asks, 0), mask=j < H)
