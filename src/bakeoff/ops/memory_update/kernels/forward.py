"""The gradient of a memory's loss: three products over rows, then one launch for both matrices' gradients.

Rows in a tile of ROWS x COLS, DEEP elements of the sum at a time, through tensor cores. One kernel for the
whole chain of a row block would read both matrices again for each block: more traffic than the launches that
it saves are worth.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_update.kernels.products import _down, _outer, _product, _slope, _tile

__all__: list[str] = []


@triton.jit
def _narrow(w1, w2, narrow1, narrow2, size1: tl.int64, size2: tl.int64, BLOCK: tl.constexpr):
    """Both matrices in the dtype of products: reads 4 bytes an element, writes 2.

    That sizes are multiples of 16, where they are, is what lets accesses be wide: both are specialized.
    """
    first = tl.cdiv(size1, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if block < first:
        at = block * BLOCK + lane
        x = tl.load(w1 + at, mask=at < size1, other=0.0)
        tl.store(narrow1 + at, x.to(narrow1.dtype.element_ty), mask=at < size1)
    else:
        at = (block - first) * BLOCK + lane
        x = tl.load(w2 + at, mask=at < size2, other=0.0)
        tl.store(narrow2 + at, x.to(narrow2.dtype.element_ty), mask=at < size2)


@triton.jit(do_not_specialize=["N", "k_units"])
def _hidden(
    k, w1, b1, z, h,
    N: tl.int32, k_units: tl.int32,
    D: tl.constexpr, H: tl.constexpr, K_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z = k w1' + b1 and h = silu(z): 2 D H FLOPs a row; reads k and w1, writes z and h."""
    group, _, row, here, j, there = _tile(N, H, ROWS, COLS)
    k_row = k_units * K_ALIGN
    sums = tl.zeros([ROWS, COLS], tl.float32)
    own = w1 + group.to(tl.int64) * (H * D)
    sums = _product(sums, k + row * k_row, k_row, own, here, j, there, D, H, True, DEEP, PRECISION)
    sums += tl.load(b1 + group * H + j, mask=there, other=0.0)[None, :]
    at = tl.arange(0, ROWS)[:, None] * H + j[None, :]
    inside = here[:, None] & there[None, :]
    tl.store(z + row * H + at, sums.to(z.dtype.element_ty), mask=inside)
    tl.store(h + row * H + at, (sums * tl.sigmoid(sums)).to(h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "v_units"])
def _error(
    h, w2, b2, v, weight, dy, e, losses, sums2,
    N: tl.int32, v_units: tl.int32,
    H: tl.constexpr, V: tl.constexpr, V_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e = h w2' + b2 - v and dy = weight * e; the tile's share of the loss, and of dy's sum over rows.

    2 H V FLOPs a row; reads h, w2 and v, writes dy, and e where asked for.
    """
    group, tile, row, here, j, there = _tile(N, V, ROWS, COLS)
    v_row = v_units * V_ALIGN
    i = tl.arange(0, ROWS)
    inside = here[:, None] & there[None, :]
    error = tl.zeros([ROWS, COLS], tl.float32)
    own = w2 + group.to(tl.int64) * (V * H)
    error = _product(error, h + row * H, H, own, here, j, there, H, V, True, DEEP, PRECISION)
    error += tl.load(b2 + group * V + j, mask=there, other=0.0)[None, :]
    at_v = v + row * v_row + (i[:, None] * v_row + j[None, :])
    error -= tl.load(at_v, mask=inside, other=0.0).to(tl.float32)
    error = tl.where(inside, error, 0.0)
    at = i[:, None] * V + j[None, :]
    weighted = error
    if weight is not None:
        weighted *= tl.load(weight + row + i, mask=here, other=0.0).to(tl.float32)[:, None]
    if e is not None:
        tl.store(e + row * V + at, error.to(e.dtype.element_ty), mask=inside)
    tl.store(dy + row * V + at, weighted.to(dy.dtype.element_ty), mask=inside)
    if losses is not None:
        tl.store(losses + tl.program_id(0), tl.sum(weighted * error))
    if sums2 is not None:
        tl.store(sums2 + tile.to(tl.int64) * V + j, tl.sum(weighted, 0), mask=there)


@triton.jit(do_not_specialize=["N"])
def _hidden_slope(
    dy, w2, z, dh, dz, sums1,
    N: tl.int32,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dh = dy w2 and dz = dh * silu'(z); the tile's share of dz's sum over rows.

    2 H V FLOPs a row; reads dy, w2 and z, writes dz, and dh where asked for.
    """
    group, tile, row, here, j, there = _tile(N, H, ROWS, COLS)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    own = w2 + group.to(tl.int64) * (V * H)
    sums = _product(sums, dy + row * V, V, own, here, j, there, V, H, False, DEEP, PRECISION)
    at = tl.arange(0, ROWS)[:, None] * H + j[None, :]
    inside = here[:, None] & there[None, :]
    if dh is not None:
        tl.store(dh + row * H + at, sums.to(dh.dtype.element_ty), mask=inside)
    # Where there is no row, dy was read as 0.
    slope = sums * _slope(tl.load(z + row * H + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(dz + row * H + at, slope.to(dz.dtype.element_ty), mask=inside)
    if sums1 is not None:
        tl.store(sums1 + tile.to(tl.int64) * H + j, tl.sum(slope, 0), mask=there)


@triton.jit(do_not_specialize=["N", "k_units", "tiles", "factor"])
def _gradient(
    dz, k, dy, h, sums1, sums2, g, squares,
    N: tl.int32, k_units: tl.int32, tiles: tl.int32, factor: tl.float32,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g = factor * (dz' k | sum dz | dy' h | sum dy), flat, and each program's share of its square.

    A tile of a matrix a program, or COLS of a bias; 2 H (D + V) FLOPs a row, no atomics.
    """
    across1: tl.constexpr = (D + COLS - 1) // COLS
    across2: tl.constexpr = (H + COLS - 1) // COLS
    upto1: tl.constexpr = across1 * ((H + ROWS - 1) // ROWS)
    upto2: tl.constexpr = upto1 + across2 * ((V + ROWS - 1) // ROWS)
    upto3: tl.constexpr = upto2 + (H + COLS - 1) // COLS
    programs: tl.constexpr = upto3 + (V + COLS - 1) // COLS
    group = tl.program_id(0) // programs
    t = tl.program_id(0) % programs
    first = group.to(tl.int64) * N
    own = g + group.to(tl.int64) * (H * D + H + V * H + V)
    k_row = k_units * K_ALIGN
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    if t < upto2:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        if t < upto1:
            i += (t // across1) * ROWS
            j += (t % across1) * COLS
            sums = _outer(sums, dz + first * H, k + first * k_row, k_row, i, j, N, H, D, DEEP, PRECISION)
            at = i[:, None] * D + j[None, :]
            inside = (i < H)[:, None] & (j < D)[None, :]
        else:
            i += ((t - upto1) // across2) * ROWS
            j += ((t - upto1) % across2) * COLS
            h_row = tl.full([], H, tl.int32)
            sums = _outer(sums, dy + first * V, h + first * H, h_row, i, j, N, V, H, DEEP, PRECISION)
            at = (H * D + H) + i[:, None] * H + j[None, :]
            inside = (i < V)[:, None] & (j < H)[None, :]
        sums *= factor
        tl.store(own + at, sums, mask=inside)
        square = tl.sum(sums * sums)
    else:
        if t < upto3:
            j += (t - upto2) * COLS
            total = factor * _down(sums1 + group.to(tl.int64) * tiles * H, tiles, j, H)
            tl.store(own + H * D + j, total, mask=j < H)
        else:
            j += (t - upto3) * COLS
            total = factor * _down(sums2 + group.to(tl.int64) * tiles * V, tiles, j, V)
            tl.store(own + (H * D + H + V * H) + j, total, mask=j < V)
        square = tl.sum(total * total, 0)
    if squares is not None:
        tl.store(squares + tl.program_id(0), square)
