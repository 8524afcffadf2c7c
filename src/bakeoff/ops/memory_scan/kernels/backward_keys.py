"""memory_scan backward, what is behind the keys and the updates: four launches a chunk, from the last to
the first.

`coming` holds the gradients of memory and momentum after the chunk, `going` of those before it.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _matrix, _product, _slope, _tile, _vector

__all__ = ["_to_errors", "_to_keys", "_to_slopes", "_to_states"]


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_slopes(
    k, gates, z, a, e, coming, df, dh, dgates, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, QUERIED: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dF and dh with what the updates add, BH hidden units of one group a program, and what the updates'
    # weights get. 4 BT BH (D + V) FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    after = coming + g * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    into_memory = tl.load(table + length * W + 2 + t, mask=t < length, other=0.0)[:, None]
    into_momentum = tl.load(table + (CHUNK + 1) * W + 2 + t, mask=t < length, other=0.0)[:, None]

    memory, momentum = tl.zeros((BT, BH), tl.float32), tl.zeros((BT, BH), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        key = _tile(k + first * D, t, d, length, D)
        memory = _product(key, tl.trans(_tile(after, h, d, H, D)), memory, PRECISION)
        momentum = _product(key, tl.trans(_tile(after + P, h, d, H, D)), momentum, PRECISION)
    memory += _vector(after + H * D, h, H)[None, :]
    momentum += _vector(after + P + H * D, h, H)[None, :]
    hidden, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
    slope *= _tile(a + first * H, t, h, length, H)
    total = -(into_memory * memory + into_momentum * momentum)
    if QUERIED:
        total += _tile(df + first * H, t, h, length, H)
    _matrix(df + first * H, total, t, h, length, H)
    of_memory, of_momentum = tl.sum(slope * memory, 1), tl.sum(slope * momentum, 1)

    memory, momentum = tl.zeros((BT, BH), tl.float32), tl.zeros((BT, BH), tl.float32)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        error = _tile(e + first * V, t, u, length, V)
        memory = _product(error, _tile(after + H * D + H, u, h, V, H), memory, PRECISION)
        momentum = _product(error, _tile(after + P + H * D + H, u, h, V, H), momentum, PRECISION)
        if tl.program_id(1) == 0:
            bias = H * D + H + V * H
            of_memory += tl.sum(error * _vector(after + bias, u, V)[None, :], 1)
            of_momentum += tl.sum(error * _vector(after + P + bias, u, V)[None, :], 1)
    total = -(into_memory * memory + into_momentum * momentum)
    if QUERIED:
        total += _tile(dh + first * H, t, h, length, H)
    _matrix(dh + first * H, total, t, h, length, H)
    of_memory += tl.sum(hidden * memory, 1)
    of_momentum += tl.sum(hidden * momentum, 1)
    part = dgates + ((g * C + c) * tl.num_programs(1) + tl.program_id(1)) * 4 * CHUNK + t
    tl.store(part + 2 * CHUNK, -of_memory, mask=t < CHUNK)
    tl.store(part + 3 * CHUNK, -of_momentum, mask=t < CHUNK)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_errors(
    states, gates, z, coming, df, de, dv, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, QUERIED: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The answers' gradients, twice dE, into `de`, and dv: BV outputs of one group a program. 6 BT BV H FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g = tl.program_id(0).to(tl.int64)
    t, u = tl.arange(0, BT), tl.program_id(1) * BV + tl.arange(0, BV)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P + H * D + H
    after = coming + g * 2 * P + H * D + H
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    into_memory = tl.load(table + length * W + 2 + t, mask=t < length, other=0.0)[:, None]
    into_momentum = tl.load(table + (CHUNK + 1) * W + 2 + t, mask=t < length, other=0.0)[:, None]
    total = tl.zeros((BT, BV), tl.float32)
    memory, momentum = tl.zeros((BT, BV), tl.float32), tl.zeros((BT, BV), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        hidden, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
        memory = _product(hidden, tl.trans(_tile(after, u, h, V, H)), memory, PRECISION)
        momentum = _product(hidden, tl.trans(_tile(after + P, u, h, V, H)), momentum, PRECISION)
        slope *= _tile(df + first * H, t, h, length, H)
        total = _product(slope, tl.trans(_tile(state, u, h, V, H)), total, PRECISION)
    memory += _vector(after + V * H, u, V)[None, :]
    momentum += _vector(after + P + V * H, u, V)[None, :]
    total -= into_memory * memory + into_momentum * momentum
    if QUERIED:
        total += _tile(de + first * V, t, u, length, V)
    _matrix(de + first * V, 2 * total, t, u, length, V)
    _matrix(dv + first * V, -2 * total, t, u, length, V)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_states(
    q, k, do, states, gates, z, a, e, zq, dzq, coming, going, df, dh, de, dz, dlast,
    T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The gradients of memory and momentum before the chunk, and dZ: of BH hidden units of one group the
    # weights before them in one program, those behind them in another. BT BH (6 D + 10 V) FLOPs; reads four
    # states and writes two.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    after, before = coming + g * 2 * P, going + g * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    part = dlast + (((g * C + c) * tl.num_programs(1) + tl.program_id(1)) * 2 + tl.program_id(2)) * 3
    if tl.program_id(2) == 0:
        _to_first(
            q + first * D, k + first * D, state, table, z + first * H, a + first * H, dzq + first * H, after,
            before, df + first * H, dh + first * H, de + first * V, dz + first * H, part, t, h, length,
            CHUNK, D, H, V, SHIFT, BT, BD, BV, BH, PRECISION,
        )  # fmt: skip
    else:
        _to_second(
            do + first * V, state, table, z + first * H, e + first * V, zq + first * H, after, before,
            df + first * H, de + first * V, part, t, h, length,
            CHUNK, D, H, V, SHIFT, BT, BV, BH, PRECISION,
        )  # fmt: skip


@triton.jit
def _read_weights(table, t, length, CHUNK: tl.constexpr, SHIFT: tl.constexpr, BT: tl.constexpr):
    """How much of memory and of momentum each query saw, [BT, 1]."""
    W: tl.constexpr = CHUNK + 2
    own, push = (t[:, None] < length).to(tl.float32), tl.zeros((BT, 1), tl.float32)
    if SHIFT >= 0:
        row = (t + SHIFT) * W
        own = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
    return own, push


@triton.jit
def _to_first(
    q, k, state, table, z, a, dzq, after, before, df, dh, de, dz, part, t, h, length,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dZ, and what W1 and b1 get. Pointers stand at this chunk and group.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    beta, pushed = tl.load(table + length * W), tl.load(table + length * W + 1)
    kept = tl.load(table + (CHUNK + 1) * W + 1)
    own, push = _read_weights(table, t, length, CHUNK, SHIFT, BT)
    _, slope, bend = _slope(_tile(z, t, h, length, H))
    arrived = _tile(dh, t, h, length, H)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        weight = _tile(state + H * D + H, u, h, V, H)
        arrived = _product(_tile(de, t, u, length, V), weight, arrived, PRECISION)
    found = _tile(df, t, h, length, H) * _tile(a, t, h, length, H) * bend + arrived * slope
    _matrix(dz, found, t, h, length, H)
    asked = _tile(dzq, t, h, length, H)

    of_beta, of_push, of_kept = 0.0, 0.0, 0.0
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        key, question = _tile(k, t, d, length, D), _tile(q, t, d, length, D)
        x, y = _tile(after, h, d, H, D), _tile(after + P, h, d, H, D)
        m, s = _tile(state, h, d, H, D), _tile(state + P, h, d, H, D)
        of_beta += tl.sum(x * m)
        of_push += tl.sum(x * s)
        of_kept += tl.sum(y * s)
        m = _product(tl.trans(found), key, beta * x, PRECISION)
        m = _product(tl.trans(own * asked), question, m, PRECISION)
        s = pushed * x + kept * y
        if SHIFT >= 0:
            s = _product(tl.trans(push * asked), question, s, PRECISION)
        _matrix(before, m, h, d, H, D)
        _matrix(before + P, s, h, d, H, D)
    x_1, y_1 = _vector(after + H * D, h, H), _vector(after + P + H * D, h, H)
    m_1, s_1 = _vector(state + H * D, h, H), _vector(state + P + H * D, h, H)
    tl.store(before + H * D + h, beta * x_1 + tl.sum(found + own * asked, 0), mask=h < H)
    moved = pushed * x_1 + kept * y_1 + tl.sum(push * asked, 0)
    tl.store(before + P + H * D + h, moved, mask=h < H)
    tl.store(part, of_beta + tl.sum(x_1 * m_1))
    tl.store(part + 1, of_push + tl.sum(x_1 * s_1))
    tl.store(part + 2, of_kept + tl.sum(y_1 * s_1))


@triton.jit
def _to_second(
    do, state, table, z, e, zq, after, before, df, de, part, t, h, length,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # What W2 and, from the first hidden units' program, b2 get. Pointers stand at this chunk and group.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    SECOND: tl.constexpr = H * D + H
    LAST: tl.constexpr = H * D + H + V * H
    beta, pushed = tl.load(table + length * W), tl.load(table + length * W + 1)
    kept = tl.load(table + (CHUNK + 1) * W + 1)
    own, push = _read_weights(table, t, length, CHUNK, SHIFT, BT)
    hidden, slope, _ = _slope(_tile(z, t, h, length, H))
    back = slope * _tile(df, t, h, length, H)
    query, _, _ = _slope(_tile(zq, t, h, length, H))
    of_beta, of_push, of_kept = 0.0, 0.0, 0.0
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        error, answered = _tile(e, t, u, length, V), _tile(de, t, u, length, V)
        given = _tile(do, t, u, length, V)
        x, y = _tile(after + SECOND, u, h, V, H), _tile(after + P + SECOND, u, h, V, H)
        m, s = _tile(state + SECOND, u, h, V, H), _tile(state + P + SECOND, u, h, V, H)
        of_beta += tl.sum(x * m)
        of_push += tl.sum(x * s)
        of_kept += tl.sum(y * s)
        m = _product(tl.trans(error), back, beta * x, PRECISION)
        m = _product(tl.trans(answered), hidden, m, PRECISION)
        m = _product(tl.trans(own * given), query, m, PRECISION)
        s = pushed * x + kept * y
        if SHIFT >= 0:
            s = _product(tl.trans(push * given), query, s, PRECISION)
        _matrix(before + SECOND, m, u, h, V, H)
        _matrix(before + P + SECOND, s, u, h, V, H)
        if tl.program_id(1) == 0:
            x_2, y_2 = _vector(after + LAST, u, V), _vector(after + P + LAST, u, V)
            m_2, s_2 = _vector(state + LAST, u, V), _vector(state + P + LAST, u, V)
            of_beta += tl.sum(x_2 * m_2)
            of_push += tl.sum(x_2 * s_2)
            of_kept += tl.sum(y_2 * s_2)
            tl.store(before + LAST + u, beta * x_2 + tl.sum(answered + own * given, 0), mask=u < V)
            moved = pushed * x_2 + kept * y_2 + tl.sum(push * given, 0)
            tl.store(before + P + LAST + u, moved, mask=u < V)
    tl.store(part, of_beta)
    tl.store(part + 1, of_push)
    tl.store(part + 2, of_kept)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_keys(
    states, gates, z, a, coming, dz, dk_queries, dk, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, QUERIED: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dk of BD inputs of one group a program. 6 BT BD H FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g = tl.program_id(0).to(tl.int64)
    t, d = tl.arange(0, BT), tl.program_id(1) * BD + tl.arange(0, BD)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state, after = states + (g * (C + 1) + c) * 2 * P, coming + g * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    into_memory = tl.load(table + length * W + 2 + t, mask=t < length, other=0.0)[:, None]
    into_momentum = tl.load(table + (CHUNK + 1) * W + 2 + t, mask=t < length, other=0.0)[:, None]
    total = tl.zeros((BT, BD), tl.float32)
    memory, momentum = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BD), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        _, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
        slope *= _tile(a + first * H, t, h, length, H)
        memory = _product(slope, _tile(after, h, d, H, D), memory, PRECISION)
        momentum = _product(slope, _tile(after + P, h, d, H, D), momentum, PRECISION)
        total = _product(
            _tile(dz + first * H, t, h, length, H), _tile(state, h, d, H, D), total, PRECISION
        )
    total -= into_memory * memory + into_momentum * momentum
    if QUERIED:
        total += _tile(dk_queries + first * D, t, d, length, D)
    _matrix(dk + first * D, total, t, d, length, D)
