"""The forward of one branch of dilated_attention for NVIDIA's Hopper, written in Gluon.

A program holds WORKERS * 64 queries of a segment at a time and goes through the segment's keys BLOCK at a
time: q k^T, softmax, p v. One warp copies tiles from memory by the bulk copy engine (TMA) into rings of
STAGES blocks of k and of v; each of the WORKERS warpgroups multiplies 64 queries with what arrives. While the
tensor cores add up the values of a block, a warpgroup computes the softmax of the next one.

All segments are whole, so the rows that a head selects are a plain tensor: token = segment w + row r + phase
stands at [segment, row, phase, head] of a view of 5 dimensions. The copy engine fills zeros in for rows
behind a segment's end, and doesn't write such rows.

A launch does 4 D FLOPs a pair of one branch. It reads q, k, v and writes y and lse of the branch's rows; k
and v are read once from memory and then from the L2, as neighbouring programs share them.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["DTYPES"]

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

_LOG2E = gl.constexpr(1.4426950408889634)

_together = getattr(gl, "barrier", None) or gl.thread_barrier  # as Triton 3.6 calls it

_NUMBERS = ["ITEMS", "BLOCKS", "H", "T", "SEGMENTS", "LENGTH", "RATE", "scale"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _attend(
    q, k, v, y, lse, phases,
    ITEMS: gl.int32, BLOCKS: gl.int32, H: gl.int32, T: gl.int32, SEGMENTS: gl.int32, LENGTH: gl.int32,
    RATE: gl.int32, scale: gl.float32,
    G: gl.constexpr, DTYPE: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, MERGE: gl.constexpr,
    EARLY: gl.constexpr, WIDTH: gl.constexpr, WORKERS: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
    COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """y and lse of one branch's rows; program p takes items p, p + programs, ...

    q, k, v, y: views [sequences * SEGMENTS, LENGTH, RATE, heads, D] in tiles of 64 or BLOCK rows.
    An item is a block of WORKERS * 64 rows of a segment and head. With CAUSAL it is two, the i-th and the
    i-th from behind, so that all items are equally long.
    RAGGED: whether LENGTH is no multiple of BLOCK. MERGE: mixed with what the branches before have left in
    y and lse. EARLY: whether the next branch's programs may take the places of this one's that have ended,
    and begin. TURNS: whether warpgroups take turns in issuing products.
    """
    if EARLY:
        _grid_dependency("launch_dependents")
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(DTYPE, [WORKERS, 64, WIDTH], tile)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], tile)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], tile)
    y_tiles = gl.allocate_shared_memory(DTYPE, [WORKERS, 64, WIDTH], tile)
    q_full, q_free = _barriers(WORKERS, 1), _barriers(WORKERS, 1)
    y_full, y_free = _barriers(WORKERS, 1), _barriers(WORKERS, 1)
    k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, WORKERS)
    v_full, v_free = _barriers(STAGES, 1), _barriers(STAGES, WORKERS)
    turns = _barriers(WORKERS, 1)
    tiles = (q_tiles, k_tiles, v_tiles, y_tiles)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, y_full, y_free, turns)
    numbers = (ITEMS, BLOCKS, H, T, SEGMENTS, LENGTH, RATE)
    fence_async_shared()  # the copy engine sees the barriers
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_work, (y, lse, phases, tiles, bars, numbers, scale, G, CAUSAL, RAGGED, MERGE, TURNS, 0)),
                (_work, (y, lse, phases, tiles, bars, numbers, scale, G, CAUSAL, RAGGED, MERGE, TURNS, 1)),
                (_copy, ((q, k, v, y), tiles, bars, phases, numbers, G, CAUSAL, MERGE, EARLY)),
            ],
            [4, 1],
            [WORKER_REGISTERS, COPIER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_work, (y, lse, phases, tiles, bars, numbers, scale, G, CAUSAL, RAGGED, MERGE, TURNS, 0)),
                (_work, (y, lse, phases, tiles, bars, numbers, scale, G, CAUSAL, RAGGED, MERGE, TURNS, 1)),
                (_work, (y, lse, phases, tiles, bars, numbers, scale, G, CAUSAL, RAGGED, MERGE, TURNS, 2)),
                (_copy, ((q, k, v, y), tiles, bars, phases, numbers, G, CAUSAL, MERGE, EARLY)),
            ],
            [4, 4, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, COPIER_REGISTERS],
        )


@gluon.jit
def _grid_dependency(what: gl.constexpr):
    # launch_dependents: what is launched next may begin. wait: until what was launched before has ended.
    gl.inline_asm_elementwise(
        "griddepcontrol." + what + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    # Barriers that complete a phase each time `count` have arrived.
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def _visits(numbers, CAUSAL: gl.constexpr):
    # How many blocks of rows this program holds one after the other.
    items = gl.cdiv(numbers[0] - gl.program_id(0), gl.num_programs(0))
    if CAUSAL:
        items = 2 * items
    return items


@gluon.jit
def _visit(
    n, numbers, phases, G: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr
):
    # The n-th of them: its segment (of all sequences), head, first row and phase; how many blocks of keys.
    _, BLOCKS, H, _, _, LENGTH, _ = numbers
    if CAUSAL:
        item = gl.program_id(0) + n // 2 * gl.num_programs(0)
        place = item % BLOCKS
        place = gl.where(n % 2 == 0, 2 * BLOCKS - 1 - place, place)
    else:
        item = gl.program_id(0) + n * gl.num_programs(0)
        place = item % BLOCKS
    h = item // BLOCKS % H
    segment = item // BLOCKS // H
    first = place * ROWS
    keys = LENGTH
    if CAUSAL:
        keys = gl.minimum(keys, first + ROWS)
    return segment, h, first, gl.load(phases + h // G), gl.cdiv(keys, BLOCK)


@gluon.jit
def _copy(
    views, tiles, bars, phases, numbers,
    G: gl.constexpr, CAUSAL: gl.constexpr, MERGE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    # One warp: every tile that the others need, in the order in which they need them.
    q, k, v, y = views
    q_tiles, k_tiles, v_tiles, y_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, y_full, y_free, _ = bars
    WORKERS: gl.constexpr = q_tiles.shape[0]
    BLOCK: gl.constexpr = k_tiles.shape[1]
    step = 0
    for n in range(_visits(numbers, CAUSAL)):
        segment, h, first, phase, count = _visit(n, numbers, phases, G, CAUSAL, WORKERS * 64, BLOCK)
        kv = h // G
        _next(k, [segment, 0, phase, kv, 0], step, k_tiles, k_full, k_free)
        for g in gl.static_range(WORKERS):
            mbarrier.wait(q_free.index(g), (n & 1) ^ 1)
            _fetch(q, [segment, first + 64 * g, phase, h, 0], q_full.index(g), q_tiles.index(g))
        for j in range(1, count):
            _next(k, [segment, j * BLOCK, phase, kv, 0], step + 1, k_tiles, k_full, k_free)
            _next(v, [segment, (j - 1) * BLOCK, phase, kv, 0], step, v_tiles, v_full, v_free)
            step += 1
        _next(v, [segment, (count - 1) * BLOCK, phase, kv, 0], step, v_tiles, v_full, v_free)
        step += 1
        if MERGE:
            if EARLY:
                _grid_dependency("wait")
            for g in gl.static_range(WORKERS):
                mbarrier.wait(y_free.index(g), n & 1)
                _fetch(y, [segment, first + 64 * g, phase, h, 0], y_full.index(g), y_tiles.index(g))


@gluon.jit
def _next(view, where, step, tiles, full, free):
    # Fetches the tile of a step into its place in a ring, as soon as nobody needs what is there.
    STAGES: gl.constexpr = tiles.shape[0]
    at = step % STAGES
    mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
    _fetch(view, where, full.index(at), tiles.index(at))


@gluon.jit
def _fetch(view, where, full, tile):
    # Starts to copy a tile of a view; `full` completes when it is there.
    mbarrier.expect(full, view.block_type.nbytes)
    tma.async_copy_global_to_shared(view, where, full, _as_in(view, tile))


@gluon.jit
def _as_in(view, tile):
    # A tile of rows with the 5 dimensions of the view; its bytes lie alike.
    return tile._reinterpret(view.dtype, view.block_shape, view.layout)


@gluon.jit
def _work(
    y, lse, phases, tiles, bars, numbers, scale,
    G: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, MERGE: gl.constexpr, TURNS: gl.constexpr,
    g: gl.constexpr,
):  # fmt: skip
    # The g-th warpgroup: 64 queries at a time. `top` and `scale` are of powers of two.
    q_tiles, k_tiles, v_tiles, y_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, y_full, y_free, _ = bars
    _, _, H, T, SEGMENTS, LENGTH, RATE = numbers
    dtype: gl.constexpr = k_tiles.dtype
    WORKERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK: gl.constexpr = k_tiles.shape[1]
    WIDTH: gl.constexpr = k_tiles.shape[2]
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    sums_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    weights_in: gl.constexpr = gl.DotOperandLayout(0, sums_in, 2)
    row_in: gl.constexpr = gl.SliceLayout(1, scores_in)
    query = q_tiles.index(g)
    old = y_tiles.index(g)
    step = 0
    for n in range(_visits(numbers, CAUSAL)):
        segment, h, first, phase, count = _visit(n, numbers, phases, G, CAUSAL, WORKERS * 64, BLOCK)
        first += 64 * g
        rows = first + gl.arange(0, 64, row_in)
        seen = LENGTH
        if CAUSAL:
            seen = gl.minimum(LENGTH, first + 1)
        full = gl.maximum(seen // BLOCK, 1)  # blocks that all rows see, but the first is masked anyway

        mbarrier.wait(q_full.index(g), n & 1)
        at = step % STAGES
        mbarrier.wait(k_full.index(at), step // STAGES & 1)
        scores = gl.zeros([64, BLOCK], gl.float32, scores_in)
        key = k_tiles.index(at).permute((1, 0))
        scores = warpgroup_mma(query, key, scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, (scores,))
        tma.store_wait(0)  # of the visit before
        _together()
        mbarrier.arrive(k_free.index(at), count=1)
        if MERGE:
            mbarrier.arrive(y_free.index(g), count=1)
        scores = _masked(scores, 0, rows, LENGTH, CAUSAL, BLOCK)
        top = gl.max(scores, 1) * scale
        weights = gl.exp2(scores * scale - top[:, None])
        total = gl.sum(weights, 1)
        weights = gl.convert_layout(weights.to(dtype), weights_in)
        sums = gl.zeros([64, WIDTH], gl.float32, sums_in)
        step += 1
        for j in range(1, gl.minimum(full, count)):
            top, total, weights, sums = _step(
                query, tiles, bars, step, step - n - 1, top, total, weights, sums, j * BLOCK, rows, LENGTH,
                scale, False, CAUSAL, TURNS, g,
            )  # fmt: skip
            step += 1
        if CAUSAL or RAGGED:
            for j in range(full, count):
                top, total, weights, sums = _step(
                    query, tiles, bars, step, step - n - 1, top, total, weights, sums, j * BLOCK, rows,
                    LENGTH, scale, True, CAUSAL, TURNS, g,
                )  # fmt: skip
                step += 1
        mbarrier.arrive(q_free.index(g), count=1)
        at = (step - 1) % STAGES
        mbarrier.wait(v_full.index(at), (step - 1) // STAGES & 1)
        sums = warpgroup_mma(weights, v_tiles.index(at), sums, is_async=True)

        token = segment % SEGMENTS * (LENGTH * RATE) + rows * RATE + phase
        lse_at = lse + (segment // SEGMENTS * H + h) * T.to(gl.int64) + token
        found = (top + gl.log2(total)) / _LOG2E
        if MERGE:
            mbarrier.wait(y_full.index(g), n & 1)  # the branch before has ended
            before = gl.load(lse_at, mask=rows < LENGTH, other=0.0)
            high = gl.maximum(before, found)
            kept = gl.exp2((before - high) * _LOG2E)
            new = gl.exp2((found - high) * _LOG2E)
            found = high + gl.log2(kept + new) / _LOG2E
            kept = kept / (kept + new)
            share = (1.0 - kept) / total
        else:
            share = 1.0 / total
        gl.store(lse_at, found, mask=rows < LENGTH)
        sums = warpgroup_mma_wait(0, (sums,))
        _together()
        mbarrier.arrive(v_free.index(at), count=1)
        sums = sums * gl.convert_layout(share, gl.SliceLayout(1, sums_in))[:, None]
        if MERGE:
            was = old.load(sums_in).to(gl.float32)
            sums += was * gl.convert_layout(kept, gl.SliceLayout(1, sums_in))[:, None]
        old.store(sums.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [segment, first, phase, h, 0], _as_in(y, old))
    tma.store_wait(0)


@gluon.jit
def _step(
    query, tiles, bars, step, turn, top, total, weights, sums, start, rows, LENGTH, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    # Adds up the values of the block before, and weighs this one.
    q_tiles, k_tiles, v_tiles, _ = tiles
    _, _, k_full, k_free, v_full, v_free, _, _, turns = bars
    WORKERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK: gl.constexpr = k_tiles.shape[1]
    at, before = step % STAGES, (step - 1) % STAGES
    scores = gl.zeros([64, BLOCK], gl.float32, _scores_of(top))
    mbarrier.wait(k_full.index(at), step // STAGES & 1)
    if TURNS:
        mbarrier.wait(turns.index(g), (turn + 1 if g == 0 else turn) & 1)
    key = k_tiles.index(at).permute((1, 0))
    scores = warpgroup_mma(query, key, scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
    sums = warpgroup_mma(weights, v_tiles.index(before), sums, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((g + 1) % WORKERS), count=1)
    scores = warpgroup_mma_wait(1, (scores,))
    _together()
    mbarrier.arrive(k_free.index(at), count=1)
    if MASKED:
        scores = _masked(scores, start, rows, LENGTH, CAUSAL, BLOCK)
    new = gl.maximum(top, gl.max(scores, 1) * scale)
    parts = gl.exp2(scores * scale - new[:, None])
    fade = gl.exp2(top - new)
    total = total * fade + gl.sum(parts, 1)
    weights = gl.convert_layout(parts.to(weights.dtype), weights.type.layout)
    if WORKERS == 2:  # with more there are too few registers for this block's weights beside the last one's
        total = _ordered(total)
    sums, weights = warpgroup_mma_wait(0, (sums, weights))
    _together()
    mbarrier.arrive(v_free.index(before), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    return new, total, weights, sums


@gluon.jit
def _ordered(x):
    # x, by a store that never happens (x is not negative): ptxas moves nothing that x needs behind a later
    # wait. Without it a warpgroup waits for a product before it computes the softmax that could run beside.
    return gl.inline_asm_elementwise(
        """{
            .reg .pred never;
            .reg .b32 nowhere;
            mov.b32 nowhere, 0;
            setp.lt.f32 never, $1, 0f00000000;
            @never st.shared.f32 [nowhere], $1;
            mov.f32 $0, $1;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _scores_of(top):
    return top.type.layout.parent


@gluon.jit
def _masked(scores, start, rows, LENGTH, CAUSAL: gl.constexpr, BLOCK: gl.constexpr):
    keys = start + gl.arange(0, BLOCK, gl.SliceLayout(0, scores.type.layout))
    seen = (keys < LENGTH)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    return gl.where(seen, scores, -float("inf"))
