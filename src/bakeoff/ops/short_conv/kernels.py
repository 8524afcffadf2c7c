"""short_conv in Triton: the kernels. `tilings` says how they are launched.

Channels lie side by side. A program has BLOCK channels and ROWS walkers; each walker takes STEPS positions in
a row, so that an input is fetched (STEPS + W - 1) / STEPS times, all but the first from the nearest cache, and
is multiplied out of registers. Everything a walker needs is asked for before the first product.

Positions of packed sequences: a program whose positions are all in one sequence knows its first and its last,
as with rows; one that crosses from sequence to sequence (CROSS) looks up each position's.

Strides and C come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need.
"""

import triton
import triton.language as tl

__all__: list[str] = []


@triton.jit(do_not_specialize=["B", "T", "N", "bits", "C_units", "x_b_units", "x_t_units"])
def _forward(
    x, weight, bias, state, cu_seqlens, y, end,
    B: tl.int32, T: tl.int32, N: tl.int32, bits: tl.int32,
    C_units: tl.int64, x_b_units: tl.int64, x_t_units: tl.int64,
    SILU: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """y, and by the last N programs of each block of channels the last inputs of a sequence.

    EVEN: BLOCK divides C. Reads x, writes y: 2 * itemsize bytes and 2 W FLOPs an element, 4 more with SILU.
    """
    C = C_units * ALIGN
    c, inside, part = _channels(C, BLOCK, EVEN)
    tiles = tl.cdiv(T, ROWS * STEPS)
    x_t = x_t_units * ALIGN
    if part < B * tiles:
        b = part // tiles
        first = (part - b * tiles) * (ROWS * STEPS)
        x += b.to(tl.int64) * (x_b_units * ALIGN)
        y += b.to(tl.int64) * T * C
        taps = _taps(weight, C, W, BLOCK)
        offset = _offset(bias, c, inside, BLOCK)
        if cu_seqlens is None:
            _convolve(
                x, state, cu_seqlens, y, taps, offset, first, b, 0, T, c, inside, T, N, bits, C, x_t,
                SILU, W, STEPS, ROWS, False,
            )  # fmt: skip
        else:
            n = _sequence(cu_seqlens, first, N, bits)
            last = tl.minimum(first + (ROWS * STEPS - 1), T - 1)
            if n == _sequence(cu_seqlens, last, N, bits):
                start, stop = _bounds(cu_seqlens, n, N, T)
                _convolve(
                    x, state, cu_seqlens, y, taps, offset, first, n, start, stop, c, inside, T, N, bits, C,
                    x_t, SILU, W, STEPS, ROWS, False,
                )  # fmt: skip
            else:
                _convolve(
                    x, state, cu_seqlens, y, taps, offset, first, n, 0, T, c, inside, T, N, bits, C, x_t,
                    SILU, W, STEPS, ROWS, True,
                )  # fmt: skip
    else:
        n = part - B * tiles
        start = 0
        stop = T
        if cu_seqlens is None:
            x += n.to(tl.int64) * (x_b_units * ALIGN)
        else:
            start, stop = _bounds(cu_seqlens, n, N, T)
        m = tl.arange(0, 8)[:, None]
        u = stop - (W - 1) + m
        value = _inputs(x, state, n, u, start, stop, c, inside & (m < W - 1), C, x_t, W, True)
        tl.store(end + (n.to(tl.int64) * (W - 1) + m) * C + c, value, mask=inside & (m < W - 1))


@triton.jit
def _convolve(
    x, state, cu_seqlens, y, taps, offset, first, n, start, stop, c, inside, T, N, bits, C, x_t,
    SILU: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    # y at the tile's positions, those of sequence n, which goes from `start` to `stop`, or of several.
    first = first + tl.arange(0, ROWS)[:, None] * STEPS
    xs = ()
    for i in tl.static_range(STEPS + W - 1):
        u = first + (i - (W - 1))
        given = None if CROSS else state
        xs += (_inputs(x, given, n, u, start, stop, c, inside, C, x_t, W, i < W - 1),)
    for i in tl.static_range(STEPS):
        t = first + i
        if CROSS:
            n, start, stop = _around(cu_seqlens, t, N, T, bits)
        z = offset
        for k in tl.static_range(W):
            z += taps[k] * _seen(xs[i + k], state, n, t - (W - 1 - k), start, c, inside, C, W, CROSS, k)
        if SILU:
            z *= tl.sigmoid(z)
        tl.store(y + t.to(tl.int64) * C + c, z.to(y.dtype.element_ty), mask=inside & (t < T))


@triton.jit(
    do_not_specialize=[
        "B", "T", "N", "bits", "programs", "share", "C_units", "x_b_units", "x_t_units", "dy_b_units",
        "dy_t_units",
    ]
)  # fmt: skip
def _backward(
    x, weight, bias, state, cu_seqlens, dy, dend, dx, dstate, partial,
    B: tl.int32, T: tl.int32, N: tl.int32, bits: tl.int32, programs: tl.int32, share: tl.int32,
    C_units: tl.int64, x_b_units: tl.int64, x_t_units: tl.int64, dy_b_units: tl.int64, dy_t_units: tl.int64,
    SILU: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dx, partial[program, k, c], the program's part of dweight[c, k], and of dbias at k = W.

    With g = dy * slope(z), z again from x: dx[u] = sum_j w_j g[u + j], dw_j = sum_t g[t] x[t - j]. A program
    takes `share` tiles in turn; programs from `programs` on have ROWS sequences' dstate. Reads x and dy,
    writes dx: 3 * itemsize bytes and 4 W FLOPs an element, with SILU some 3 W + 12 more.
    """
    C = C_units * ALIGN
    c, inside, part = _channels(C, BLOCK, EVEN)
    x_b, x_t, dy_b, dy_t = x_b_units * ALIGN, x_t_units * ALIGN, dy_b_units * ALIGN, dy_t_units * ALIGN
    taps = _taps(weight, C, W, BLOCK)
    offset = _offset(bias, c, inside, BLOCK)
    sums = ()
    if partial is not None:
        for _ in tl.static_range(W + 1):
            sums += (tl.zeros([ROWS, BLOCK], tl.float32),)
    if part < programs:
        tiles = tl.cdiv(T, ROWS * STEPS)
        for index in range(part * share, tl.minimum((part + 1) * share, B * tiles)):
            b = index // tiles
            first = (index - b * tiles) * (ROWS * STEPS)
            row = b.to(tl.int64)
            if cu_seqlens is None:
                sums = _differentiate(
                    x + row * x_b, state, cu_seqlens, dy + row * dy_b, dend, dx, row * T * C, sums, taps,
                    offset, first, b, 0, T, c, inside, T, N, bits, C, x_t, dy_t, SILU, W, STEPS, ROWS, False,
                )  # fmt: skip
            else:
                n = _sequence(cu_seqlens, first, N, bits)
                last = tl.minimum(first + (ROWS * STEPS - 1), T - 1)
                if n == _sequence(cu_seqlens, last, N, bits):
                    start, stop = _bounds(cu_seqlens, n, N, T)
                    sums = _differentiate(
                        x, state, cu_seqlens, dy, dend, dx, row, sums, taps, offset, first, n, start, stop,
                        c, inside, T, N, bits, C, x_t, dy_t, SILU, W, STEPS, ROWS, False,
                    )  # fmt: skip
                else:
                    sums = _differentiate(
                        x, state, cu_seqlens, dy, dend, dx, row, sums, taps, offset, first, n, 0, T,
                        c, inside, T, N, bits, C, x_t, dy_t, SILU, W, STEPS, ROWS, True,
                    )  # fmt: skip
        if partial is not None:
            for k in tl.static_range(W + 1):
                total = tl.sum(sums[k], axis=0, keep_dims=True)
                at = (part.to(tl.int64) * (W + 1) + k) * C
                tl.store(partial + at + c, total, mask=inside)
    elif dstate is not None:
        n = (part - programs) * ROWS + tl.arange(0, ROWS)[:, None]
        here = inside & (n < N)
        n = tl.minimum(n, N - 1)
        start = tl.zeros_like(n)
        stop = start + T
        if cu_seqlens is None:
            x += n.to(tl.int64) * x_b
            dy += n.to(tl.int64) * dy_b
        else:
            start, stop = _bounds(cu_seqlens, n, N, T)
        _differentiate_state(
            x, state, dy, dend, dstate, taps, offset, n, start, stop, c, here, C, x_t, dy_t, SILU, W
        )


@triton.jit
def _differentiate(
    x, state, cu_seqlens, dy, dend, dx, dx_start, sums, taps, offset, first, n, start, stop, c, inside, T, N,
    bits, C, x_t, dy_t,
    SILU: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    # dx at the tile's positions; returns `sums` with their part. Sequences as in `_convolve`.
    first = first + tl.arange(0, ROWS)[:, None] * STEPS
    xs, dys, gs, more = (), (), (), sums
    if SILU or len(sums) > 0:
        for i in tl.static_range(STEPS + 2 * (W - 1)):
            u = first + (i - (W - 1))
            given = None if CROSS else state
            xs += (_inputs(x, given, n, u, start, stop, c, inside, C, x_t, W, i < W - 1),)
    for i in tl.static_range(STEPS + W - 1):
        t = first + i
        value = tl.load(dy + t.to(tl.int64) * dy_t + c, mask=inside & (t < stop), other=0.0)
        dys += (value.to(tl.float32),)
    for i in tl.static_range(STEPS + W - 1):
        t = first + i
        if CROSS:
            n, start, stop = _around(cu_seqlens, t, N, T, bits)
        seen = ()
        if SILU or (len(sums) > 0 and i < STEPS):
            for k in tl.static_range(W):
                seen += (_seen(xs[i + k], state, n, t - (W - 1 - k), start, c, inside, C, W, CROSS, k),)
        gs += (_slope(dys[i], seen, taps, offset, SILU, W),)
        if len(sums) > 0 and i < STEPS:
            sums = more
            more = ()
            for k in tl.static_range(W):
                more += (sums[k] + gs[i] * seen[k],)
            more += (sums[W] + gs[i],)
    if dx is not None:
        for i in tl.static_range(STEPS):
            u = first + i
            if CROSS:
                n, start, stop = _around(cu_seqlens, u, N, T, bits)
            value = tl.zeros_like(gs[0])
            for k in tl.static_range(W):
                g = gs[i + W - 1 - k]
                value += taps[k] * (tl.where(u + (W - 1 - k) < stop, g, 0.0) if CROSS else g)
            value = _with_end(value, dend, n, u, stop, c, inside & (u < T), C, W)
            at = dx_start + u.to(tl.int64) * C + c
            tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside & (u < T))
    return more


@triton.jit
def _differentiate_state(
    x, state, dy, dend, dstate, taps, offset, n, start, stop, c, inside, C, x_t, dy_t,
    SILU: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    # dstate of sequences n: what reaches back from their first W - 1 positions.
    xs, gs = (), ()
    for i in tl.static_range(2 * (W - 1)):
        u = start + (i - (W - 1))
        xs += (_inputs(x, state, n, u, start, stop, c, inside, C, x_t, W, i < W - 1),)
    for i in tl.static_range(W - 1):
        t = start + i
        value = tl.load(dy + t.to(tl.int64) * dy_t + c, mask=inside & (t < stop), other=0.0)
        seen = ()
        for k in tl.static_range(W):
            seen += (xs[i + k],)
        gs += (_slope(value.to(tl.float32), seen, taps, offset, SILU, W),)
    for m in tl.static_range(W - 1):
        value = tl.zeros_like(gs[0])
        for k in tl.static_range(m + 1):
            value += taps[k] * gs[m - k]
        value = _with_end(value, dend, n, start + (m - (W - 1)), stop, c, inside, C, W)
        at = (n.to(tl.int64) * (W - 1) + m) * C + c
        tl.store(dstate + at, value.to(dstate.dtype.element_ty), mask=inside)


@triton.jit
def _slope(dy, seen, taps, offset, SILU: tl.constexpr, W: tl.constexpr):
    # dy times the derivative of the activation where its argument is the sum over what is seen.
    if SILU:
        z = offset
        for k in tl.static_range(W):
            z += taps[k] * seen[k]
        s = tl.sigmoid(z)
        dy *= s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def _with_end(value, dend, n, u, stop, c, inside, C, W: tl.constexpr):
    # An input's gradient, with what comes from the last inputs if it is one of them.
    if dend is not None:
        m = u - (stop - (W - 1))
        at = (tl.zeros_like(m).to(tl.int64) + n * (W - 1) + m) * C + c
        value += tl.load(dend + at, mask=inside & (m >= 0) & (m < W - 1), other=0.0).to(tl.float32)
    return value


@triton.jit
def _inputs(
    x, state, n, u, start, stop, c, inside, C, x_t, W: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    # Inputs at u [ROWS, 1] of sequence n in float32: 0 from `stop` on, and before `start` what the state holds
    # (if it can be: BEFORE).
    mask = inside & (u >= start) & (u < stop)
    value = tl.load(x + u.to(tl.int64) * x_t + c, mask=mask, other=0.0).to(tl.float32)
    if BEFORE and state is not None:
        m = u - start + (W - 1)
        at = (tl.zeros_like(m).to(tl.int64) + n * (W - 1) + m) * C + c
        value += tl.load(state + at, mask=inside & (m >= 0) & (u < start), other=0.0).to(tl.float32)
    return value


@triton.jit
def _seen(value, state, n, u, start, c, inside, C, W: tl.constexpr, CROSS: tl.constexpr, k: tl.constexpr):
    # The input at u as a sequence sees it that begins at `start`; it is that of tap k.
    if CROSS and k < W - 1:
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
    if bias is None:
        return tl.zeros([1, BLOCK], tl.float32)
    else:
        return tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sequence(cu_seqlens, t, N, bits):
    # Which of N packed sequences position t is in: how many of their inner boundaries are at or before it.
    low = t * 0
    high = low + (N - 1)
    for _ in range(bits):
        middle = (low + high) // 2
        open_ = low < high
        later = open_ & (tl.load(cu_seqlens + 1 + middle, mask=open_, other=0) <= t)
        low = tl.where(later, middle + 1, low)
        high = tl.where(later, high, middle)
    return low


@triton.jit
def _bounds(cu_seqlens, n, N, T):
    # The first position of sequence n and the one behind its last, whatever cu_seqlens holds inside [0, T].
    start = tl.load(cu_seqlens + n, mask=n > 0, other=0).to(tl.int32)
    stop = tl.load(cu_seqlens + n + 1, mask=n < N - 1, other=0).to(tl.int32)
    stop = tl.where(n < N - 1, stop, T)
    return tl.minimum(tl.maximum(start, 0), T), tl.minimum(tl.maximum(stop, 0), T)


@triton.jit
def _around(cu_seqlens, t, N, T, bits):
    # The sequence of each position t, where it begins and ends.
    n = _sequence(cu_seqlens, t, N, bits)
    start, stop = _bounds(cu_seqlens, n, N, T)
    return n, start, stop


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
