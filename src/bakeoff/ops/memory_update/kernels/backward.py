"""The derivative of the step: ten products, tiled as in `forward`, with what is elementwise in them.

What arrives for a value y is called y_bar. All is linear in the cotangent u = (u1, v1, u2, v2) of the
gradient, and multiplied by `factor`, that of the gradient, when results are written. Where a group's norm is
not finite, results are zeros.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_update.kernels.products import (
    _bend,
    _down,
    _finite,
    _outer,
    _product,
    _slope,
    _tile,
)

__all__: list[str] = []


@triton.jit(do_not_specialize=["N", "k_units"])
def _z_bar(
    k, u1, v1, z, dh, dh_bar, z_bar,
    N: tl.int32, k_units: tl.int32,
    D: tl.constexpr, H: tl.constexpr, K_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz_bar = k u1' + v1; dh_bar = dz_bar silu'(z), and z_bar = dz_bar dh silu''(z) so far.

    2 D H FLOPs a row; reads k, u1, z and dh, writes dh_bar and z_bar.
    """
    group, _, row, here, j, there = _tile(N, H, ROWS, COLS)
    k_row = k_units * K_ALIGN
    sums = tl.zeros([ROWS, COLS], tl.float32)
    own = u1 + group.to(tl.int64) * (H * D)
    sums = _product(sums, k + row * k_row, k_row, own, here, j, there, D, H, True, DEEP, PRECISION)
    sums += tl.load(v1 + group * H + j, mask=there, other=0.0)[None, :]
    at = tl.arange(0, ROWS)[:, None] * H + j[None, :]
    inside = here[:, None] & there[None, :]
    x = tl.load(z + row * H + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(dh + row * H + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dh_bar + row * H + at, (sums * _slope(x)).to(dh_bar.dtype.element_ty), mask=inside)
    tl.store(z_bar + row * H + at, (sums * y * _bend(x)).to(z_bar.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "factor"])
def _e_bar(
    h, u2, dh_bar, w2, v2, dy, e, weight, loss_bar, norm, e_bar, dv, weights, sums2,
    N: tl.int32, factor: tl.float32,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dy_bar = h u2' + v2 + dh_bar w2'; e_bar = weight * dy_bar + loss_bar * dy, and dv = -factor * e_bar.

    The tile's shares of the weights' gradient and of e_bar's sum over rows. 4 H V FLOPs a row; reads h, u2,
    dh_bar, w2 and dy, writes e_bar and dv.
    """
    group, tile, row, here, j, there = _tile(N, V, ROWS, COLS)
    i = tl.arange(0, ROWS)
    inside = here[:, None] & there[None, :]
    good = _finite(tl.load(norm + group))
    matrix = group.to(tl.int64) * (V * H)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    sums = _product(sums, h + row * H, H, u2 + matrix, here, j, there, H, V, True, DEEP, PRECISION)
    sums = _product(sums, dh_bar + row * H, H, w2 + matrix, here, j, there, H, V, True, DEEP, PRECISION)
    sums += tl.load(v2 + group * V + j, mask=there, other=0.0)[None, :]
    sums = tl.where(inside, sums, 0.0)
    at = i[:, None] * V + j[None, :]
    of_loss = 0.0
    if loss_bar is not None:
        of_loss = tl.load(loss_bar + group)
    if weight is not None:
        error = tl.load(e + row * V + at, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            share = factor * tl.sum(sums * error + (0.5 * of_loss) * error * error, 1)
            tiles: tl.constexpr = (V + COLS - 1) // COLS
            at_share = weights + (row + i) * tiles + tl.program_id(0) % tiles
            tl.store(at_share, tl.where(good, share, 0.0), mask=here)
        sums *= tl.load(weight + row + i, mask=here, other=0.0).to(tl.float32)[:, None]
    sums += of_loss * tl.load(dy + row * V + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(e_bar + row * V + at, sums.to(e_bar.dtype.element_ty), mask=inside)
    if dv is not None:
        tl.store(dv + row * V + at, tl.where(good, -factor * sums, 0.0).to(dv.dtype.element_ty), mask=inside)
    if sums2 is not None:
        tl.store(sums2 + tile.to(tl.int64) * V + j, tl.sum(sums, 0), mask=there)


@triton.jit(do_not_specialize=["N"])
def _h_bar(
    dy, u2, e_bar, w2, z, z_bar, sums1,
    N: tl.int32,
    H: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h_bar = dy u2 + e_bar w2, and z_bar += h_bar silu'(z); the tile's share of z_bar's sum over rows.

    4 H V FLOPs a row; reads dy, u2, e_bar, w2 and z, updates z_bar.
    """
    group, tile, row, here, j, there = _tile(N, H, ROWS, COLS)
    matrix = group.to(tl.int64) * (V * H)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    sums = _product(sums, dy + row * V, V, u2 + matrix, here, j, there, V, H, False, DEEP, PRECISION)
    sums = _product(sums, e_bar + row * V, V, w2 + matrix, here, j, there, V, H, False, DEEP, PRECISION)
    at = tl.arange(0, ROWS)[:, None] * H + j[None, :]
    inside = here[:, None] & there[None, :]
    sums *= _slope(tl.load(z + row * H + at, mask=inside, other=0.0).to(tl.float32))
    sums += tl.load(z_bar + row * H + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(z_bar + row * H + at, sums.to(z_bar.dtype.element_ty), mask=inside)
    if sums1 is not None:
        tl.store(sums1 + tile.to(tl.int64) * H + j, tl.sum(sums, 0), mask=there)


@triton.jit(do_not_specialize=["N", "factor"])
def _k_bar(
    dz, u1, z_bar, w1, norm, dk,
    N: tl.int32, factor: tl.float32,
    D: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk = factor * (dz u1 + z_bar w1): 4 D H FLOPs a row; reads dz, u1, z_bar and w1, writes dk."""
    group, _, row, here, j, there = _tile(N, D, ROWS, COLS)
    good = _finite(tl.load(norm + group))
    matrix = group.to(tl.int64) * (H * D)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    sums = _product(sums, dz + row * H, H, u1 + matrix, here, j, there, H, D, False, DEEP, PRECISION)
    sums = _product(sums, z_bar + row * H, H, w1 + matrix, here, j, there, H, D, False, DEEP, PRECISION)
    at = tl.arange(0, ROWS)[:, None] * D + j[None, :]
    sums = tl.where(good, factor * sums, 0.0)
    tl.store(dk + row * D + at, sums.to(dk.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["N", "k_units", "tiles", "factor"])
def _memory_bar(
    z_bar, k, dy, dh_bar, e_bar, h, sums1, sums2, norm, dw1, db1, dw2, db2,
    N: tl.int32, k_units: tl.int32, tiles: tl.int32, factor: tl.float32,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds factor * (z_bar' k | sum z_bar | dy' dh_bar + e_bar' h | sum e_bar) to the memory's gradients.

    Programs as in `forward._gradient`; 2 H (D + 2 V) FLOPs a row.
    """
    across1: tl.constexpr = (D + COLS - 1) // COLS
    across2: tl.constexpr = (H + COLS - 1) // COLS
    upto1: tl.constexpr = across1 * ((H + ROWS - 1) // ROWS)
    upto2: tl.constexpr = upto1 + across2 * ((V + ROWS - 1) // ROWS)
    upto3: tl.constexpr = upto2 + (H + COLS - 1) // COLS
    programs: tl.constexpr = upto3 + (V + COLS - 1) // COLS
    group = (tl.program_id(0) // programs).to(tl.int64)
    t = tl.program_id(0) % programs
    if not _finite(tl.load(norm + group)):
        return
    first = group * N
    k_row = k_units * K_ALIGN
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    if t < upto1:
        i += (t // across1) * ROWS
        j += (t % across1) * COLS
        sums = tl.zeros([ROWS, COLS], tl.float32)
        sums = _outer(sums, z_bar + first * H, k + first * k_row, k_row, i, j, N, H, D, DEEP, PRECISION)
        at = dw1 + group * (H * D) + (i[:, None] * D + j[None, :])
        inside = (i < H)[:, None] & (j < D)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + factor * sums, mask=inside)
    elif t < upto2:
        i += ((t - upto1) // across2) * ROWS
        j += ((t - upto1) % across2) * COLS
        h_row = tl.full([], H, tl.int32)
        sums = tl.zeros([ROWS, COLS], tl.float32)
        sums = _outer(sums, dy + first * V, dh_bar + first * H, h_row, i, j, N, V, H, DEEP, PRECISION)
        sums = _outer(sums, e_bar + first * V, h + first * H, h_row, i, j, N, V, H, DEEP, PRECISION)
        at = dw2 + group * (V * H) + (i[:, None] * H + j[None, :])
        inside = (i < V)[:, None] & (j < H)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + factor * sums, mask=inside)
    elif t < upto3:
        j += (t - upto2) * COLS
        total = factor * _down(sums1 + group * tiles * H, tiles, j, H)
        own = db1 + group * H + j
        tl.store(own, tl.load(own, mask=j < H, other=0.0) + total, mask=j < H)
    else:
        j += (t - upto3) * COLS
        total = factor * _down(sums2 + group * tiles * V, tiles, j, V)
        own = db2 + group * V + j
        tl.store(own, tl.load(own, mask=j < V, other=0.0) + total, mask=j < V)


@triton.jit(do_not_specialize=["N"])
def _row_sums(weights, dweight, N: tl.int64, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The weights' gradient: the sum of each row's shares, [N, TILES]."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        total += tl.load(weights + n * TILES + tile, mask=n < N, other=0.0)
    tl.store(dweight + n, total.to(dweight.dtype.element_ty), mask=n < N)
