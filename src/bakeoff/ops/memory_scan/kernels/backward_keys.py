"""memory_scan backward, what is behind the keys and the updates: two launches a chunk, from the last to the
first.

`coming` holds the gradients of memory and momentum after the chunk, `going` of those before it.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import (
    _length,
    _matrix,
    _over_tokens,
    _product,
    _read_weights,
    _slope,
    _sum_of_parts,
    _sums,
    _tile,
    _tokens,
    _upright,
    _vector,
    _write_weights,
)

__all__ = ["_to_errors", "_to_states"]


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_states(
    q, k, do, states, gates, z, a, e, zq, dzq, coming, going, df, dh, de, back, dk_parts, de_parts, dwritten,
    dlast, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
    PRECISION: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    # BH hidden units of one group a program. Of chunk c, whose dE is known: dZ, the part that these units
    # have in dk, and the gradients of the state before it. Of the chunk before that: dF and dh, and the part
    # in dE. Behind the last chunk there is an empty one, c = C, which changes nothing. `back` [2, G, 2,
    # CHUNK, H] hands dF and dh from one launch to the next. BT BH (18 D + 20 V) FLOPs; reads four states and
    # writes two.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    SECOND: tl.constexpr = H * D + H
    LAST: tl.constexpr = H * D + H + V * H
    G, program, programs = tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), program * BH + tl.arange(0, BH)
    length, before_length = _length(T, c, CHUNK), _length(T, c - 1, CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    state_before = states + (g * (C + 1) + tl.maximum(c - 1, 0)) * 2 * P
    x_at, y_at = coming + g * 2 * P, coming + g * 2 * P + P
    new_x, new_y = going + g * 2 * P, going + g * 2 * P + P
    first = g * T + c * CHUNK
    before = first - CHUNK
    table = gates + (g * C + c) * W * W
    beta, pushed, kept, into_memory, into_momentum = _write_weights(table, t, length, CHUNK)
    own, push = _read_weights(table, t, length, CHUNK, SHIFT, BT)
    _, _, _, memory_before, momentum_before = _write_weights(table - W * W, t, before_length, CHUNK)

    handed = back + (((c % 2) * G + g) * 2) * CHUNK * H
    f_grad = _tile(handed, t, h, length, H)
    arrived = _upright(_tile(handed + CHUNK * H, t, h, length, H), TURNED)
    hidden, slope, bend = _slope(_tile(z + first * H, t, h, length, H))
    errors = _tile(a + first * H, t, h, length, H)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        weight, given = _tile(state + SECOND, u, h, V, H), _tile(de + first * V, t, u, length, V)
        arrived = _over_tokens(given, weight, arrived, PRECISION, TURNED)
    z_grad = f_grad * errors * bend + _upright(arrived, TURNED) * slope
    learned = slope * errors
    asked = _tile(dzq + first * H, t, h, length, H)

    of_beta, of_push, of_kept = 0.0, 0.0, 0.0
    memory, momentum = _sums(BT, BH, TURNED), _sums(BT, BH, TURNED)
    part = dk_parts + (g * programs + program) * CHUNK * D
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x, y = _tile(x_at, h, d, H, D), _tile(y_at, h, d, H, D)
        m, s = _tile(state, h, d, H, D), _tile(state + P, h, d, H, D)
        of_beta += tl.sum(x * m)
        of_push += tl.sum(x * s)
        of_kept += tl.sum(y * s)
        into = _over_tokens(z_grad, m, _sums(BT, BD, TURNED), PRECISION, TURNED)
        into = _over_tokens(-into_memory * learned, x, into, PRECISION, TURNED)
        into = _over_tokens(-into_momentum * learned, y, into, PRECISION, TURNED)
        _matrix(part, _upright(into, TURNED), t, d, length, D)
        question = _tokens(q + first * D, t, d, length, D)
        s = pushed * x + kept * y
        if SHIFT >= 0:
            s = _product(tl.trans(push * asked), question, s, PRECISION)
        m = _product(tl.trans(z_grad), _tokens(k + first * D, t, d, length, D), beta * x, PRECISION)
        m = _product(tl.trans(own * asked), question, m, PRECISION)
        _matrix(new_x, m, h, d, H, D)
        _matrix(new_y, s, h, d, H, D)
        key = _tokens(k + before * D, t, d, before_length, D)
        memory = _over_tokens(key, tl.trans(m), memory, PRECISION, TURNED)
        momentum = _over_tokens(key, tl.trans(s), momentum, PRECISION, TURNED)
    x_1, y_1 = _vector(x_at + H * D, h, H), _vector(y_at + H * D, h, H)
    m_1, s_1 = _vector(state + H * D, h, H), _vector(state + P + H * D, h, H)
    of_beta += tl.sum(x_1 * m_1)
    of_push += tl.sum(x_1 * s_1)
    of_kept += tl.sum(y_1 * s_1)
    m_1 = beta * x_1 + tl.sum(z_grad + own * asked, 0)
    s_1 = pushed * x_1 + kept * y_1 + tl.sum(push * asked, 0)
    tl.store(new_x + H * D + h, m_1, mask=h < H)
    tl.store(new_y + H * D + h, s_1, mask=h < H)
    memory = _upright(memory, TURNED) + m_1[None, :]
    momentum = _upright(momentum, TURNED) + s_1[None, :]

    handed = back + ((((c + 1) % 2) * G + g) * 2) * CHUNK * H
    hidden_before, slope_before, _ = _slope(_tile(z + before * H, t, h, before_length, H))
    learned = slope_before * _tile(a + before * H, t, h, before_length, H)
    of_memory, of_momentum = tl.sum(learned * memory, 1), tl.sum(learned * momentum, 1)
    f_before = -(memory_before * memory + momentum_before * momentum)
    if SHIFT >= 0:
        f_before += _tile(df + before * H, t, h, before_length, H)
    _matrix(handed, f_before, t, h, before_length, H)
    f_before *= slope_before
    f_grad *= slope
    query, _, _ = _slope(_tile(zq + first * H, t, h, length, H))
    in_memory, in_momentum = -memory_before * hidden_before, -momentum_before * hidden_before
    memory, momentum = _sums(BT, BH, TURNED), _sums(BT, BH, TURNED)
    part = de_parts + (g * programs + program) * CHUNK * V
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        x, y = _tile(x_at + SECOND, u, h, V, H), _tile(y_at + SECOND, u, h, V, H)
        m, s = _tile(state + SECOND, u, h, V, H), _tile(state + P + SECOND, u, h, V, H)
        of_beta += tl.sum(x * m)
        of_push += tl.sum(x * s)
        of_kept += tl.sum(y * s)
        given = _tokens(do + first * V, t, u, length, V)
        s = pushed * x + kept * y
        if SHIFT >= 0:
            s = _product(tl.trans(push * given), query, s, PRECISION)
        m = _product(tl.trans(_tile(e + first * V, t, u, length, V)), f_grad, beta * x, PRECISION)
        m = _product(tl.trans(_tile(de + first * V, t, u, length, V)), hidden, m, PRECISION)
        m = _product(tl.trans(own * given), query, m, PRECISION)
        _matrix(new_x + SECOND, m, u, h, V, H)
        _matrix(new_y + SECOND, s, u, h, V, H)
        error = _tile(e + before * V, t, u, before_length, V)
        memory = _over_tokens(error, m, memory, PRECISION, TURNED)
        momentum = _over_tokens(error, s, momentum, PRECISION, TURNED)
        weight = tl.trans(_tile(state_before + SECOND, u, h, V, H))
        into = _over_tokens(f_before, weight, _sums(BT, BV, TURNED), PRECISION, TURNED)
        into = _over_tokens(in_memory, tl.trans(m), into, PRECISION, TURNED)
        into = _over_tokens(in_momentum, tl.trans(s), into, PRECISION, TURNED)
        _matrix(part, _upright(into, TURNED), t, u, before_length, V)
        if (c == C) & (program == 0):
            tl.store(new_x + LAST + u, _vector(x_at + LAST, u, V), mask=u < V)
            tl.store(new_y + LAST + u, _vector(y_at + LAST, u, V), mask=u < V)
    memory, momentum = _upright(memory, TURNED), _upright(momentum, TURNED)
    h_before = -(memory_before * memory + momentum_before * momentum)
    if SHIFT >= 0:
        h_before += _tile(dh + before * H, t, h, before_length, H)
    _matrix(handed + CHUNK * H, h_before, t, h, before_length, H)
    of_memory += tl.sum(hidden_before * memory, 1)
    of_momentum += tl.sum(hidden_before * momentum, 1)
    all_parts = programs + tl.cdiv(V, BE)
    at = dwritten + ((g * C + c - 1) * all_parts + program) * 2 * CHUNK + t
    tl.store(at, -of_memory, mask=(t < CHUNK) & (c > 0))
    tl.store(at + CHUNK, -of_momentum, mask=(t < CHUNK) & (c > 0))
    at = dlast + ((g * C + c) * all_parts + program) * 3
    tl.store(at, of_beta, mask=c < C)
    tl.store(at + 1, of_push, mask=c < C)
    tl.store(at + 2, of_kept, mask=c < C)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _to_errors(
    do, states, gates, e, coming, going, de_parts, de_queries, de, dv, dk_parts, dk_queries, dk, dwritten,
    dlast, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # The sums of what `_to_states` left in parts: of the chunk before chunk c the answers' gradients, twice
    # dE, into `de`, dv, and the gradient of b2 before it, BE outputs of one group a program; then dk of chunk
    # c, BE inputs of one group a program.
    OUTPUTS: tl.constexpr = (V + BE - 1) // BE
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    LAST: tl.constexpr = H * D + H + V * H
    g, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, BT)
    if program < OUTPUTS:
        if c > 0:
            u = program * BE + tl.arange(0, BE)
            length = _length(T, c - 1, CHUNK)
            state = states + (g * (C + 1) + c - 1) * 2 * P + LAST
            first = g * T + (c - 1) * CHUNK
            table = gates + (g * C + c - 1) * W * W
            beta, pushed, kept, into_memory, into_momentum = _write_weights(table, t, length, CHUNK)
            own, push = _read_weights(table, t, length, CHUNK, SHIFT, BT)
            x, y = _vector(coming + g * 2 * P + LAST, u, V), _vector(coming + g * 2 * P + P + LAST, u, V)
            total = _sum_of_parts(de_parts + g * PARTS * CHUNK * V, PARTS, CHUNK, t, u, length, V, 8)
            total -= into_memory * x[None, :] + into_momentum * y[None, :]
            if SHIFT >= 0:
                total += _tile(de_queries + first * V, t, u, length, V)
            total *= 2
            _matrix(de + first * V, total, t, u, length, V)
            _matrix(dv + first * V, -total, t, u, length, V)
            error, given = _tile(e + first * V, t, u, length, V), _tokens(do + first * V, t, u, length, V)
            all_parts = PARTS + OUTPUTS
            at = dwritten + ((g * C + c - 1) * all_parts + PARTS + program) * 2 * CHUNK + t
            tl.store(at, -tl.sum(error * x[None, :], 1), mask=t < CHUNK)
            tl.store(at + CHUNK, -tl.sum(error * y[None, :], 1), mask=t < CHUNK)
            m, s = _vector(state, u, V), _vector(state + P, u, V)
            at = dlast + ((g * C + c - 1) * all_parts + PARTS + program) * 3
            tl.store(at, tl.sum(x * m))
            tl.store(at + 1, tl.sum(x * s))
            tl.store(at + 2, tl.sum(y * s))
            new = going + g * 2 * P + LAST + u
            tl.store(new, beta * x + tl.sum(total + own * given, 0), mask=u < V)
            tl.store(new + P, pushed * x + kept * y + tl.sum(push * given, 0), mask=u < V)
    else:
        d = (program - OUTPUTS) * BE + tl.arange(0, BE)
        length = _length(T, c, CHUNK)
        first = g * T + c * CHUNK
        total = _sum_of_parts(dk_parts + g * PARTS * CHUNK * D, PARTS, CHUNK, t, d, length, D, 8)
        if SHIFT >= 0:
            total += _tile(dk_queries + first * D, t, d, length, D)
        _matrix(dk + first * D, total, t, d, length, D)
