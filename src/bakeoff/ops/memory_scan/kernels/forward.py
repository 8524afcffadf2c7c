"""memory_scan forward: two launches a chunk for its keys and its update, two for all queries."""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import (
    _length,
    _matrix,
    _over_tokens,
    _product,
    _slope,
    _sum_of_parts,
    _sums,
    _tile,
    _tokens,
    _upright,
    _vector,
    _write_weights,
)

__all__ = ["_answers", "_errors", "_learn", "_query_hidden"]


@triton.jit(do_not_specialize=["T", "c", "C"])
def _learn(
    k, states, gates, z, e, a, parts, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    # BH hidden units of one group a program. From chunk c's errors E: A = E W2, then the weights before and
    # behind these units, in the next memory and momentum. From these Z = k W1' + b1 of the chunk behind it,
    # and the part that these units have in its answers, s(Z) W2'. Before the first chunk there is an empty
    # one, c = -1, which changes nothing. BT BH (6 D + 8 V) FLOPs; reads and writes 2 (D + V) BH floats of
    # state.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    SECOND: tl.constexpr = H * D + H
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length, following = _length(T, c, CHUNK), _length(T, c + 1, CHUNK)
    state = states + (g * (C + 1) + tl.maximum(c, 0)) * 2 * P
    new = state + 2 * P
    units, outputs = tl.where(length > 0, H, 0), tl.where(length > 0, V, 0)
    first = g * T + c * CHUNK
    behind = first + CHUNK
    beta, pushed, kept, into_memory, into_momentum = _write_weights(
        gates + (g * C + c) * W * W, t, length, CHUNK
    )

    carried = _sums(BT, BH, TURNED)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        weight, error = _tile(state + SECOND, u, h, V, H), _tile(e + first * V, t, u, length, V)
        carried = _over_tokens(error, weight, carried, PRECISION, TURNED)
    carried = _upright(carried, TURNED)
    _matrix(a + first * H, carried, t, h, length, H)
    hidden, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
    slope *= carried

    for_memory, for_momentum = tl.trans(into_memory * slope), tl.trans(into_momentum * slope)
    none = tl.zeros((BH, BD), tl.float32)
    ahead = _sums(BT, BH, TURNED)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        key, key_behind = _tokens(k + first * D, t, d, length, D), _tokens(k + behind * D, t, d, following, D)
        m, s = _tile(state, h, d, H, D), _tile(state + P, h, d, H, D)
        m = beta * m + pushed * s - _product(for_memory, key, none, PRECISION)
        s = kept * s - _product(for_momentum, key, none, PRECISION)
        _matrix(new, m, h, d, units, D)
        _matrix(new + P, s, h, d, units, D)
        ahead = _over_tokens(key_behind, tl.trans(m), ahead, PRECISION, TURNED)
    bias, push = _vector(state + H * D, h, H), _vector(state + P + H * D, h, H)
    bias = beta * bias + pushed * push - tl.sum(into_memory * slope, 0)
    tl.store(new + H * D + h, bias, mask=h < units)
    tl.store(new + P + H * D + h, kept * push - tl.sum(into_momentum * slope, 0), mask=h < units)
    ahead = _upright(ahead, TURNED) + bias[None, :]
    _matrix(z + behind * H, ahead, t, h, following, H)

    seen, _, _ = _slope(ahead)
    part = parts + (g * tl.num_programs(1) + tl.program_id(1)) * CHUNK * V
    none, empty = tl.zeros((BV, BH), tl.float32), _sums(BT, BV, TURNED)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        error = _tile(e + first * V, t, u, length, V)
        m, s = _tile(state + SECOND, u, h, V, H), _tile(state + P + SECOND, u, h, V, H)
        m = beta * m + pushed * s - _product(tl.trans(into_memory * error), hidden, none, PRECISION)
        s = kept * s - _product(tl.trans(into_momentum * error), hidden, none, PRECISION)
        _matrix(new + SECOND, m, u, h, outputs, H)
        _matrix(new + P + SECOND, s, u, h, outputs, H)
        answers = _over_tokens(seen, tl.trans(m), empty, PRECISION, TURNED)
        _matrix(part, _upright(answers, TURNED), t, u, following, V)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _errors(
    v, states, gates, e, parts, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # b2 before chunk c, from the errors of the chunk before, then E = 2 (the sum of the parts of s(Z) W2'
    # + b2 - v): ROWS tokens and BE outputs of one group a program. Behind the last chunk there is b2 alone.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    LAST: tl.constexpr = H * D + H + V * H
    DOWN: tl.constexpr = (BT + ROWS - 1) // ROWS
    g = tl.program_id(0).to(tl.int64)
    u = tl.program_id(1) // DOWN * BE + tl.arange(0, BE)
    every, t = tl.arange(0, BT), tl.program_id(1) % DOWN * ROWS + tl.arange(0, ROWS)
    first = g * T + c * CHUNK
    length, before = _length(T, c, CHUNK), _length(T, c - 1, CHUNK)
    beta, pushed, kept, into_memory, into_momentum = _write_weights(
        gates + (g * C + c - 1) * W * W, every, before, CHUNK
    )
    old = states + (g * (C + 1) + tl.maximum(c - 1, 0)) * 2 * P + LAST
    bias, push = _vector(old, u, V), _vector(old + P, u, V)
    error = _tile(e + (first - CHUNK) * V, every, u, before, V)
    bias = beta * bias + pushed * push - tl.sum(into_memory * error, 0)
    push = kept * push - tl.sum(into_momentum * error, 0)
    if (tl.program_id(1) % DOWN == 0) & (c > 0):
        new = states + (g * (C + 1) + c) * 2 * P + LAST
        tl.store(new + u, bias, mask=u < V)
        tl.store(new + P + u, push, mask=u < V)
    part = parts + g * PARTS * CHUNK * V
    answer = _sum_of_parts(part, PARTS, CHUNK, t, u, length, V, 16) + bias[None, :]
    error = 2 * (answer - _tile(v + first * V, t, u, length, V))
    _matrix(e + first * V, error, t, u, length, V)


@triton.jit(do_not_specialize=["T", "C"])
def _query_hidden(
    q, k, states, gates, z, a, zq, T: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The queries' hidden units before s, of one chunk: BH hidden units of one group a program. SHIFT is 1 for
    # "after", 0 for "before" and -1 for "chunk". BT BH (4 D + 2 BT) + 2 BT^2 D FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    own, pushed = tl.zeros((BT, BH), tl.float32), tl.zeros((BT, BH), tl.float32)
    seen = tl.zeros((BT, BT), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        query = _tokens(q + first * D, t, d, length, D)
        own = _product(query, tl.trans(_tile(state, h, d, H, D)), own, PRECISION)
        if SHIFT >= 0:
            key = tl.trans(_tokens(k + first * D, t, d, length, D))
            seen = _product(query, key, seen, PRECISION)
            pushed = _product(query, tl.trans(_tile(state + P, h, d, H, D)), pushed, PRECISION)
    total = own + _vector(state + H * D, h, H)[None, :]
    if SHIFT >= 0:
        row = (t + SHIFT) * W
        beta = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
        weights = _tile(table + SHIFT * W + 2, t, t, length, W)
        weights = tl.where(t[None, :] < length, weights, 0.0) * (seen + 1)
        _, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
        slope *= _tile(a + first * H, t, h, length, H)
        total = beta * total + push * (pushed + _vector(state + P + H * D, h, H)[None, :])
        total -= _product(weights, slope, tl.zeros((BT, BH), tl.float32), PRECISION)
    _matrix(zq + first * H, total, t, h, length, H)


@triton.jit(do_not_specialize=["T", "C"])
def _answers(
    states, gates, z, e, zq, o, T: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # o of one chunk: BV outputs of one group a program. BT BV (4 H + 2 BT) + 2 BT^2 H FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    t, u = tl.arange(0, BT), tl.program_id(1) * BV + tl.arange(0, BV)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    own, pushed = tl.zeros((BT, BV), tl.float32), tl.zeros((BT, BV), tl.float32)
    seen = tl.zeros((BT, BT), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        query, _, _ = _slope(_tile(zq + first * H, t, h, length, H))
        own = _product(query, tl.trans(_tile(state + H * D + H, u, h, V, H)), own, PRECISION)
        if SHIFT >= 0:
            key, _, _ = _slope(_tile(z + first * H, t, h, length, H))
            seen = _product(query, tl.trans(key), seen, PRECISION)
            moved = tl.trans(_tile(state + P + H * D + H, u, h, V, H))
            pushed = _product(query, moved, pushed, PRECISION)
    at = H * D + H + V * H
    total = own + _vector(state + at, u, V)[None, :]
    if SHIFT >= 0:
        row = (t + SHIFT) * W
        beta = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
        weights = _tile(table + SHIFT * W + 2, t, t, length, W)
        weights = tl.where(t[None, :] < length, weights, 0.0) * (seen + 1)
        error = _tile(e + first * V, t, u, length, V)
        total = beta * total + push * (pushed + _vector(state + P + at, u, V)[None, :])
        total -= _product(weights, error, tl.zeros((BT, BV), tl.float32), PRECISION)
    _matrix(o + first * V, total, t, u, length, V)
