"""What arrives for the state behind a large chunk and before it, element by element.

A program has BLOCK elements of a matrix, or COLS of a bias. What arrives for y is called y_bar.
"""

import triton
import triton.language as tl

__all__ = ["_arriving", "_leaving"]


@triton.jit
def _block(D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr):
    # A program's group, its place in it, how many programs a group has, and where W2, b1 and b2 begin.
    second: tl.constexpr = (H * D + BLOCK - 1) // BLOCK
    third: tl.constexpr = second + (V * H + BLOCK - 1) // BLOCK
    fourth: tl.constexpr = third + (H + COLS - 1) // COLS
    programs: tl.constexpr = fourth + (V + COLS - 1) // COLS
    g = tl.program_id(0).to(tl.int64) // programs
    return g, (tl.program_id(0) % programs).to(tl.int64), programs, second, third, fourth


@triton.jit
def _ends(ends, g, c, C):
    # What a chunk leaves of memory and of momentum in the memory, and of the momentum.
    at = ends + 3 * (g * C + c)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _down(sums, tiles, j, WIDTH, ROW):
    # The sum of `tiles` rows, in a fixed order.
    r = tl.arange(0, 16)
    total = tl.zeros([j.shape[0]], tl.float32)
    for start in range(0, tiles, 16):
        mask = (start + r < tiles)[:, None] & (j < WIDTH)[None, :]
        total += tl.sum(tl.load(sums + (start + r)[:, None] * ROW + j[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit
def _dots_of(
    m, s, m_bar, s_bar, x_bar, ds, narrow, dots, g, block, left, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # To `dots` <m_bar, m>, <x_bar, s> and <s_bar, s> over one block, to `narrow` x_bar, s_bar and m, to `ds`
    # what arrives for s.
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside, at = i < SIZE, g * SIZE + i
    old, speed = tl.load(m + at, mask=inside, other=0.0), tl.load(s + at, mask=inside, other=0.0)
    to_speed, step = tl.load(s_bar + at, mask=inside, other=0.0), tl.load(x_bar + at, mask=inside, other=0.0)
    tl.store(ds + at, left[1] * step + left[2] * to_speed, mask=inside)
    if narrow is not None:
        to = narrow + g * 3 * SIZE + i
        tl.store(to, step.to(narrow.dtype.element_ty), mask=inside)
        tl.store(to + SIZE, to_speed.to(narrow.dtype.element_ty), mask=inside)
        tl.store(to + 2 * SIZE, old.to(narrow.dtype.element_ty), mask=inside)
    beta_bar = 0.0
    if m_bar is not None:
        beta_bar += tl.sum(tl.load(m_bar + at, mask=inside, other=0.0) * old)
    tl.store(dots, beta_bar)
    tl.store(dots + 1, tl.sum(step * speed))
    tl.store(dots + 2, tl.sum(to_speed * speed))


@triton.jit(do_not_specialize=["c", "C"])
def _arriving(
    w1, b1, w2, b2, s1, c1, s2, c2, w1_bar, b1_bar, w2_bar, b2_bar, s1_bar, c1_bar, s2_bar, c2_bar,
    step1_bar, step2_bar, ds1, dc1, ds2, dc2, narrow1, narrow2, ends, dots, c: tl.int64, C: tl.int64,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # What arrives for the momentum at the chunk's start, f step_bar + m S_bar; each program's share of what
    # arrives for the chunk's ends; `narrow` [3 rows, columns]: what arrives for the step, for the new
    # momentum, and the matrix, in the dtype of products. 16 bytes an element, and 10 written. w1_bar and
    # w2_bar are None where orthogonalisation stands before the step.
    g, t, programs, second, third, fourth = _block(D, H, V, BLOCK, COLS)
    at = dots + ((g * C + c) * programs + t) * 3
    left = _ends(ends, g, c, C)
    if t < second:
        _dots_of(w1, s1, w1_bar, s1_bar, step1_bar, ds1, narrow1, at, g, t, left, H * D, BLOCK)
    elif t < third:
        _dots_of(w2, s2, w2_bar, s2_bar, step2_bar, ds2, narrow2, at, g, t - second, left, V * H, BLOCK)
    elif t < fourth:
        _dots_of(b1, c1, b1_bar, c1_bar, b1_bar, dc1, None, at, g, t - third, left, H, COLS)
    else:
        _dots_of(b2, c2, b2_bar, c2_bar, b2_bar, dc2, None, at, g, t - fourth, left, V, COLS)


@triton.jit
def _leave(bar, out, found, at, inside, beta):
    tl.store(out + at, beta * tl.load(bar + at, mask=inside, other=0.0) + found, mask=inside)


@triton.jit
def _leave_matrix(bar, out, parts, g, G, block, beta, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # `parts` [2, G, SIZE].
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside, at = i < SIZE, g * SIZE + i
    found = tl.load(parts + at, mask=inside, other=0.0)
    found += tl.load(parts + G * SIZE + at, mask=inside, other=0.0)
    _leave(bar, out, found, at, inside, beta)


@triton.jit(do_not_specialize=["G", "tiles", "c", "C"])
def _leaving(
    w1_bar, b1_bar, w2_bar, b2_bar, dw1, db1, dw2, db2, matrix1, matrix2, sums1, sums2, ends,
    G: tl.int64, tiles: tl.int64, c: tl.int64, C: tl.int64,
    WHOLE: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # What arrives for the memory at the chunk's start: beta M_bar + sums. With WHOLE w1_bar and w2_bar are
    # counted whole, not beta times. `sums1` [G, tiles, keys and queries, H]. 16 bytes an element.
    g, t, _, second, third, fourth = _block(D, H, V, BLOCK, COLS)
    beta, _, _ = _ends(ends, g, c, C)
    of_matrix = beta
    if WHOLE:
        of_matrix = 1.0
    if t < second:
        _leave_matrix(w1_bar, dw1, matrix1, g, G, t, of_matrix, H * D, BLOCK)
    elif t < third:
        _leave_matrix(w2_bar, dw2, matrix2, g, G, t - second, of_matrix, V * H, BLOCK)
    elif t < fourth:
        j = (t - third) * COLS + tl.arange(0, COLS)
        found = _down(sums1 + g * 2 * tiles * H, 2 * tiles, j, H, H)
        _leave(b1_bar, db1, found, g * H + j, j < H, beta)
    else:
        j = (t - fourth) * COLS + tl.arange(0, COLS)
        _leave(b2_bar, db2, _down(sums2 + g * tiles * V, tiles, j, V, V), g * V + j, j < V, beta)
