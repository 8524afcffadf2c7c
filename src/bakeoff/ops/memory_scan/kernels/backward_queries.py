"""memory_scan backward, what is behind the queries: two launches for all chunks.

d stands for gradients: dzq of the queries' hidden units, dF, dh and dE for what queries saw of a chunk's
keys.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _matrix, _product, _slope, _tile, _tokens, _vector

__all__ = ["_from_answers", "_to_tokens"]


@triton.jit(do_not_specialize=["T", "C"])
def _from_answers(
    q, k, do, states, gates, z, a, e, zq, dzq, df, dh, dread, T: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dzq, dF and dh of BH hidden units of one chunk and group a program, and what beta and f get from them.
    # BT BH (4 V + 4 D + 8 BT) + 2 BT^2 (D + V) FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    t, h = tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    none = tl.zeros((BT, BH), tl.float32)
    own, pushed = tl.zeros((BT, BH), tl.float32), tl.zeros((BT, BH), tl.float32)
    seen = tl.zeros((BT, BT), tl.float32)
    for start in range(0, V, BV):
        u = start + tl.arange(0, BV)
        arrived = _tokens(do + first * V, t, u, length, V)
        own = _product(arrived, _tile(state + H * D + H, u, h, V, H), own, PRECISION)
        if SHIFT >= 0:
            error = tl.trans(_tile(e + first * V, t, u, length, V))
            seen = _product(arrived, error, seen, PRECISION)
            pushed = _product(arrived, _tile(state + P + H * D + H, u, h, V, H), pushed, PRECISION)
    query, query_slope, _ = _slope(_tile(zq + first * H, t, h, length, H))
    if SHIFT < 0:
        _matrix(dzq + first * H, own * query_slope, t, h, length, H)
    else:
        row = (t + SHIFT) * W
        beta = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
        weights = _tile(table + SHIFT * W + 2, t, t, length, W)
        weights = tl.where(t[None, :] < length, weights, 0.0)
        behind = -seen * weights
        hidden, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
        slope *= _tile(a + first * H, t, h, length, H)
        arrived = _product(behind, hidden, beta * own + push * pushed, PRECISION) * query_slope
        _matrix(dzq + first * H, arrived, t, h, length, H)
        _matrix(dh + first * H, _product(tl.trans(behind), query, none, PRECISION), t, h, length, H)
        from_beta, from_push = tl.sum(query * own, 1), tl.sum(query * pushed, 1)
        seen = tl.zeros((BT, BT), tl.float32)
        own, pushed = tl.zeros((BT, BH), tl.float32), tl.zeros((BT, BH), tl.float32)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            asked = _tokens(q + first * D, t, d, length, D)
            key = tl.trans(_tokens(k + first * D, t, d, length, D))
            seen = _product(asked, key, seen, PRECISION)
            own = _product(asked, tl.trans(_tile(state, h, d, H, D)), own, PRECISION)
            pushed = _product(asked, tl.trans(_tile(state + P, h, d, H, D)), pushed, PRECISION)
        weights *= seen + 1
        own_keys = _product(tl.trans(weights), arrived, none, PRECISION)
        _matrix(df + first * H, -own_keys, t, h, length, H)
        from_beta += tl.sum(arrived * (own + _vector(state + H * D, h, H)[None, :]), 1)
        from_push += tl.sum(arrived * (pushed + _vector(state + P + H * D, h, H)[None, :]), 1)
        if tl.program_id(1) == 0:
            for start in range(0, V, BV):
                u = start + tl.arange(0, BV)
                bias = H * D + H + V * H
                answered = _tokens(do + first * V, t, u, length, V)
                from_beta += tl.sum(answered * _vector(state + bias, u, V)[None, :], 1)
                from_push += tl.sum(answered * _vector(state + P + bias, u, V)[None, :], 1)
        part = dread + ((g * C + c) * tl.num_programs(1) + tl.program_id(1)) * 2 * CHUNK + t
        tl.store(part, from_beta, mask=t < CHUNK)
        tl.store(part + CHUNK, from_push, mask=t < CHUNK)


@triton.jit(do_not_specialize=["T", "C"])
def _to_tokens(
    q, k, do, states, gates, z, a, e, zq, dzq, de_queries, dq, dk_queries, dweights, T: tl.int64, C: tl.int64,
    CHUNK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dq, dk and dE of one chunk and group, BD inputs and BV outputs a program; the first also gives the
    # gradient of the attention's weights. BT H (4 BT + 4 BD) + 2 BT^2 (D + V + 2 BD + BV) FLOPs.
    P: tl.constexpr = H * D + H + V * H + V
    W: tl.constexpr = CHUNK + 2
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    t = tl.arange(0, BT)
    own_d, own_u = tl.program_id(1) * BD + tl.arange(0, BD), tl.program_id(1) * BV + tl.arange(0, BV)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    state = states + (g * (C + 1) + c) * 2 * P
    first = g * T + c * CHUNK
    table = gates + (g * C + c) * W * W
    own, pushed = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BD), tl.float32)
    hidden_seen, behind = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        arrived = _tile(dzq + first * H, t, h, length, H)
        own = _product(arrived, _tile(state, h, own_d, H, D), own, PRECISION)
        if SHIFT >= 0:
            pushed = _product(arrived, _tile(state + P, h, own_d, H, D), pushed, PRECISION)
            query, _, _ = _slope(_tile(zq + first * H, t, h, length, H))
            hidden, slope, _ = _slope(_tile(z + first * H, t, h, length, H))
            slope *= _tile(a + first * H, t, h, length, H)
            hidden_seen = _product(query, tl.trans(hidden), hidden_seen, PRECISION)
            behind = _product(arrived, tl.trans(slope), behind, PRECISION)
    if SHIFT < 0:
        _matrix(dq + first * D, own, t, own_d, length, D)
    else:
        row = (t + SHIFT) * W
        beta = tl.load(table + row, mask=t < length, other=0.0)[:, None]
        push = tl.load(table + row + 1, mask=t < length, other=0.0)[:, None]
        weights = _tile(table + SHIFT * W + 2, t, t, length, W)
        weights = tl.where(t[None, :] < length, weights, 0.0)
        back = -behind * weights
        key, asked = _tokens(k + first * D, t, own_d, length, D), _tokens(q + first * D, t, own_d, length, D)
        into = _product(back, key, beta * own + push * pushed, PRECISION)
        _matrix(dq + first * D, into, t, own_d, length, D)
        none = tl.zeros((BT, BD), tl.float32)
        _matrix(dk_queries + first * D, _product(tl.trans(back), asked, none, PRECISION), t, own_d, length, D)
        answered = _tokens(do + first * V, t, own_u, length, V)
        into = tl.trans(weights * (hidden_seen + 1))
        none = tl.zeros((BT, BV), tl.float32)
        _matrix(de_queries + first * V, -_product(into, answered, none, PRECISION), t, own_u, length, V)
        if tl.program_id(1) == 0:
            seen, errors = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
            for start in range(0, D, BD):
                d = start + tl.arange(0, BD)
                keys = tl.trans(_tokens(k + first * D, t, d, length, D))
                seen = _product(_tokens(q + first * D, t, d, length, D), keys, seen, PRECISION)
            for start in range(0, V, BV):
                u = start + tl.arange(0, BV)
                error = tl.trans(_tile(e + first * V, t, u, length, V))
                errors = _product(_tokens(do + first * V, t, u, length, V), error, errors, PRECISION)
            total = -errors * (hidden_seen + 1) - behind * (seen + 1)
            total = tl.where((t[:, None] < length) & (t[None, :] < length), total, 0.0)
            _matrix(dweights + (g * C + c) * CHUNK * CHUNK, total, t, t, CHUNK, CHUNK)
