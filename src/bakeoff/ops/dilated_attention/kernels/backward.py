"""The gradients of dilated_attention in Triton: of q by tiles of queries, of k and v by tiles of keys.

p = exp(score - lse) of the whole; ds = p (dp - delta). With exact gradients delta is sum(dy y) - dlse, one
number a query. With mixing weights that count as constants it is sum(dy y_i) - dlse for each branch i.
"""

import triton
import triton.language as tl

from bakeoff.ops.dilated_attention.kernels.forward import (
    _branch,
    _keys,
    _level,
    _natural,
    _place,
    _power,
    _rows,
    _selected,
)  # fmt: skip

__all__: list[str] = []

NUMBERS = [
    "CLASSES", "BLOCKS", "TILES", "H", "T", "plane", "branch", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h",
    "v_b", "v_t", "v_h", "dy_b", "dy_t", "dy_h", "scale",
]  # fmt: skip


@triton.jit(do_not_specialize=["H", "T", "dy_b", "dy_t", "dy_h"])
def _delta(
    dy, y, dlse, delta, H: tl.int32, T: tl.int32, dy_b: tl.int64, dy_t: tl.int64, dy_h: tl.int64,
    D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = sum(dy y) - dlse for BLOCK queries of one head: reads dy and y once."""
    blocks = (T + BLOCK - 1) // BLOCK
    bh = tl.program_id(0) // blocks
    b, h = (bh // H).to(tl.int64), bh % H
    rows = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    there = (rows < T)[:, None] & (d < D)[None, :]
    dy_at = dy + (b * dy_b + h * dy_h) * ALIGN + rows.to(tl.int64)[:, None] * (dy_t * ALIGN) + d[None, :]
    y_at = y + (b * T + rows.to(tl.int64))[:, None] * (H * D) + h * D + d[None, :]
    grad = tl.load(dy_at, mask=there, other=0.0).to(tl.float32)
    found = tl.sum(grad * tl.load(y_at, mask=there, other=0.0).to(tl.float32), 1)
    place = (b * H + h) * T + rows
    if dlse is not None:
        found -= tl.load(dlse + place, mask=rows < T, other=0.0)
    tl.store(delta + place, found, mask=rows < T)


@triton.jit(do_not_specialize=NUMBERS)
def _branch_delta(
    q, k, v, dy, lse, dlse, delta, intervals, branches, phases,
    CLASSES: tl.int32, BLOCKS: tl.int32, TILES: tl.int32, H: tl.int32, T: tl.int32, plane: tl.int64,
    branch: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, dy_b: tl.int64, dy_t: tl.int64, dy_h: tl.int64,
    scale: tl.float32,
    G: tl.constexpr, BRANCHES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """delta of each branch: sum(p dp) / sum(p) over its own keys; 4 D FLOPs a pair."""
    b, h, start, end, origin, limit, first = _place(
        intervals, phases, CLASSES, BLOCKS, TILES, H, G, BLOCK_M, MERGE
    )
    if first >= end:
        return
    rows = first + CLASSES * tl.arange(0, BLOCK_M)
    there = rows < end
    q += (b * q_b + h * q_h) * ALIGN
    query = _rows(q, first, CLASSES, there, q_t, True, D, WIDTH, ALIGN, BLOCK_M)
    dy += (b * dy_b + h * dy_h) * ALIGN
    grad = _rows(dy, first, CLASSES, there, dy_t, True, D, WIDTH, ALIGN, BLOCK_M)
    k += (b * k_b + h // G * k_h) * ALIGN
    v += (b * v_b + h // G * v_h) * ALIGN
    place = (b * H + h) * T + rows
    level = _level(tl.load(lse + place, mask=there, other=0.0), PRECISION)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if dlse is not None:
        shift = tl.load(dlse + place, mask=there, other=0.0)
    last = tl.minimum(first + CLASSES * (BLOCK_M - 1), end - 1)
    for i in range(BRANCHES):
        base, rate, count, _, active = _keys(
            branches, phases, i, h // G, H // G, start, origin, limit, first, last, rows, end, CLASSES,
            CAUSAL, BLOCK_N,
        )  # fmt: skip
        weight = tl.zeros([BLOCK_M], tl.float32)
        found = tl.zeros([BLOCK_M], tl.float32)
        for j in tl.range(0, count, BLOCK_N, num_stages=STAGES):
            at = j + tl.arange(0, BLOCK_N)
            token = base + rate * at
            key = _rows(k, base + rate * j, rate, at < count, k_t, True, D, WIDTH, ALIGN, BLOCK_N)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            seen = active[:, None] & (at < count)[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= rows[:, None])
            p = tl.where(seen, _power(scores * scale - level[:, None], PRECISION), 0.0)
            value = _rows(v, base + rate * j, rate, at < count, v_t, True, D, WIDTH, ALIGN, BLOCK_N)
            weight += tl.sum(p, 1)
            found += tl.sum(p * tl.dot(grad, tl.trans(value), input_precision=PRECISION), 1)
        found = tl.where(weight > 0.0, found / tl.where(weight > 0.0, weight, 1.0), 0.0) - shift
        tl.store(delta + (branch + i) * plane + place, found, mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def _queries(
    q, k, v, dy, lse, delta, dq, intervals, branches, phases,
    CLASSES: tl.int32, BLOCKS: tl.int32, TILES: tl.int32, H: tl.int32, T: tl.int32, plane: tl.int64,
    branch: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, dy_b: tl.int64, dy_t: tl.int64, dy_h: tl.int64,
    scale: tl.float32,
    G: tl.constexpr, BRANCHES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, a loop over keys: 6 D FLOPs a pair."""
    b, h, start, end, origin, limit, first = _place(
        intervals, phases, CLASSES, BLOCKS, TILES, H, G, BLOCK_M, MERGE
    )
    if first >= end:
        return
    rows = first + CLASSES * tl.arange(0, BLOCK_M)
    there = rows < end
    q += (b * q_b + h * q_h) * ALIGN
    query = _rows(q, first, CLASSES, there, q_t, True, D, WIDTH, ALIGN, BLOCK_M)
    dy += (b * dy_b + h * dy_h) * ALIGN
    grad = _rows(dy, first, CLASSES, there, dy_t, True, D, WIDTH, ALIGN, BLOCK_M)
    k += (b * k_b + h // G * k_h) * ALIGN
    v += (b * v_b + h // G * v_h) * ALIGN
    place = (b * H + h) * T + rows
    level = _level(tl.load(lse + place, mask=there, other=0.0), PRECISION)
    slope = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    last = tl.minimum(first + CLASSES * (BLOCK_M - 1), end - 1)
    for i in range(BRANCHES):
        base, rate, count, full, active = _keys(
            branches, phases, i, h // G, H // G, start, origin, limit, first, last, rows, end, CLASSES,
            CAUSAL, BLOCK_N,
        )  # fmt: skip
        mean = tl.load(delta + (branch + i) * plane + place, mask=there, other=0.0)
        for j in tl.range(0, full, BLOCK_N, num_stages=STAGES):
            slope = _query_slope(
                query, grad, k, v, level, mean, slope, base, rate, j, count, rows, active, k_t, v_t, scale,
                False, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
        for j in tl.range(full, count, BLOCK_N, num_stages=STAGES):
            slope = _query_slope(
                query, grad, k, v, level, mean, slope, base, rate, j, count, rows, active, k_t, v_t, scale,
                True, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
    d = tl.arange(0, WIDTH)
    at = (b * T + rows.to(tl.int64))[:, None] * (H * D) + h * D + d[None, :]
    mask = there[:, None] & (d < D)[None, :]
    slope = slope * _natural(scale, PRECISION)
    if MERGE:
        slope += tl.load(dq + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dq + at, slope.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _query_slope(
    query, grad, k, v, level, mean, slope, base, rate, j, count, rows, active, k_t, v_t, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place = j + tl.arange(0, BLOCK_N)
    token = base + rate * place
    key = _rows(k, base + rate * j, rate, place < count, k_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    p = _power(scores * scale - level[:, None], PRECISION)
    if MASKED:
        seen = active[:, None] & (place < count)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= rows[:, None])
        p = tl.where(seen, p, 0.0)
    value = _rows(v, base + rate * j, rate, place < count, v_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    ds = p * (dp - mean[:, None])
    return tl.dot(ds.to(key.dtype), key, slope, input_precision=PRECISION)


@triton.jit(do_not_specialize=NUMBERS)
def _keys_and_values(
    q, k, v, dy, lse, delta, dk, dv, intervals, branches, phases,
    CLASSES: tl.int32, BLOCKS: tl.int32, TILES: tl.int32, H: tl.int32, T: tl.int32, plane: tl.int64,
    branch: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, dy_b: tl.int64, dy_t: tl.int64, dy_h: tl.int64,
    scale: tl.float32,
    G: tl.constexpr, BRANCHES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_M keys of one kv head, a loop over its heads' queries: 8 D FLOPs a pair."""
    b, kv, start, end, origin, limit, first = _place(
        intervals, phases, CLASSES, BLOCKS, TILES, H // G, 1, BLOCK_M, MERGE
    )
    if first >= end:
        return
    rows = first + CLASSES * tl.arange(0, BLOCK_M)
    there = rows < end
    k += (b * k_b + kv * k_h) * ALIGN
    key = _rows(k, first, CLASSES, there, k_t, True, D, WIDTH, ALIGN, BLOCK_M)
    v += (b * v_b + kv * v_h) * ALIGN
    value = _rows(v, first, CLASSES, there, v_t, True, D, WIDTH, ALIGN, BLOCK_M)
    dkey = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    dvalue = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    last = tl.minimum(first + CLASSES * (BLOCK_M - 1), end - 1)
    for step in range(BRANCHES * G):
        i = step // G
        h = kv * G + step % G
        segment, base, rate, count = _branch(branches, phases, i, kv, H // G, start, origin, limit)
        active = _selected(rows, base, segment, rate, end)
        count = tl.where(tl.max(active.to(tl.int32), 0) > 0, count, 0)
        begin = 0
        whole = 0  # from here on every query sees every key of the tile
        if CAUSAL:
            begin = tl.minimum(tl.maximum(first - base + rate - 1, 0) // rate, count)
            whole = tl.minimum(tl.maximum(last - base + rate - 1, 0) // rate, count)
            whole = tl.minimum(begin + (whole - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, count)
        full = whole + (count - whole) // BLOCK_N * BLOCK_N
        if CLASSES % rate != 0:
            whole = count
            full = count
        q_head = q + (b * q_b + h * q_h) * ALIGN
        dy_head = dy + (b * dy_b + h * dy_h) * ALIGN
        head = (b * H + h) * T
        mean = delta + (branch + i) * plane + head
        for j in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
            dkey, dvalue = _key_slope(
                key, value, q_head, dy_head, lse + head, mean, dkey, dvalue, base, rate, j, count, rows,
                active, q_t, dy_t, scale,
                True, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
        for j in tl.range(whole, full, BLOCK_N, num_stages=STAGES):
            dkey, dvalue = _key_slope(
                key, value, q_head, dy_head, lse + head, mean, dkey, dvalue, base, rate, j, count, rows,
                active, q_t, dy_t, scale,
                False, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
        for j in tl.range(full, count, BLOCK_N, num_stages=STAGES):
            dkey, dvalue = _key_slope(
                key, value, q_head, dy_head, lse + head, mean, dkey, dvalue, base, rate, j, count, rows,
                active, q_t, dy_t, scale,
                True, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
    d = tl.arange(0, WIDTH)
    at = (b * T + rows.to(tl.int64))[:, None] * (H // G * D) + kv * D + d[None, :]
    mask = there[:, None] & (d < D)[None, :]
    if dk is not None:
        dkey = dkey * _natural(scale, PRECISION)
        if MERGE:
            dkey += tl.load(dk + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dk + at, dkey.to(dk.dtype.element_ty), mask=mask)
    if dv is not None:
        if MERGE:
            dvalue += tl.load(dv + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dv + at, dvalue.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _key_slope(
    key, value, q, dy, lse, delta, dkey, dvalue, base, rate, j, count, rows, active, q_t, dy_t, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One block of queries, whose scores stand transposed: [keys, queries].
    place = j + tl.arange(0, BLOCK_N)
    token = base + rate * place
    there = place < count
    query = _rows(q, base + rate * j, rate, there, q_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    level = _level(tl.load(lse + token, mask=there, other=0.0), PRECISION)
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    p = _power(scores * scale - level[None, :], PRECISION)
    if MASKED:
        seen = active[:, None] & there[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] <= token[None, :])
        p = tl.where(seen, p, 0.0)
    grad = _rows(dy, base + rate * j, rate, there, dy_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    dvalue = tl.dot(p.to(grad.dtype), grad, dvalue, input_precision=PRECISION)
    dp = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
    ds = p * (dp - tl.load(delta + token, mask=there, other=0.0)[None, :])
    dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision=PRECISION)
    return dkey, dvalue
