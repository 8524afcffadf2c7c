"""What stands between a large chunk's sums over tokens and the state, and back.

A program has BLOCK elements of a matrix, or COLS of a bias.
"""

import triton
import triton.language as tl

__all__ = ["_arriving", "_leaving", "_step"]


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
def _move(m, s, new_m, new_s, at, inside, in_memory, in_momentum, beta, pushed, kept):
    old = tl.load(s + at, mask=inside, other=0.0)
    step = pushed * old - in_memory
    if m is not None:
        step += beta * tl.load(m + at, mask=inside, other=0.0)
    tl.store(new_m + at, step, mask=inside)
    tl.store(new_s + at, kept * old - in_momentum, mask=inside)


@triton.jit
def _move_matrix(m, s, new_m, new_s, sums, g, block, ends, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    at = sums + g * 2 * SIZE + i
    in_memory = tl.load(at, mask=inside, other=0.0)
    in_momentum = tl.load(at + SIZE, mask=inside, other=0.0)
    _move(m, s, new_m, new_s, g * SIZE + i, inside, in_memory, in_momentum, ends[0], ends[1], ends[2])


@triton.jit
def _move_bias(m, s, new_m, new_s, sums, g, block, tiles, ends, WIDTH: tl.constexpr, COLS: tl.constexpr):
    j = block * COLS + tl.arange(0, COLS)
    at = sums + g * tiles * 2 * WIDTH
    in_memory = _down(at, tiles, j, WIDTH, 2 * WIDTH)
    in_momentum = _down(at + WIDTH, tiles, j, WIDTH, 2 * WIDTH)
    _move(m, s, new_m, new_s, g * WIDTH + j, j < WIDTH, in_memory, in_momentum, ends[0], ends[1], ends[2])


@triton.jit(do_not_specialize=["tiles", "c", "C"])
def _step(
    w1, b1, w2, b2, s1, c1, s2, c2, new_w1, new_b1, new_w2, new_b2, new_s1, new_c1, new_s2, new_c2,
    matrix1, matrix2, sums1, sums2, ends, tiles: tl.int64, c: tl.int64, C: tl.int64,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # M = beta M + f S - sums and S = m S - sums. Where w1 and w2 are None, new_w1 and new_w2 are what would
    # be added to beta M. 24 bytes an element.
    g, t, _, second, third, fourth = _block(D, H, V, BLOCK, COLS)
    left = _ends(ends, g, c, C)
    if t < second:
        _move_matrix(w1, s1, new_w1, new_s1, matrix1, g, t, left, H * D, BLOCK)
    elif t < third:
        _move_matrix(w2, s2, new_w2, new_s2, matrix2, g, t - second, left, V * H, BLOCK)
    elif t < fourth:
        _move_bias(b1, c1, new_b1, new_c1, sums1, g, t - third, tiles, left, H, COLS)
    else:
        _move_bias(b2, c2, new_b2, new_c2, sums2, g, t - fourth, tiles, left, V, COLS)


# Backward. What arrives for y is called y_bar. ------------------------------------------------------------


@triton.jit
def _dots_of(
    m, s, m_bar, s_bar, x_bar, narrow, dots, g, block, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # To `dots` <m_bar, m>, <x_bar, s> and <s_bar, s> over one block, to `narrow` x_bar, s_bar and m.
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside, at = i < SIZE, g * SIZE + i
    old, speed = tl.load(m + at, mask=inside, other=0.0), tl.load(s + at, mask=inside, other=0.0)
    to_speed, step = tl.load(s_bar + at, mask=inside, other=0.0), tl.load(x_bar + at, mask=inside, other=0.0)
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
    step1_bar, step2_bar, narrow1, narrow2, dots, c: tl.int64, C: tl.int64,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # `narrow` [3 rows, columns]: what arrives for the step, for the new momentum, and the matrix, in the
    # dtype of products; each program's share of what arrives for the chunk's ends. 16 bytes an element, and
    # 6 written. w1_bar and w2_bar are None where orthogonalisation stands before the step.
    g, t, programs, second, third, fourth = _block(D, H, V, BLOCK, COLS)
    at = dots + ((g * C + c) * programs + t) * 3
    if t < second:
        _dots_of(w1, s1, w1_bar, s1_bar, step1_bar, narrow1, at, g, t, H * D, BLOCK)
    elif t < third:
        _dots_of(w2, s2, w2_bar, s2_bar, step2_bar, narrow2, at, g, t - second, V * H, BLOCK)
    elif t < fourth:
        _dots_of(b1, c1, b1_bar, c1_bar, b1_bar, None, at, g, t - third, H, COLS)
    else:
        _dots_of(b2, c2, b2_bar, c2_bar, b2_bar, None, at, g, t - fourth, V, COLS)


@triton.jit
def _leave(m_bar, s_bar, x_bar, sums, new_m_bar, new_s_bar, at, inside, beta, pushed, kept):
    step = tl.load(x_bar + at, mask=inside, other=0.0)
    speed = pushed * step + kept * tl.load(s_bar + at, mask=inside, other=0.0)
    tl.store(new_s_bar + at, speed, mask=inside)
    tl.store(new_m_bar + at, beta * tl.load(m_bar + at, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit
def _leave_matrix(
    m_bar, s_bar, x_bar, sums, new_m_bar, new_s_bar, g, G, block, beta, ends,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # `sums` [PARTS, G, SIZE].
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside, at = i < SIZE, g * SIZE + i
    found = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        found += tl.load(sums + part * G * SIZE + at, mask=inside, other=0.0)
    _leave(m_bar, s_bar, x_bar, found, new_m_bar, new_s_bar, at, inside, beta, ends[1], ends[2])


@triton.jit
def _leave_bias(
    m_bar, s_bar, sums, new_m_bar, new_s_bar, g, block, tiles, ends, WIDTH: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    j = block * COLS + tl.arange(0, COLS)
    found = _down(sums + g * tiles * WIDTH, tiles, j, WIDTH, WIDTH)
    at = g * WIDTH + j
    _leave(m_bar, s_bar, m_bar, found, new_m_bar, new_s_bar, at, j < WIDTH, ends[0], ends[1], ends[2])


@triton.jit(do_not_specialize=["G", "tiles", "c", "C"])
def _leaving(
    w1_bar, b1_bar, w2_bar, b2_bar, s1_bar, c1_bar, s2_bar, c2_bar, step1_bar, step2_bar,
    dw1, db1, dw2, db2, ds1, dc1, ds2, dc2,
    matrix1, matrix2, sums1, sums2, ends, G: tl.int64, tiles: tl.int64, c: tl.int64, C: tl.int64,
    WHOLE: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # What arrives for memory and momentum at the chunk's start: beta M_bar + sums, f step_bar + m S_bar.
    # With WHOLE w1_bar and w2_bar are counted whole, not beta times. 24 bytes an element.
    g, t, _, second, third, fourth = _block(D, H, V, BLOCK, COLS)
    left = _ends(ends, g, c, C)
    beta = left[0]
    if WHOLE:
        beta = 1.0
    if t < second:
        _leave_matrix(w1_bar, s1_bar, step1_bar, matrix1, dw1, ds1, g, G, t, beta, left, 2, H * D, BLOCK)
    elif t < third:
        _leave_matrix(
            w2_bar, s2_bar, step2_bar, matrix2, dw2, ds2, g, G, t - second, beta, left, 3, V * H, BLOCK
        )
    elif t < fourth:
        _leave_bias(b1_bar, c1_bar, sums1, db1, dc1, g, t - third, tiles, left, H, COLS)
    else:
        _leave_bias(b2_bar, c2_bar, sums2, db2, dc2, g, t - fourth, tiles, left, V, COLS)
