"""Heads of q and k normalised, scaled and rotated in one pass each way: the kernels.

Forward reads and writes q and k: 2 passes over both, 4 bytes an element in bf16. Backward reads what arrives
and q, k, and writes their gradients: 3 passes, 6 bytes an element. (Apart, two rms_norms and a rotation take
4 and 5.) 1/rms is computed again in the backward, from the row that is read anyway. Tables and weights stay
in the first caches.

A tile is BLOCK_T tokens x BLOCK_H heads, each one row; a row is three pieces of registers: the first element
of each pair, the second, and what isn't turned.
"""

import triton
import triton.language as tl

__all__: list[str] = []


@triton.jit(do_not_specialize=["T", "S", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "row", "eps", "offset"])
def _forward(
    q, k, cos, sin, position_ids, q_weight, k_weight, q_out, k_out,
    T: tl.int32, S: tl.int32, q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64,
    k_h: tl.int64, row: tl.int64, eps: tl.float32, offset: tl.float32,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    IDS: tl.constexpr, Q_HEAD_MAJOR: tl.constexpr, K_HEAD_MAJOR: tl.constexpr, VECTOR: tl.constexpr,
    TABLE_VECTOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """A tile a program, those of k's heads following those of q's on the grid.

    Moves 2 * D * itemsize bytes a head; 4 FLOPs an element and 3 a rotated one.
    """
    Q_BLOCKS: tl.constexpr = H // BLOCK_H
    HEAD_BLOCKS: tl.constexpr = Q_BLOCKS + HK // BLOCK_H
    head_block = tl.program_id(0) % HEAD_BLOCKS
    b, t, live = _tokens(tl.program_id(0) // HEAD_BLOCKS, T, BLOCK_T, BLOCK_H)
    c, s = _angles(cos, sin, position_ids, b, t, live, T, S, row, HALF, IDS, TABLE_VECTOR, BLOCK)
    if head_block < Q_BLOCKS:
        h = _heads(head_block, BLOCK_T, BLOCK_H)
        start = tl.multiple_of(b * q_b + t * q_t + h * q_h, VECTOR)
        out = ((b * H + h) * T + t) * D if Q_HEAD_MAJOR else ((b * T + t) * H + h) * D
        _normalize_and_turn(
            q, q_weight, q_out, start, out, live, c, s, eps, offset, D, HALF, INTERLEAVED, BLOCK, REST
        )
    else:
        h = _heads(head_block - Q_BLOCKS, BLOCK_T, BLOCK_H)
        start = tl.multiple_of(b * k_b + t * k_t + h * k_h, VECTOR)
        out = ((b * HK + h) * T + t) * D if K_HEAD_MAJOR else ((b * T + t) * HK + h) * D
        _normalize_and_turn(
            k, k_weight, k_out, start, out, live, c, s, eps, offset, D, HALF, INTERLEAVED, BLOCK, REST
        )


@triton.jit
def _normalize_and_turn(
    x, weight, y, start, out, live, c, s, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # Rows of x at `start` to rows of y at `out`.
    a, b, rest = _read(x, start, live, D, HALF, INTERLEAVED, BLOCK, REST)
    a_scale, b_scale, rest_scale = _scale(weight, offset, D, HALF, INTERLEAVED, BLOCK, REST)
    squares = tl.sum(a * a + b * b, axis=1)
    if 2 * HALF < D:
        squares += tl.sum(rest * rest, axis=1)
    scaling = tl.rsqrt(squares * (1.0 / D) + eps)[:, None]
    a = a * scaling * a_scale
    b = b * scaling * b_scale
    rest = rest * scaling * rest_scale
    _write(y, out, live, a * c - b * s, b * c + a * s, rest, D, HALF, INTERLEAVED, BLOCK, REST)


@triton.jit(
    do_not_specialize=[
        "B", "T", "S", "gq_b", "gq_t", "gq_h", "gk_b", "gk_t", "gk_h", "q_b", "q_t", "q_h", "k_b", "k_t",
        "k_h", "row", "eps", "offset",
    ]
)  # fmt: skip
def _backward(
    gq, gk, q, k, cos, sin, position_ids, q_weight, k_weight, dq, dk, q_partial, k_partial,
    B: tl.int32, T: tl.int32, S: tl.int32, gq_b: tl.int64, gq_t: tl.int64, gq_h: tl.int64, gk_b: tl.int64,
    gk_t: tl.int64, gk_h: tl.int64, q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64,
    k_t: tl.int64, k_h: tl.int64, row: tl.int64, eps: tl.float32, offset: tl.float32,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    IDS: tl.constexpr, VECTOR: tl.constexpr, TABLE_VECTOR: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the tiles of q, then over those of k, with the weights' gradients in registers.

    Of a row x with r = 1/rms, n = x*r and what arrives turned back, g: dx = r*(g*w - n*mean(g*w*n)), and
    partial[program] = sum over its rows of g*n; without a weight's gradient there is no partial. gq, gk are
    what arrives. Moves 3 * D * itemsize bytes a head; 11 FLOPs an element and 3 a rotated one.
    """
    if gq is not None:
        _walk(
            gq, q, q_weight, dq, q_partial, cos, sin, position_ids, B, T, S, gq_b, gq_t, gq_h, q_b, q_t, q_h,
            row, eps, offset, H, H, D, HALF, INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK_T, BLOCK_H, BLOCK,
            REST, STAGES,
        )  # fmt: skip
    if gk is not None:
        _walk(
            gk, k, k_weight, dk, k_partial, cos, sin, position_ids, B, T, S, gk_b, gk_t, gk_h, k_b, k_t, k_h,
            row, eps, offset, HK, HK, D, HALF, INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK_T, BLOCK_H,
            BLOCK, REST, STAGES,
        )  # fmt: skip


@triton.jit
def _walk(
    dy, x, weight, dx, partial, cos, sin, position_ids, B, T, S, dy_b, dy_t, dy_h, x_b, x_t, x_h, row, eps,
    offset, H: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, IDS: tl.constexpr, VECTOR: tl.constexpr, TABLE_VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # This program's tiles of q or of k. A token of dx is OUT heads after the one before.
    HEAD_BLOCKS: tl.constexpr = H // BLOCK_H
    ROWS: tl.constexpr = BLOCK_T * BLOCK_H
    a_scale, b_scale, rest_scale = _scale(weight, offset, D, HALF, INTERLEAVED, BLOCK, REST)
    a_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    rest_sum = tl.zeros([ROWS, REST], tl.float32)
    tiles = B * tl.cdiv(T, BLOCK_T) * HEAD_BLOCKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        i, t, live = _tokens(tile // HEAD_BLOCKS, T, BLOCK_T, BLOCK_H)
        h = _heads(tile % HEAD_BLOCKS, BLOCK_T, BLOCK_H)
        arriving = tl.multiple_of(i * dy_b + t * dy_t + h * dy_h, VECTOR)
        turned_a, turned_b, g_rest = _read(dy, arriving, live, D, HALF, INTERLEAVED, BLOCK, REST)
        start = tl.multiple_of(i * x_b + t * x_t + h * x_h, VECTOR)
        a, b, rest = _read(x, start, live, D, HALF, INTERLEAVED, BLOCK, REST)
        c, s = _angles(cos, sin, position_ids, i, t, live, T, S, row, HALF, IDS, TABLE_VECTOR, BLOCK)
        g_a = turned_a * c + turned_b * s
        g_b = turned_b * c - turned_a * s
        squares = tl.sum(a * a + b * b, axis=1)
        dots = tl.sum(g_a * a_scale * a + g_b * b_scale * b, axis=1)
        if 2 * HALF < D:
            squares += tl.sum(rest * rest, axis=1)
            dots += tl.sum(g_rest * rest_scale * rest, axis=1)
        # Rows that don't exist must not make NaN of 0 * infinity, with eps = 0.
        scaling = tl.where(live, tl.rsqrt(squares * (1.0 / D) + eps), 0.0)
        mean = (dots * scaling * (1.0 / D))[:, None]
        scaling = scaling[:, None]
        a *= scaling
        b *= scaling
        rest *= scaling
        if partial is not None:
            a_sum += g_a * a
            b_sum += g_b * b
            if 2 * HALF < D:
                rest_sum += g_rest * rest
        if dx is not None:
            out = ((i * T + t) * OUT + h) * D
            _write(
                dx, out, live, (g_a * a_scale - a * mean) * scaling, (g_b * b_scale - b * mean) * scaling,
                (g_rest * rest_scale - rest * mean) * scaling, D, HALF, INTERLEAVED, BLOCK, REST,
            )  # fmt: skip
    if partial is not None:
        out = tl.full([1], tl.program_id(0), tl.int64) * D
        _write(
            partial, out, tl.full([1], True, tl.int1), tl.sum(a_sum, axis=0, keep_dims=True),
            tl.sum(b_sum, axis=0, keep_dims=True), tl.sum(rest_sum, axis=0, keep_dims=True),
            D, HALF, INTERLEAVED, BLOCK, REST,
        )  # fmt: skip


@triton.jit
def _tokens(block, T, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    # Of a tile's rows: which item of the batch they belong to, their tokens, and which exist.
    blocks = tl.cdiv(T, BLOCK_T)
    t = (block % blocks) * BLOCK_T + tl.arange(0, BLOCK_T * BLOCK_H) // BLOCK_H
    return (block // blocks).to(tl.int64), t.to(tl.int64), t < T


@triton.jit
def _heads(block, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    return block * BLOCK_H + tl.arange(0, BLOCK_T * BLOCK_H) % BLOCK_H


@triton.jit
def _angles(
    cos, sin, position_ids, b, t, live, T, S, row,
    HALF: tl.constexpr, IDS: tl.constexpr, TABLE_VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The table row of each row; NaN for an id outside the table, which must show. 0 where nothing is.
    if IDS == 0:
        at = t
        known = live
    else:
        at = tl.load(position_ids + (b * T if IDS == 2 else 0) + t, mask=live, other=0).to(tl.int64)
        known = live & (at >= 0) & (at < S)
    p = tl.arange(0, BLOCK)
    table = tl.multiple_of(at * row, TABLE_VECTOR)[:, None] + p[None, :]
    inside = known[:, None] & (p < HALF)[None, :]
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    if IDS != 0:
        lost = (live & (known == 0))[:, None]
        c = tl.where(lost, float("nan"), c)
        s = tl.where(lost, float("nan"), s)
    return c, s


@triton.jit
def _scale(
    weight, offset, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    # offset + weight, as a row of three pieces.
    first = tl.full([1], 0, tl.int32)
    a, b, rest = _read(weight, first, first == 0, D, HALF, INTERLEAVED, BLOCK, REST)
    return a + offset, b + offset, rest + offset


@triton.jit
def _read(
    x, start, live, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    # Rows of x at `start` in float32: the first of each pair, the second, what isn't turned. 0 where nothing
    # is.
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        mask = live[:, None] & (both < 2 * HALF)[None, :]
        pairs = tl.load(x + start[:, None] + both[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (start.shape[0], BLOCK, 2)))
    else:
        p = tl.arange(0, BLOCK)
        mask = live[:, None] & (p < HALF)[None, :]
        source = x + start[:, None] + p[None, :]
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if 2 * HALF < D:
        at = 2 * HALF + tl.arange(0, REST)
        mask = live[:, None] & (at < D)[None, :]
        rest = tl.load(x + start[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros([start.shape[0], REST], tl.float32)
    return a, b, rest


@triton.jit
def _write(
    y, out, live, a, b, rest, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # The inverse of `_read`.
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        mask = live[:, None] & (both < 2 * HALF)[None, :]
        pairs = tl.reshape(tl.join(a, b), (out.shape[0], 2 * BLOCK))
        tl.store(y + out[:, None] + both[None, :], pairs.to(y.dtype.element_ty), mask=mask)
    else:
        p = tl.arange(0, BLOCK)
        mask = live[:, None] & (p < HALF)[None, :]
        target = y + out[:, None] + p[None, :]
        tl.store(target, a.to(y.dtype.element_ty), mask=mask)
        tl.store(target + HALF, b.to(y.dtype.element_ty), mask=mask)
    if 2 * HALF < D:
        at = 2 * HALF + tl.arange(0, REST)
        mask = live[:, None] & (at < D)[None, :]
        tl.store(y + out[:, None] + at[None, :], rest.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["P"])
def _sum_partials(
    q_partial, k_partial, dq_weight, dk_weight, P: tl.int32,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dweight[d] = sum of partial[p, d] over p, always in the same order: a block of columns of q's weight
    (program 0 of axis 1) or of k's (program 1). Reads 4 * P * D bytes a weight."""
    if tl.program_id(1) == 0:
        if dq_weight is not None:
            _sum_columns(q_partial, dq_weight, P, D, BLOCK_P, BLOCK_D)
    else:
        if dk_weight is not None:
            _sum_columns(k_partial, dk_weight, P, D, BLOCK_P, BLOCK_D)


@triton.jit
def _sum_columns(partial, dw, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in tl.range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        mask = (p < P)[:, None] & (d < D)[None, :]
        total += tl.load(partial + p[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)
    tl.store(dw + d, tl.sum(total, axis=0).to(dw.dtype.element_ty), mask=d < D)
