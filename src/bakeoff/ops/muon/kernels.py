"""muon_ in Triton: kernels over all matrices [R, C] of one shape at once, and their tilings.

The iterations work on a batch x [N, M, K] of wide matrices, M <= K: a tall parameter lies in it transposed.
M and K are rounded up to whole tiles, and what is beyond the matrix is zero and stays zero, so products need
no masks. Of a symmetric product only the tiles on and below the diagonal are computed, and mirrored.
"""

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Tiling", "tilings"]


@triton.jit
def _place(R, C, TALL: tl.constexpr, MT, KT, BLOCK: tl.constexpr):
    """Of a program's tile of the batch [M, K], in tiles [MT, KT]: rows and columns of the parameter, and of
    the batch, both in the order of the parameter's tile."""
    row_tile, column_tile = tl.program_id(0) // KT, tl.program_id(0) % KT
    if TALL:
        row_tile, column_tile = column_tile, row_tile
    r = row_tile * BLOCK + tl.arange(0, BLOCK)
    c = column_tile * BLOCK + tl.arange(0, BLOCK)
    return r, c, (r[:, None] < R) & (c[None, :] < C)


@triton.jit(do_not_specialize=["N", "R", "C", "MT", "KT", "decay", "sign"])
def _momentum(
    table, x, partial, clip_coef, found_inf, grad_scale,
    N: tl.int64, R: tl.int32, C: tl.int32, MT: tl.int32, KT: tl.int32, decay: tl.float32, sign: tl.float32,
    GRAD: tl.constexpr, STATE: tl.constexpr, NESTEROV: tl.constexpr, TALL: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m = decay m + g; x = g + decay m, or m; partial[matrix, tile] = sum of x^2. A tile a program.

    Rows of `table`: size; addresses of param, grad, momentum. Reads g and m and writes m and x: 14 bytes an
    element in float32. C is a number of UNITS elements, 16 where rows are so aligned, so that accesses are
    wide. Skipping leaves m as it is; x may then be anything.
    """
    b = tl.program_id(1).to(tl.int64)
    C = C * UNITS
    r, c, inside = _place(R, C, TALL, MT, KT, BLOCK)
    g_at = tl.load(table + 2 * N + b).to(tl.pointer_type(GRAD))
    m_at = tl.load(table + 3 * N + b).to(tl.pointer_type(STATE))
    if UNITS > 1:
        g_at, m_at = tl.multiple_of(g_at, 16), tl.multiple_of(m_at, 16)
    factor = sign
    if clip_coef is not None:
        factor *= tl.load(clip_coef).to(tl.float32)
    if grad_scale is not None:
        factor /= tl.load(grad_scale).to(tl.float32)
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32) * factor
    g = tl.where(inside, g, 0.0)  # a factor that is not finite makes NaN of a zero
    m = tl.load(m_at + at, mask=inside, other=0.0).to(tl.float32) * decay + g
    last = R
    if found_inf is not None:
        last = tl.where(tl.load(found_inf).to(tl.float32) == 0.0, R, 0)
    tl.store(m_at + at, m.to(STATE), mask=inside & (r[:, None] < last))
    if NESTEROV:
        m = g + m * decay
    tl.store(partial + b * MT * KT + tl.program_id(0), tl.sum(tl.sum(m * m, axis=1), axis=0))
    x += b * MT * KT * BLOCK * BLOCK
    if TALL:
        to = c.to(tl.int64)[:, None] * (KT * BLOCK) + r[None, :]
        tl.store(x + to, tl.trans(m).to(x.dtype.element_ty))
    else:
        to = r.to(tl.int64)[:, None] * (KT * BLOCK) + c[None, :]
        tl.store(x + to, m.to(x.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "P", "eps"])
def _measure(partial, scales, N: tl.int32, P: tl.int32, eps: tl.float32, BLOCK: tl.constexpr):
    """scales [2, N]: of each matrix 1/(norm + eps), and its square. Adds up P partial sums in a fixed
    order."""
    b = tl.program_id(0)
    row = partial + b.to(tl.int64) * P
    total = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, P, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(row + at, mask=at < P, other=0.0).to(tl.float64)
    scale = 1.0 / (tl.sqrt(tl.sum(total, axis=0)) + eps)
    tl.store(scales + b, scale.to(tl.float32))
    tl.store(scales + N + b, (scale * scale).to(tl.float32))


@triton.jit(do_not_specialize=["MT", "KT", "alpha", "beta"])
def _symmetric(
    x, add, out, scales, MT: tl.int32, KT: tl.int32, alpha: tl.float32, beta: tl.float32,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [N, M, M] = scale (alpha x x' + beta add), of x [N, M, K] and a symmetric `add`, if there is one.

    A tile a program of those on and below the diagonal, which it writes twice: T (T + 1)/2 tiles of T^2.
    M = MT * TILE, K = KT * DEPTH. 2 TILE^2 K FLOPs a program.
    """
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    M, K = MT * TILE, KT * DEPTH
    rows = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    x += b * M * K
    left = x + rows[:, None] * K + depth[None, :]
    right = x + columns[None, :] * K + depth[:, None]
    total = tl.zeros([TILE, TILE], tl.float32)
    for _ in tl.range(0, KT):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH
    total *= alpha
    own = b * M * M + rows[:, None] * M + columns[None, :]
    if add is not None:
        total += beta * tl.load(add + own).to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + b)
    done = total.to(out.dtype.element_ty)
    tl.store(out + own, done)
    if i != j:
        tl.store(out + b * M * M + columns[:, None] * M + rows[None, :], tl.trans(done))


@triton.jit(do_not_specialize=["MT", "KT", "beta"])
def _apply(
    p, x, out, scales, MT: tl.int32, KT: tl.int32, beta: tl.float32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [N, M, K] = scale (p x + beta x), of p [N, M, M] and x [N, M, K].

    A tile [ROWS, COLUMNS] a program; programs that follow one another share columns of x. M = MT * ROWS is
    a multiple of DEPTH, K = KT * COLUMNS. 2 ROWS COLUMNS M FLOPs a program.
    """
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    M, K = MT * ROWS, KT * COLUMNS
    rows = (t % MT * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (t // MT * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    x += b * M * K
    left = p + b * M * M + rows[:, None] * M + depth[None, :]
    right = x + depth.to(tl.int64)[:, None] * K + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in tl.range(0, M, DEPTH):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH * K.to(tl.int64)
    own = rows[:, None] * K + columns[None, :]
    total += beta * tl.load(x + own).to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + b)
    tl.store(out + b * M * K + own, total.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "R", "C", "MT", "KT", "lr", "weight_decay", "size"])
def _move(
    table, x, lr_at, lr_mult, found_inf,
    N: tl.int64, R: tl.int32, C: tl.int32, MT: tl.int32, KT: tl.int32,
    lr: tl.float64, weight_decay: tl.float64, size: tl.float64,
    PARAM: tl.constexpr, TALL: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p = p (1 - rate weight_decay) - rate size x. A tile a program, as in `_momentum`; 10 bytes an element
    in float32. Skipping leaves nothing to write."""
    b = tl.program_id(1).to(tl.int64)
    C = C * UNITS
    if found_inf is not None:
        R = tl.where(tl.load(found_inf).to(tl.float32) == 0.0, R, 0)
    r, c, inside = _place(R, C, TALL, MT, KT, BLOCK)
    p_at = tl.load(table + N + b).to(tl.pointer_type(PARAM))
    if UNITS > 1:
        p_at = tl.multiple_of(p_at, 16)
    rate = lr
    if lr_at is not None:
        rate = tl.load(lr_at).to(tl.float64)
    if lr_mult is not None:
        rate *= tl.load(lr_mult).to(tl.float64)
    x += b * MT * KT * BLOCK * BLOCK
    if TALL:
        u = tl.trans(tl.load(x + c.to(tl.int64)[:, None] * (KT * BLOCK) + r[None, :]))
    else:
        u = tl.load(x + r.to(tl.int64)[:, None] * (KT * BLOCK) + c[None, :])
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    p = tl.load(p_at + at, mask=inside, other=0.0).to(tl.float32)
    p = p * (1.0 - rate * weight_decay).to(tl.float32) - (rate * size).to(tl.float32) * u.to(tl.float32)
    tl.store(p_at + at, p.to(PARAM), mask=inside)


class Tiling(NamedTuple):
    """How products are cut: tiles of symmetric ones, then those of the others."""

    tile: int
    tile_warps: int
    rows: int
    columns: int
    warps: int
    depth: int
    stages: int


_LARGE = (
    Tiling(128, 8, 128, 256, 8, 64, 3),
    Tiling(128, 4, 128, 256, 8, 64, 3),
    Tiling(128, 8, 128, 128, 8, 64, 4),
    Tiling(128, 4, 128, 128, 4, 64, 4),
    Tiling(128, 4, 128, 128, 4, 64, 3),
    Tiling(128, 8, 128, 256, 8, 64, 4),
)
_SMALL = (Tiling(64, 4, 64, 64, 4, 64, 3), Tiling(64, 4, 64, 128, 4, 64, 4))


def tilings(rows: int, hip: bool) -> list[Tiling]:
    """Tilings for matrices with `rows` on their smaller side, the default first: the largest tiles that
    tensor cores are kept busy with, unless they would mostly hold padding. AMD's GPUs have 64 KiB of shared
    memory a block."""
    if hip:
        return [_SMALL[0]._replace(stages=2), Tiling(128, 8, 128, 128, 8, 64, 2)]
    return [*_SMALL, *_LARGE] if rows <= 64 else [*_LARGE, *_SMALL]
