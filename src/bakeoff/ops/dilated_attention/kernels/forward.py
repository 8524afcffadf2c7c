"""dilated_attention in Triton: one online softmax through all branches.

A tile is BLOCK rows of one class: tokens start + c + CLASSES j of one interval, an interval being a stretch
of time that no segment border of any branch cuts. So all rows of a tile see the same segment of every branch,
and where the rate divides CLASSES either all or none of them are selected. Keys of a branch, `rate` tokens
apart, are read where they lie. A selected row is also a selected key, so the gradients of k and v are the
same loops with the roles exchanged; nobody adds to what another program adds to.

Strides come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need.
"""

import triton
import triton.language as tl

__all__ = ["LOG2E"]

LOG2E = tl.constexpr(1.4426950408889634)


NUMBERS = [
    "CLASSES", "BLOCKS", "TILES", "H", "T", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "v_b", "v_t", "v_h",
    "scale",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    q, k, v, y, lse, intervals, branches, phases,
    CLASSES: tl.int32, BLOCKS: tl.int32, TILES: tl.int32, H: tl.int32, T: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, scale: tl.float32,
    G: tl.constexpr, BRANCHES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """y and lse of BLOCK_M queries of one head: 4 D FLOPs a pair; reads q once, k and v through the L2.

    MERGE: mixed with what the branches before have left there.
    """
    b, h, start, end, origin, limit, first = _place(
        intervals, phases, CLASSES, BLOCKS, TILES, H, G, BLOCK_M, MERGE
    )
    if first >= end:
        return
    rows = first + CLASSES * tl.arange(0, BLOCK_M)
    d = tl.arange(0, WIDTH)
    q += (b * q_b + h * q_h) * ALIGN
    query = _rows(q, first, CLASSES, rows < end, q_t, True, D, WIDTH, ALIGN, BLOCK_M)
    k += (b * k_b + h // G * k_h) * ALIGN
    v += (b * v_b + h // G * v_h) * ALIGN
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    last = tl.minimum(first + CLASSES * (BLOCK_M - 1), end - 1)
    for i in range(BRANCHES):
        base, rate, count, full, active = _keys(
            branches, phases, i, h // G, H // G, start, origin, limit, first, last, rows, end, CLASSES,
            CAUSAL, BLOCK_N,
        )  # fmt: skip
        for j in tl.range(0, full, BLOCK_N, num_stages=STAGES):
            top, total, sums = _attend(
                query, k, v, top, total, sums, base, rate, j, count, rows, active, k_t, v_t, scale,
                False, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
        for j in tl.range(full, count, BLOCK_N, num_stages=STAGES):
            top, total, sums = _attend(
                query, k, v, top, total, sums, base, rate, j, count, rows, active, k_t, v_t, scale,
                True, CAUSAL, D, WIDTH, ALIGN, BLOCK_N, PRECISION,
            )  # fmt: skip
    out = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    found = _natural(top, PRECISION) + tl.log(tl.where(total > 0.0, total, 1.0))
    found = tl.where(total > 0.0, found, -float("inf"))
    y_at = y + ((b * T + rows.to(tl.int64))[:, None] * (H * D) + h * D + d[None, :])
    lse_at = lse + (b * H + h) * T + rows
    there = rows < end
    if MERGE:
        there = there & (total > 0.0)
    mask = there[:, None] & (d < D)[None, :]
    if MERGE:
        before = tl.load(lse_at, mask=there, other=0.0)
        high = tl.maximum(before, found)
        old = tl.exp2((before - high) * LOG2E)
        new = tl.exp2((found - high) * LOG2E)
        out = (tl.load(y_at, mask=mask, other=0.0).to(tl.float32) * old[:, None] + out * new[:, None]) / (
            old + new
        )[:, None]
        found = high + tl.log2(old + new) / LOG2E
    tl.store(y_at, out.to(y.dtype.element_ty), mask=mask)
    tl.store(lse_at, found, mask=there)


@triton.jit
def _power(x, PRECISION: tl.constexpr):
    # float32 keeps natural logarithms, whose small differences it rounds once; others come in powers of two.
    if PRECISION == "ieee":
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def _natural(x, PRECISION: tl.constexpr):
    if PRECISION != "ieee":
        x = x / LOG2E
    return x


@triton.jit
def _level(lse, PRECISION: tl.constexpr):
    # A log-sum-exp as `_power` takes it; 0 for a row that sees nothing.
    if PRECISION != "ieee":
        lse = lse * LOG2E
    return tl.where(lse == -float("inf"), 0.0, lse)


@triton.jit
def _place(
    intervals, phases, CLASSES, BLOCKS, TILES, H, G: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr
):
    # The program's row of the batch, head and interval, and its first token. The tiles of an interval are
    # neighbours, so that the L2 holds the keys they share. ONE: only rows of the one branch there is, whose
    # segments are the intervals, have tiles.
    pid = tl.program_id(0)
    bh = pid // TILES
    tile = pid % TILES
    if ONE:
        interval = tile // BLOCKS
        rest = tl.load(phases + bh % H // G) + tile % BLOCKS * CLASSES
    else:
        interval = tile // (CLASSES * BLOCKS)
        rest = tile % (CLASSES * BLOCKS)
    start = tl.load(intervals + 4 * interval)
    end = tl.load(intervals + 4 * interval + 1)
    origin = tl.load(intervals + 4 * interval + 2)
    limit = tl.load(intervals + 4 * interval + 3)
    first = start + rest % CLASSES + rest // CLASSES * (CLASSES * BLOCK)
    return (bh // H).to(tl.int64), bh % H, start, end, origin, limit, first


@triton.jit
def _branch(branches, phases, i, kv, heads, start, origin, limit):
    # The first token that a branch selects in the segment of an interval, its rate, how many it selects.
    w = tl.load(branches + 2 * i)
    rate = tl.load(branches + 2 * i + 1)
    segment = origin + (start - origin) // w * w
    base = segment + tl.load(phases + i * heads + kv)
    count = tl.maximum(tl.minimum(segment + w, limit) - base + rate - 1, 0) // rate
    return segment, base, rate, count


@triton.jit
def _selected(rows, base, segment, rate, end):
    return ((rows - segment) % rate == base - segment) & (rows < end)


@triton.jit
def _keys(
    branches, phases, i, kv, heads, start, origin, limit, first, last, rows, end, CLASSES,
    CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The keys of a branch that a tile of queries sees, none where it isn't selected; how many of them every
    # row sees, in whole blocks; and which rows are selected.
    segment, base, rate, count = _branch(branches, phases, i, kv, heads, start, origin, limit)
    active = _selected(rows, base, segment, rate, end)
    seen = count
    if CAUSAL:
        count = tl.minimum(count, tl.maximum(last - base + rate, 0) // rate)
        seen = tl.minimum(count, tl.maximum(first - base + rate, 0) // rate)
    count = tl.where(tl.max(active.to(tl.int32), 0) > 0, count, 0)
    full = tl.where(CLASSES % rate == 0, tl.minimum(seen, count) // BLOCK_N * BLOCK_N, 0)
    return base, rate, count, full, active


@triton.jit
def _attend(
    query, k, v, top, total, sums, base, rate, j, count, rows, active, k_t, v_t, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One block of keys; `top` and `scale` are as `_power` takes them.
    place = j + tl.arange(0, BLOCK_N)
    token = base + rate * place
    key = _rows(k, base + rate * j, rate, place < count, k_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if MASKED:
        seen = active[:, None] & (place < count)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1) * scale)
        shift = tl.where(new == -float("inf"), 0.0, new)
    else:
        new = tl.maximum(top, tl.max(scores, 1) * scale)
        shift = new
    weights = _power(scores * scale - shift[:, None], PRECISION)
    fade = _power(top - shift, PRECISION)
    total = total * fade + tl.sum(weights, 1)
    value = _rows(v, base + rate * j, rate, place < count, v_t, MASKED, D, WIDTH, ALIGN, BLOCK_N)
    sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
    return new, total, sums


@triton.jit
def _rows(
    x, first, step, there, stride,
    MASKED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows of a head, `step` tokens apart, zeros where there are none.
    d = tl.arange(0, WIDTH)
    token = (first + step * tl.arange(0, BLOCK)).to(tl.int64)
    at = x + (token[:, None] * (stride * ALIGN) + d[None, :])
    if MASKED:
        rows = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    elif WIDTH > D:
        rows = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows
