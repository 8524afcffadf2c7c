"""memory_scan forward: three launches a chunk for its keys and its update, two for all queries."""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _matrix, _product, _slope, _tile, _vector

__all__ = ["_answers", "_errors", "_hidden", "_learn", "_query_hidden"]


@triton.jit(do_not_specialize=["T", "c", "C"])
def _hidden(
    k, states, z, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Z = k W1' + b1 of chunk c: BH hidden units of one group a program. 2 BT D BH FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    total = tl.zeros((BT, BH), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        total = _product(
            _tile(k + first * D, t, d, length, D), tl.trans(_tile(state, h, d, H, D)), total, PRECISION
        )
    total += _vector(state + H * D, h, H)[None, :]
    _matrix(z + first * H, total, t, h, length, H)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _errors(
    v, states, z, e, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # E = 2 (s(Z) W2' + b2 - v): BV outputs of one group a program. 2 BT H BV FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    g = tl.program_id(0).to(tl.int64)
    t, u = tl.arange(0, BT), tl.program_id(1) * BV + tl.arange(0, BV)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    total = tl.zeros((BT, BV), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        hidden, _, _ = _slope(_tile(z + first * H, t, h, length, H))
        total = _product(hidden, tl.trans(_tile(state + H * D + H, u, h, V, H)), total, PRECISION)
    total += _vector(state + H * D + H + V * H, u, V)[None, :]
    error = 2 * (total - _tile(v + first * V, t, u, length, V))
    _matrix(e + first * V, error, t, u, length, V)


@triton.jit(do_not_specialize=["T", "c", "C"])
def _learn(
    k, states, gates, z, e, a, T: tl.int64, c: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A = E W2, then the next memory and momentum: of BH hidden units of one group the weights before them in
    # one program, those behind them in another. BT BH (2 V + 4 (D + V)) FLOPs; reads and writes
    # 2 (D + V) BH floats of state.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    beta, pushed = tl.load(table + length * W), tl.load(table + length * W + 1)
    kept = tl.load(table + (CHUNK + 1) * W + 1)
    into_memory = tl.load(table + length * W + 2 + t, mask=t < length, other=0.0)[:, None]
    into_momentum = tl.load(table + (CHUNK + 1) * W + 2 + t, mask=t < length, other=0.0)[:, None]
    if tl.program_id(2) == 0:
        _learn_first(
            k + first * D, state, z + first * H, e + first * V, a + first * H, beta, pushed, kept,
            into_memory, into_momentum, t, h, length, D, H, V, BT, BD, BV, BH, PRECISION,
        )  # fmt: skip
    else:
        _learn_second(
            state, z + first * H, e + first * V, beta, pushed, kept, into_memory, into_momentum, t, h, length,
            D, H, V, BV, BH, PRECISION,
        )  # fmt: skip


@triton.jit
def _learn_first(
    k, state, z, e, a, beta, pushed, kept, into_memory, into_momentum, t, h, length,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A, W1 and b1. Pointers stand at this chunk and group.
    P: tl.constexpr = H * D + H + V * H + V
    new = state + 2 * P
    total = tl.zeros((BT, BH), tl.float32)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        weight = _tile(state + H * D + H, u, h, V, H)
        total = _product(_tile(e, t, u, length, V), weight, total, PRECISION)
    _matrix(a, total, t, h, length, H)
    _, slope, _ = _slope(_tile(z, t, h, length, H))
    slope *= total
    for_memory, for_momentum = tl.trans(into_memory * slope), tl.trans(into_momentum * slope)
    none = tl.zeros((BH, BD), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        key = _tile(k, t, d, length, D)
        m, s = _tile(state, h, d, H, D), _tile(state + P, h, d, H, D)
        _matrix(new, beta * m + pushed * s - _product(for_memory, key, none, PRECISION), h, d, H, D)
        _matrix(new + P, kept * s - _product(for_momentum, key, none, PRECISION), h, d, H, D)
    bias, push = _vector(state + H * D, h, H), _vector(state + P + H * D, h, H)
    learned = beta * bias + pushed * push - tl.sum(into_memory * slope, 0)
    tl.store(new + H * D + h, learned, mask=h < H)
    tl.store(new + P + H * D + h, kept * push - tl.sum(into_momentum * slope, 0), mask=h < H)


@triton.jit
def _learn_second(
    state, z, e, beta, pushed, kept, into_memory, into_momentum, t, h, length,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # W2 and, from the first hidden units' program, b2. Pointers stand at this chunk and group.
    P: tl.constexpr = H * D + H + V * H + V
    SECOND: tl.constexpr = H * D + H
    LAST: tl.constexpr = H * D + H + V * H
    new = state + 2 * P
    hidden, _, _ = _slope(_tile(z, t, h, length, H))
    none = tl.zeros((BV, BH), tl.float32)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        error = _tile(e, t, u, length, V)
        m, s = _tile(state + SECOND, u, h, V, H), _tile(state + P + SECOND, u, h, V, H)
        learned = _product(tl.trans(into_memory * error), hidden, none, PRECISION)
        _matrix(new + SECOND, beta * m + pushed * s - learned, u, h, V, H)
        learned = _product(tl.trans(into_momentum * error), hidden, none, PRECISION)
        _matrix(new + P + SECOND, kept * s - learned, u, h, V, H)
        if tl.program_id(1) == 0:
            bias, push = _vector(state + LAST, u, V), _vector(state + P + LAST, u, V)
            bias = beta * bias + pushed * push - tl.sum(into_memory * error, 0)
            tl.store(new + LAST + u, bias, mask=u < V)
            tl.store(new + P + LAST + u, kept * push - tl.sum(into_momentum * error, 0), mask=u < V)


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
        query = _tile(q + first * D, t, d, length, D)
        own = _product(query, tl.trans(_tile(state, h, d, H, D)), own, PRECISION)
        if SHIFT >= 0:
            key = tl.trans(_tile(k + first * D, t, d, length, D))
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
