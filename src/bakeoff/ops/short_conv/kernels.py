"""short_conv in Triton: the kernels. `tilings` says how they are launched.

Channels lie side by side. A program has BLOCK channels and ROWS walkers. A walker takes LOOPS * AHEAD
positions one after another, AHEAD at a time, which it asks for together; what it has read stays in registers
until the last sum it has a part in, so that only W - 1 positions are read by two walkers.

Of packed sequences a table says for each position which one it is in, and where that begins and ends.

Strides and C come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need.
"""

import triton
import triton.language as tl

__all__: list[str] = []


@triton.jit(do_not_specialize=["B", "T", "N", "C_units", "x_b_units", "x_t_units"])
def _forward(
    x, weight, bias, state, cu_seqlens, table, y, end,
    B: tl.int32, T: tl.int32, N: tl.int32, C_units: tl.int64, x_b_units: tl.int64, x_t_units: tl.int64,
    SILU: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, LOOPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """y, and by the last N programs of each block of channels the last inputs of a sequence.

    EVEN: BLOCK divides C. Reads x, writes y: 2 * itemsize bytes and 2 W FLOPs an element, 4 more with SILU.
    """
    C = C_units * ALIGN
    c, inside, part = _channels(C, BLOCK, EVEN)
    tiles = tl.cdiv(T, ROWS * LOOPS * AHEAD)
    x_t = x_t_units * ALIGN
    if part < B * tiles:
        b = part // tiles
        first = (part - b * tiles) * (ROWS * LOOPS * AHEAD) + tl.arange(0, ROWS)[:, None] * (LOOPS * AHEAD)
        _convolve(
            x + b.to(tl.int64) * (x_b_units * ALIGN), weight, bias, state, table, y + b.to(tl.int64) * T * C,
            b, first, c, inside, T, C, x_t, SILU, W, AHEAD, LOOPS, BLOCK,
        )  # fmt: skip
    else:
        n = part - B * tiles
        if cu_seqlens is None:
            _keep_last(x + n.to(tl.int64) * (x_b_units * ALIGN), state, end, n, 0, T, c, inside, C, x_t, W)
        else:
            start, stop = _bounds(cu_seqlens, n, N, T)
            _keep_last(x, state, end, n, start, stop, c, inside, C, x_t, W)


@triton.jit
def _convolve(
    x, weight, bias, state, table, y, b, first, c, inside, T, C, x_t,
    SILU: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, LOOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # y at the positions of walkers that begin at `first` [ROWS, 1].
    before = state if table is None else None  # of rows; packed sequences look it up position by position
    window = ()
    for i in tl.static_range(W - 1):
        window += (_inputs(x, before, b, first + (i - (W - 1)), 0, T, c, inside, C, x_t, W),)
    taps = _taps(weight, C, W, BLOCK)
    offset = _offset(bias, c, inside, BLOCK)
    for loop in range(LOOPS):
        u = first + loop * AHEAD
        xs = window
        for i in tl.static_range(AHEAD):
            xs += (_inputs(x, None, b, u + i, 0, T, c, inside, C, x_t, W),)
        for i in tl.static_range(AHEAD):
            t = u + i
            n, start, _ = _place(table, t, T, b)
            z = offset
            for k in tl.static_range(W):
                z += taps[k] * _seen(xs[i + k], state, n, t, start, c, inside, table, C, W, k)
            if SILU:
                z *= _sigmoid(z, x.dtype.element_ty == tl.float32)
            tl.store(y + t.to(tl.int64) * C + c, z.to(y.dtype.element_ty), mask=inside & (t < T))
        window = ()
        for i in tl.static_range(W - 1):
            window += (xs[AHEAD + i],)


@triton.jit
def _keep_last(x, state, end, n, start, stop, c, inside, C, x_t, W: tl.constexpr):
    # The last inputs of sequence n, all W - 1 at once.
    m = tl.arange(0, 8)[:, None]
    inside &= m < W - 1
    value = _inputs(x, state, n, stop - (W - 1) + m, start, stop, c, inside, C, x_t, W)
    tl.store(end + (n.to(tl.int64) * (W - 1) + m) * C + c, value.to(end.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "B", "T", "share", "C_units", "x_b_units", "x_t_units", "dy_b_units", "dy_t_units",
    ]
)  # fmt: skip
def _backward(
    x, weight, bias, state, table, dy, dend, dx, partial,
    B: tl.int32, T: tl.int32, share: tl.int32,
    C_units: tl.int64, x_b_units: tl.int64, x_t_units: tl.int64, dy_b_units: tl.int64, dy_t_units: tl.int64,
    SILU: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, LOOPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dx, and partial[program, k, c], the program's part of dweight[c, k], or of dbias[c] at k = W.

    With g = dy * slope(z), z again from x: dx[u] = sum_j w_j g[u + j] and dw_j = sum_t g[t] x[t - j]. A
    program takes `share` tiles in turn, and walks towards the beginning. Reads x and dy, writes dx:
    3 * itemsize bytes and 4 W FLOPs an element, with SILU 2 W + 12 more.
    """
    C = C_units * ALIGN
    c, inside, part = _channels(C, BLOCK, EVEN)
    taps = _taps(weight, C, W, BLOCK)
    offset = _offset(bias, c, inside, BLOCK)
    sums = ()
    if partial is not None:
        for _ in tl.static_range(W + 1):
            sums += (tl.zeros([ROWS, BLOCK], tl.float32),)
    tiles = tl.cdiv(T, ROWS * LOOPS * AHEAD)
    for index in range(part * share, tl.minimum((part + 1) * share, B * tiles)):
        b = index // tiles
        first = (index - b * tiles) * (ROWS * LOOPS * AHEAD) + tl.arange(0, ROWS)[:, None] * (LOOPS * AHEAD)
        row = b.to(tl.int64)
        sums = _differentiate(
            x + row * (x_b_units * ALIGN), state, table, dy + row * (dy_b_units * ALIGN), dend, dx,
            row * T * C, sums, taps, offset, b, first, c, inside, T, C, x_t_units * ALIGN, dy_t_units * ALIGN,
            SILU, W, AHEAD, LOOPS,
        )  # fmt: skip
    if partial is not None:
        for k in tl.static_range(W + 1):
            at = (part.to(tl.int64) * (W + 1) + k) * C
            tl.store(partial + at + c, tl.sum(sums[k], axis=0, keep_dims=True), mask=inside)


@triton.jit
def _differentiate(
    x, state, table, dy, dend, dx, dx_start, sums, taps, offset, b, first, c, inside, T, C, x_t, dy_t,
    SILU: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    # dx at the positions of walkers that begin at `first`; returns `sums` with their part.
    before = state if table is None else None
    READS: tl.constexpr = SILU or len(sums) > 0
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    beyond = first + LOOPS * AHEAD
    window, gs = _beyond(
        x, before, state, table, dy, taps, offset, b, beyond, c, inside, T, C, x_t, dy_t, SILU, W, READS
    )
    for loop in range(LOOPS):
        u = beyond - (loop + 1) * AHEAD
        xs = ()
        if READS:
            for i in tl.static_range(AHEAD):
                xs += (_inputs(x, before, b, u + (i - (W - 1)), 0, T, c, inside, C, x_t, W),)
            xs += window
        dys = ()
        for i in tl.static_range(AHEAD):
            dys += (_arriving(dy, u + i, T, c, inside, dy_t),)
        here = ()
        few = _first(sums, 0)  # the sums of these positions alone, so that the long ones round less
        for i in tl.static_range(AHEAD):
            seen = _all_seen(xs, i, state, table, u + i, b, c, inside, T, C, W, READS)
            here += (_slope(dys[i], seen, taps, offset, SILU, W, EXACT),)
            if len(sums) > 0:
                few = _with_products(few, here[i], seen, W)
        sums = _added(sums, few)
        gs = here + gs
        if dx is not None:
            for i in tl.static_range(AHEAD):
                value = _sum_ahead(gs, i, taps, table, u + i, T, b, W)
                value = _with_end(value, dend, table, u + i, T, b, c, inside, C, W)
                at = dx_start + (u + i).to(tl.int64) * C + c
                tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside & (u + i < T))
        window = _first(xs, W - 1 if READS else 0)
        gs = _first(gs, W - 1)
    return sums


@triton.jit
def _beyond(
    x, before, state, table, dy, taps, offset, b, t, c, inside, T, C, x_t, dy_t,
    SILU: tl.constexpr, W: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    # What a walk towards the beginning needs first: W - 1 inputs before t, and g at W - 1 positions from t.
    xs = ()
    for i in tl.static_range((2 if SILU else 1 if READS else 0) * (W - 1)):
        xs += (_inputs(x, before, b, t + (i - (W - 1)), 0, T, c, inside, C, x_t, W),)
    gs = ()
    for i in tl.static_range(W - 1):
        seen = _all_seen(xs, i, state, table, t + i, b, c, inside, T, C, W, SILU)
        arriving = _arriving(dy, t + i, T, c, inside, dy_t)
        gs += (_slope(arriving, seen, taps, offset, SILU, W, x.dtype.element_ty == tl.float32),)
    return _first(xs, W - 1 if READS else 0), gs


@triton.jit
def _first(values, count: tl.constexpr):
    # The first `count` of a tuple.
    found = ()
    for i in tl.static_range(count):
        found += (values[i],)
    return found


@triton.jit
def _arriving(dy, t, T, c, inside, dy_t):
    return tl.load(dy + t.to(tl.int64) * dy_t + c, mask=inside & (t < T), other=0.0).to(tl.float32)


@triton.jit
def _all_seen(
    xs, i: tl.constexpr, state, table, t, b, c, inside, T, C, W: tl.constexpr, ANY: tl.constexpr
):  # fmt: skip
    # The W inputs that the sum at t is over, the earliest of which is xs[i].
    seen = ()
    if ANY:
        n, start, _ = _place(table, t, T, b)
        for k in tl.static_range(W):
            seen += (_seen(xs[i + k], state, n, t, start, c, inside, table, C, W, k),)
    return seen


@triton.jit
def _with_products(sums, g, seen, W: tl.constexpr):
    # The sums for dweight and dbias, if there are any yet, with those of one more position.
    more = ()
    for k in tl.static_range(W):
        more += (g * seen[k] if len(sums) == 0 else sums[k] + g * seen[k],)
    more += (g if len(sums) == 0 else sums[W] + g,)
    return more


@triton.jit
def _added(sums, few):
    total = ()
    for k in tl.static_range(len(sums)):
        total += (sums[k] + few[k],)
    return total


@triton.jit
def _sum_ahead(gs, i: tl.constexpr, taps, table, u, T, b, W: tl.constexpr):
    # What the outputs from u on, whose slopes are gs[i], gs[i + 1], ..., make of the input at u.
    _, _, stop = _place(table, u, T, b)
    value = taps[W - 1] * gs[i]
    for j in tl.static_range(1, W):
        g = gs[i + j]
        value += taps[W - 1 - j] * (g if table is None else tl.where(u + j < stop, g, 0.0))
    return value


@triton.jit
def _with_end(value, dend, table, u, T, b, c, inside, C, W: tl.constexpr):
    # An input's gradient, with what comes from the last inputs if it is one of them.
    if dend is not None:
        n, _, stop = _place(table, u, T, b)
        value += _ends(dend, n, u - (stop - (W - 1)), c, inside, C, W)
    return value


@triton.jit
def _ends(dend, n, m, c, inside, C, W: tl.constexpr):
    at = (tl.zeros_like(m).to(tl.int64) + n * (W - 1) + m) * C + c
    return tl.load(dend + at, mask=inside & (m >= 0) & (m < W - 1), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "N", "C_units", "x_b_units", "x_t_units", "dy_b_units", "dy_t_units"])
def _backward_state(
    x, weight, bias, state, cu_seqlens, dy, dend, dstate,
    T: tl.int32, N: tl.int32,
    C_units: tl.int64, x_b_units: tl.int64, x_t_units: tl.int64, dy_b_units: tl.int64, dy_t_units: tl.int64,
    SILU: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """dstate: what reaches back from the first W - 1 positions; ROWS sequences a program."""
    C = C_units * ALIGN
    c, inside, part = _channels(C, BLOCK, EVEN)
    x_t, dy_t = x_t_units * ALIGN, dy_t_units * ALIGN
    taps = _taps(weight, C, W, BLOCK)
    offset = _offset(bias, c, inside, BLOCK)
    n = part * ROWS + tl.arange(0, ROWS)[:, None]
    inside &= n < N
    n = tl.minimum(n, N - 1)
    start, stop = _bounds(cu_seqlens, n, N, T)
    if cu_seqlens is None:
        x += n.to(tl.int64) * (x_b_units * ALIGN)
        dy += n.to(tl.int64) * (dy_b_units * ALIGN)
    xs = ()
    gs = ()
    for i in tl.static_range(2 * (W - 1)):
        xs += (_inputs(x, state, n, start + (i - (W - 1)), start, stop, c, inside, C, x_t, W),)
    for i in tl.static_range(W - 1):
        t = start + i
        seen = ()
        for k in tl.static_range(W):
            seen += (xs[i + k],)
        arriving = _arriving(dy, t, stop, c, inside, dy_t)
        gs += (_slope(arriving, seen, taps, offset, SILU, W, x.dtype.element_ty == tl.float32),)
    for m in tl.static_range(W - 1):
        value = tl.zeros_like(gs[0])
        for k in tl.static_range(m + 1):
            value += taps[k] * gs[m - k]
        if dend is not None:
            value += _ends(dend, n, start - stop + m, c, inside, C, W)
        at = (n.to(tl.int64) * (W - 1) + m) * C + c
        tl.store(dstate + at, value.to(dstate.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    # Without EXACT, for 16-bit results: 1 / v as the square of v's inverse root, which is one instruction,
    # where a division is many. Arithmetic, not memory, is what the backward is short of.
    if EXACT:
        s = tl.sigmoid(z)
    else:
        root = tl.rsqrt(1.0 + tl.exp(-z))
        s = root * root
    return s


@triton.jit
def _slope(dy, seen, taps, offset, SILU: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    # dy times the derivative of the activation where its argument is the sum over what is seen.
    if SILU:
        z = offset
        for k in tl.static_range(W):
            z += taps[k] * seen[k]
        s = _sigmoid(z, EXACT)
        dy *= s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def _inputs(x, state, n, u, start, stop, c, inside, C, x_t, W: tl.constexpr):
    # Inputs at u [ROWS, 1] of sequence n in float32: 0 from `stop` on, before `start` what the state holds.
    mask = inside & (u >= start) & (u < stop)
    value = tl.load(x + u.to(tl.int64) * x_t + c, mask=mask, other=0.0).to(tl.float32)
    if state is not None:
        m = u - start + (W - 1)
        at = (tl.zeros_like(m).to(tl.int64) + n * (W - 1) + m) * C + c
        value += tl.load(state + at, mask=inside & (m >= 0) & (u < start), other=0.0).to(tl.float32)
    return value


@triton.jit
def _seen(
    value, state, n, t, start, c, inside, table, C, W: tl.constexpr, k: tl.constexpr
):  # fmt: skip
    # The input of tap k of the sum at t, as a packed sequence sees it that begins at `start`.
    if table is not None and k < W - 1:
        u = t - (W - 1 - k)
        value = tl.where(u >= start, value, 0.0)
        if state is not None:
            at = (n.to(tl.int64) * (W - 1) + (u - start + (W - 1))) * C + c
            value += tl.load(state + at, mask=inside & (u < start), other=0.0).to(tl.float32)
    return value


@triton.jit
def _channels(C, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    # The program's channels [1, BLOCK], which exist, and its number among those that have the same.
    blocks = tl.cdiv(C, BLOCK).to(tl.int32)
    part = tl.program_id(0) // blocks
    c = ((tl.program_id(0) - part * blocks) * BLOCK + tl.arange(0, BLOCK))[None, :]
    return c, tl.full([1, BLOCK], True, tl.int1) if EVEN else c < C, part


@triton.jit
def _taps(weight, C, W: tl.constexpr, BLOCK: tl.constexpr):
    # The filters' columns [1, BLOCK]. Read as they lie, side by side: column by column would take W times as
    # many accesses, each to as many cache lines as there are channels.
    blocks = tl.cdiv(C, BLOCK).to(tl.int32)
    k = tl.arange(0, 8 if W > 4 else 4 if W > 2 else W)[None, :]
    c = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK))[:, None]
    tile = tl.load(weight + c.to(tl.int64) * W + k, mask=(c < C) & (k < W), other=0.0).to(tl.float32)
    taps = ()
    for column in tl.static_range(W):
        taps += (tl.sum(tl.where(k == column, tile, 0.0), axis=1)[None, :],)
    return taps


@triton.jit
def _offset(bias, c, inside, BLOCK: tl.constexpr):
    value = tl.zeros([1, BLOCK], tl.float32)
    if bias is not None:
        value += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["T", "N", "bits"])
def _look_up(cu_seqlens, table, T: tl.int32, N: tl.int32, bits: tl.int32, BLOCK: tl.constexpr):
    """table[:, t]: which of N packed sequences position t is in, where that begins, and where it ends."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Bisection: how many of the inner boundaries are at or before t.
    low = tl.zeros_like(t)
    high = low + (N - 1)
    for _ in range(bits):
        middle = (low + high) // 2
        open_ = low < high
        later = open_ & (tl.load(cu_seqlens + 1 + middle, mask=open_, other=0) <= t)
        low = tl.where(later, middle + 1, low)
        high = tl.where(later, high, middle)
    start, stop = _bounds(cu_seqlens, low, N, T)
    at = table + t.to(tl.int64)
    tl.store(at, low, mask=t < T)
    tl.store(at + T, start, mask=t < T)
    tl.store(at + 2 * T.to(tl.int64), stop, mask=t < T)


@triton.jit
def _place(table, t, T, b):
    # The sequence that position t is in, where it begins and ends: of rows, row b.
    if table is None:
        n, start, stop = b, 0, T
    else:
        at = table + t.to(tl.int64)
        mask = (t >= 0) & (t < T)
        n = tl.load(at, mask=mask, other=0)
        start = tl.load(at + T, mask=mask, other=0)
        stop = tl.load(at + 2 * T.to(tl.int64), mask=mask, other=0)
    return n, start, stop


@triton.jit
def _bounds(cu_seqlens, n, N, T):
    # The first position of sequence n and the one behind its last, whatever cu_seqlens holds inside [0, T].
    if cu_seqlens is None:
        start = tl.zeros_like(n)
        stop = start + T
    else:
        start = tl.load(cu_seqlens + n, mask=n > 0, other=0).to(tl.int32)
        stop = tl.load(cu_seqlens + n + 1, mask=n < N - 1, other=0).to(tl.int32)
        stop = tl.where(n < N - 1, stop, T)
        start = tl.minimum(tl.maximum(start, 0), T)
        stop = tl.minimum(tl.maximum(stop, 0), T)
    return start, stop


@triton.jit(do_not_specialize=["P", "C"])
def _add_up(
    partial, dweight, dbias, P: tl.int32, C: tl.int64,
    W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight[c, k] or (k = W) dbias[c]: the sum of partial[p, k, c] over p, always in the same order."""
    blocks = tl.cdiv(C, BLOCK).to(tl.int32)
    k = tl.program_id(0) // blocks
    c = ((tl.program_id(0) - k * blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    p = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        at = ((start + p).to(tl.int64) * (W + 1) + k) * C + c[None, :]
        total += tl.load(partial + at, mask=(start + p < P) & (c < C)[None, :], other=0.0)
    found = tl.sum(total, axis=0)
    if k < W:
        if dweight is not None:
            tl.store(dweight + c * W + k, found.to(dweight.dtype.element_ty), mask=c < C)
    elif dbias is not None:
        tl.store(dbias + c, found.to(dbias.dtype.element_ty), mask=c < C)
