"""linear_cross_entropy in Triton: a chunk's logits to losses and to their gradients, in place.

Products are cuBLAS's, but for two where classes are few: the kernel that uses rows of logits up makes them
itself, and x's gradient is divided by the number of targets before it is rounded.

Rows that fit a tile are read once, several of them by one program where they are short. Of a longer row one
program takes first the maximum and the sum of exponentials, then, from its end as that is still in L2, the
gradients. In blocks of classes one launch does the former and another the latter.

What limits long rows is the number of instructions per element: whole tiles are read without masks, a last
one with; a thread's 8 neighbours share a maximum, so that older sums are rescaled once for all of them. Rows
begin at multiples of 64 elements and are written to their padded ends, so that accesses are 16 bytes wide
whatever V is.
"""

import triton
import triton.language as tl

__all__: list[str] = []

PADDED = tl.constexpr(64)
GROUP = tl.constexpr(8)


@triton.jit(do_not_specialize=[
    "N", "row_units", "scale_step", "ignore_index", "smoothing", "z_loss", "softcap"
])  # fmt: skip
def _short(
    logits, target, losses, scale,
    N: tl.int64, row_units: tl.int64, scale_step: tl.int64, ignore_index: tl.int64,
    smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, GRADIENTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """loss = (1 - smoothing) (lse - l[t]) + smoothing (lse - mean l) + z_loss lse^2 of l = logits, capped if
    CAP, and dl = scale * (p (1 + 2 z_loss lse) - smoothing / V - (1 - smoothing) [t]) in their place.

    A program has ROWS of the N rows whole, V <= BLOCK; TOGETHER, it writes the sum of their losses alone.
    Reads logits once and writes them once: 4 bytes an element in 16 bits; about 10 FLOPs.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < N
    cols = tl.arange(0, BLOCK)[None, :]
    spots = logits + row[:, None] * (row_units * PADDED) + cols
    inside = there[:, None] & (cols < _padded(V))
    value = tl.load(spots, mask=inside, other=0.0).to(tl.float32)
    loss, grad = _losses_and_slopes(
        value, cols, target + row, scale + row * scale_step, there, ignore_index, smoothing, z_loss, softcap,
        V, SMOOTH, CAP, GRADIENTS,
    )  # fmt: skip
    if GRADIENTS:
        tl.store(spots, grad.to(logits.dtype.element_ty), mask=inside)
    if TOGETHER:
        tl.store(losses + tl.program_id(0), _sum(loss))
    else:
        tl.store(losses + row, loss, mask=there)


@triton.jit(do_not_specialize=[
    "N", "row_units", "scale_step", "ignore_index", "smoothing", "z_loss", "softcap"
])  # fmt: skip
def _product_and_rows(
    x, weight, bias, logits, target, losses, scale,
    N: tl.int64, row_units: tl.int64, scale_step: tl.int64, ignore_index: tl.int64,
    smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32,
    V: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, GRADIENTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """What `_short` does, of l = x weight' + bias, which stays in registers: `logits` is only written to.

    A program has ROWS of the N rows whole, V <= BLOCK. Reads x [N, D] once and weight [V, D], both
    contiguous, once a program; 2 D FLOPs an element and about 10 more.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < N
    classes, deep = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    of_x = x + tl.minimum(row, N - 1)[:, None] * D + deep[None, :]
    of_weight = weight + tl.minimum(classes, V - 1).to(tl.int64)[:, None] * D + deep[None, :]
    value = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            a, b = tl.load(of_x + start), tl.load(of_weight + start)
        else:
            left = deep[None, :] < D - start
            a = tl.load(of_x + start, mask=left, other=0.0)
            b = tl.load(of_weight + start, mask=left, other=0.0)
        value = tl.dot(a, tl.trans(b), value)
    cols = classes[None, :]
    if BIAS:
        value += tl.load(bias + cols, mask=cols < V, other=0.0).to(tl.float32)
    loss, grad = _losses_and_slopes(
        value, cols, target + row, scale + row * scale_step, there, ignore_index, smoothing, z_loss, softcap,
        V, SMOOTH, CAP, GRADIENTS,
    )  # fmt: skip
    if GRADIENTS:
        spots = logits + row[:, None] * (row_units * PADDED) + cols
        inside = there[:, None] & (cols < _padded(V))
        tl.store(spots, grad.to(logits.dtype.element_ty), mask=inside)
    if TOGETHER:
        tl.store(losses + tl.program_id(0), _sum(loss))
    else:
        tl.store(losses + row, loss, mask=there)


@triton.jit
def _losses_and_slopes(
    value, cols, target, scale, there, ignore_index, smoothing, z_loss, softcap,
    V: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    # The losses of whole rows, [ROWS], and their gradients, [ROWS, BLOCK], 0 behind the last class.
    t = tl.load(target, mask=there, other=0).to(tl.int64)
    counted = there & (t != ignore_index)
    # What is no class makes the row's loss and gradients NaN: the host can't look at it.
    known = counted & (t >= 0) & (t < V)
    hit = cols == tl.where(known, t, -1).to(tl.int32)[:, None]
    value, slope = _wide(value, softcap, CAP)
    value = tl.where(cols < V, value, float("-inf"))
    most = tl.max(value, axis=1)
    e = tl.exp(value - _finite(most)[:, None])
    total = tl.sum(e, axis=1)
    # Not loaded: another warp may have written the gradients over it by then.
    at = tl.where(known, tl.sum(tl.where(hit, value, 0.0), axis=1), float("nan"))
    log_total = tl.log(total)
    lse = most + log_total
    loss = (log_total - (at - most)) * (1.0 - smoothing) + z_loss * lse * lse
    if SMOOTH:
        below = tl.sum(tl.where(cols < V, value - most[:, None], 0.0), axis=1)
        loss += smoothing * (log_total - below / V)
    grad = e
    if GRADIENTS:
        factor = tl.load(scale, mask=there, other=0.0)
        factor = tl.where(known, factor, float("nan"))
        weight = (1.0 + 2.0 * z_loss * lse) / total
        grad = e * weight[:, None]
        if SMOOTH:
            grad -= smoothing / V
        grad = tl.where(hit, grad - (1.0 - smoothing), grad) * factor[:, None]
        if CAP:
            grad *= slope
        grad = tl.where(counted[:, None] & (cols < V), grad, 0.0)
    return tl.where(counted, loss, 0.0), grad


@triton.jit(do_not_specialize=["N", "row_units"])
def _to_rows(
    grads, weight, out, factor, N: tl.int64, row_units: tl.int64,
    V: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """out = grads weight, if SCALED times `factor`, rounded once; weight [V, D] and out [N, D] contiguous.

    A program has ROWS by COLS of out. Rows of `grads` hold zeros behind their V classes, up to a multiple of
    PADDED, of which DEPTH is a divisor. 2 V FLOPs an element of out.
    """
    tiles: tl.constexpr = (D + COLS - 1) // COLS
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    deep = tl.arange(0, DEPTH)
    of_grads = grads + tl.minimum(row, N - 1)[:, None] * (row_units * PADDED) + deep[None, :]
    of_weight = weight + deep.to(tl.int64)[:, None] * D + cols[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, V, DEPTH):
        a = tl.load(of_grads + start)
        if V % DEPTH == 0 and D % COLS == 0:
            b = tl.load(of_weight + start * D)
        else:
            b = tl.load(
                of_weight + start * D, mask=(deep < V - start)[:, None] & (cols < D)[None, :], other=0.0
            )
        total = tl.dot(a, b, total)
    if SCALED:
        total *= tl.load(factor)
    there = (row < N)[:, None] & (cols < D)[None, :]
    tl.store(out + row[:, None] * D + cols[None, :], total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["row_units", "scale_step", "ignore_index", "smoothing", "z_loss", "softcap"])
def _long(
    logits, target, losses, scale,
    row_units: tl.int64, scale_step: tl.int64, ignore_index: tl.int64,
    smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32,
    V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """What `_short` does, of one row a program in tiles of BLOCK and a last one of TAIL.

    Reads logits twice, the second time partly from L2, and writes them once: 4 to 6 bytes an element in 16
    bits.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * (row_units * PADDED)
    t = tl.load(target + row).to(tl.int64)
    if t == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENTS:
            _clear(logits, V, BLOCK)
    else:
        known = (t >= 0) & (t < V)
        at = tl.load(logits + t, mask=known, other=float("nan")).to(tl.float32)
        first = tl.load(logits).to(tl.float32)
        if CAP:
            at = _tanh(at / softcap)[0] * softcap
            first = _tanh(first / softcap)[0] * softcap
        most, total, beyond = _sums(logits, first, softcap, V, BLOCK, TAIL, SMOOTH, CAP)
        log_total = tl.log(total)
        lse = most + log_total
        loss = (log_total - (at - most)) * (1.0 - smoothing) + z_loss * lse * lse
        if SMOOTH:
            loss += smoothing * (log_total + (most - first) - beyond / V)
        tl.store(losses + row, loss)
        if GRADIENTS:
            factor = tl.load(scale + row * scale_step)
            factor = tl.where(known, factor, float("nan"))
            weight = (1.0 + 2.0 * z_loss * lse) / total
            _slopes(
                logits, tl.where(known, t, -1).to(tl.int32), most, weight, smoothing / V, 1.0 - smoothing,
                factor, softcap, V, BLOCK, TAIL, SMOOTH, CAP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["row_units", "begin", "N", "ignore_index", "softcap"])
def _part(
    logits, target, state,
    row_units: tl.int64, begin: tl.int64, N: tl.int64, ignore_index: tl.int64, softcap: tl.float32,
    V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds the V classes from `begin` on to `state`, [5, N]: see `method.Method.part`. A row a program;
    reads logits once.

    Nothing is done for rows that are ignored.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * (row_units * PADDED)
    state += row
    t = tl.load(target + row).to(tl.int64)
    if t != ignore_index:
        most, total, beyond = tl.load(state), tl.load(state + N), 0.0
        if SMOOTH:
            beyond = tl.load(state + 4 * N)
        if (t >= begin) & (t < begin + V):
            at = tl.load(logits + (t - begin)).to(tl.float32)
            if CAP:
                at = _tanh(at / softcap)[0] * softcap
            tl.store(state + 2 * N, at)
        first = 0.0
        if FIRST:
            first = tl.load(logits).to(tl.float32)
            if CAP:
                first = _tanh(first / softcap)[0] * softcap
            tl.store(state + 3 * N, first)
        elif SMOOTH:
            first = tl.load(state + 3 * N)
        higher, more, further = _sums(logits, first, softcap, V, BLOCK, TAIL, SMOOTH, CAP)
        most, total = _joined(most, total, higher, more)
        tl.store(state, most)
        tl.store(state + N, total)
        if SMOOTH:
            tl.store(state + 4 * N, beyond + further)


@triton.jit(do_not_specialize=[
    "row_units", "begin", "ignore_index", "even", "rest", "softcap"
])  # fmt: skip
def _part_slopes(
    logits, target, mosts, weights, factors,
    row_units: tl.int64, begin: tl.int64, ignore_index: tl.int64,
    even: tl.float32, rest: tl.float32, softcap: tl.float32,
    V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dl = factor * (weight exp(l - most) - even - rest [t]) in the place of the V logits from `begin` on.

    A row a program; reads logits once and writes them once.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * (row_units * PADDED)
    t = tl.load(target + row).to(tl.int64)
    if t == ignore_index:
        _clear(logits, V, BLOCK)
    else:
        here = (t >= begin) & (t < begin + V)
        at = tl.where(here, t - begin, -1).to(tl.int32)
        most, weight, factor = tl.load(mosts + row), tl.load(weights + row), tl.load(factors + row)
        _slopes(logits, at, most, weight, even, rest, factor, softcap, V, BLOCK, TAIL, SMOOTH, CAP)


@triton.jit
def _sums(
    logits, first, softcap,
    V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    # Of V logits the maximum, the sum of exponentials below it, and the sum of what is beyond `first`.
    FULL: tl.constexpr = V // BLOCK * BLOCK
    most, total, beyond = float("-inf"), 0.0, 0.0
    if FULL > 0:
        high = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK // GROUP], tl.float32)
        off = tl.zeros([BLOCK // GROUP], tl.float32)
        for start in range(0, FULL, BLOCK):
            value, _ = _wide(tl.load(logits + start + _tile(BLOCK)), softcap, CAP)
            higher = tl.maximum(high, tl.max(value, axis=1))
            base = _finite(higher)
            sums = sums * tl.exp(high - base) + tl.sum(tl.exp(value - base[:, None]), axis=1)
            high = higher
            if SMOOTH:
                off += tl.sum(value - first, axis=1)
        most = tl.max(high, axis=0)
        total = tl.sum(sums * tl.exp(high - _finite(most)), axis=0)
        if SMOOTH:
            beyond = tl.sum(off, axis=0)
    if FULL < V:
        cols = FULL + _tile(TAIL)
        value, _ = _wide(tl.load(logits + cols, mask=cols < _padded(V), other=0.0), softcap, CAP)
        value = tl.where(cols < V, value, float("-inf"))
        higher = tl.max(tl.max(value, axis=1), axis=0)
        more = tl.sum(tl.sum(tl.exp(value - _finite(higher)), axis=1), axis=0)
        if FULL > 0:
            most, total = _joined(most, total, higher, more)
        else:
            most, total = higher, more
        if SMOOTH:
            beyond += tl.sum(tl.sum(tl.where(cols < V, value - first, 0.0), axis=1), axis=0)
    return most, total, beyond


@triton.jit
def _joined(most, total, higher, more):
    # The maximum of two sets of logits, and the sum of exponentials below it.
    high = tl.maximum(most, higher)
    base = _finite(high)
    return high, total * tl.exp(most - base) + more * tl.exp(higher - base)


@triton.jit
def _slopes(
    logits, t, most, weight, even, rest, factor, softcap,
    V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    # Gradients in the place of V logits, the last ones first; zeros behind the last class.
    FULL: tl.constexpr = V // BLOCK * BLOCK
    base = _finite(most)
    if FULL < V:
        cols = FULL + _tile(TAIL)
        inside = cols < _padded(V)
        ragged = tl.load(logits + cols, mask=inside, other=0.0)
        ragged = _slope(ragged, cols == t, base, weight, even, rest, factor, softcap, SMOOTH, CAP)
        tl.store(logits + cols, tl.where(cols < V, ragged, 0.0), mask=inside)
    tile = _tile(BLOCK)
    for back in range(0, FULL, BLOCK):
        start = FULL - BLOCK - back
        whole = tl.load(logits + start + tile)
        whole = _slope(whole, tile == t - start, base, weight, even, rest, factor, softcap, SMOOTH, CAP)
        tl.store(logits + start + tile, whole)


@triton.jit
def _slope(
    logits, hit, base, weight, even, rest, factor, softcap, SMOOTH: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    # factor * (weight exp(logits - base) - even - rest [hit]) in the logits' dtype.
    value, slope = _wide(logits, softcap, CAP)
    grad = tl.exp(value - base) * weight
    if SMOOTH:
        grad -= even
    grad = tl.where(hit, grad - rest, grad) * factor
    if CAP:
        grad *= slope
    return grad.to(logits.dtype)


@triton.jit
def _clear(logits, V: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        cols = start + _tile(BLOCK)
        zeros = tl.zeros([BLOCK // GROUP, GROUP], logits.dtype.element_ty)
        tl.store(logits + cols, zeros, mask=cols < _padded(V))


@triton.jit
def _tile(BLOCK: tl.constexpr):
    # 0 to BLOCK - 1, of which a thread has GROUP neighbours: a row of the tile.
    return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _wide(value, softcap, CAP: tl.constexpr):
    # Logits in float32, capped, and the slope of the cap.
    value = value.to(tl.float32)
    slope = value
    if CAP:
        value, slope = _tanh(value / softcap)
        value *= softcap
    return value, slope


@triton.jit
def _sum(x):
    # Of one dimension. In two, as Triton 3.7 for sm_100 can't take it of sums over a product's columns.
    return tl.sum(tl.sum(x[None, :], axis=1), axis=0)


@triton.jit
def _padded(V: tl.constexpr):
    return (V + PADDED - 1) // PADDED * PADDED


@triton.jit
def _finite(x):
    # What may be taken off: -inf less itself is no number.
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _tanh(x):
    # tanh and its slope. Near 0 by a series, as the other form has no digits left there; of large x the slope
    # has more than 1 - tanh^2 leaves.
    y = tl.minimum(x * x, 1.0)
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925))))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(y < 0.0625, near, tl.where(x < 0, -far, far)), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit(do_not_specialize=["N", "ignore_index", "share"])
def _begin(
    target, numbers, factor, ignore_index: tl.int64, share: tl.float32, N: tl.int64,
    MEAN: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """numbers = share and a count, that of the N targets that count or, but for a MEAN, 1; factor = 1 / share
    / count.

    One program.
    """
    count = 1.0
    if MEAN:
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            t = tl.load(target + at, mask=at < N, other=0).to(tl.int64)
            counts += ((t != ignore_index) & (at < N)).to(tl.int32)
        count = tl.maximum(tl.sum(counts, axis=0), 1).to(tl.float32)
    tl.store(numbers, share)
    tl.store(numbers + 1, count)
    if FACTOR:
        tl.store(factor, 1.0 / (share * count))


@triton.jit(do_not_specialize=["N"])
def _finish(losses, numbers, loss, N: tl.int64, BLOCK: tl.constexpr):
    """loss = the sum of losses over the count in `numbers`.

    One program reads N losses and adds in the same order every time.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < N, other=0.0)
    tl.store(loss, tl.sum(sums, axis=0) / tl.load(numbers + 1))


@triton.jit(do_not_specialize=["X", "W", "B"])
def _multiply(
    of_x, of_weight, of_bias, dloss, factor, dx, dweight, dbias, X: tl.int64, W: tl.int64, B: tl.int64,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, SAME_X: tl.constexpr, SAME_W: tl.constexpr,
):  # fmt: skip
    """dx, dweight, dbias = of_x, of_weight, of_bias times dloss and factor; SCALED, dx without the factor.

    X, W and B elements of them, 0 where one isn't wanted. Nothing to do where one is the SAME as what it
    comes from and is multiplied by 1, as x's mostly is. Otherwise reads and writes each element once.
    """
    arrived = tl.load(dloss).to(tl.float32)
    by = arrived * tl.load(factor)
    if SCALED:
        _times(of_x, arrived, dx, X, BLOCK, SAME_X)
    else:
        _times(of_x, by, dx, X, BLOCK, SAME_X)
    _times(of_weight, by, dweight, W, BLOCK, SAME_W)
    _times(of_bias, by, dbias, B, BLOCK, False)


@triton.jit
def _times(kept, by, out, N, BLOCK: tl.constexpr, SAME: tl.constexpr):
    # out = kept * by of N elements, in turns of BLOCK a program.
    if not SAME or by != 1.0:
        turn = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, turn):
            i = start + tl.arange(0, BLOCK)
            if start + BLOCK <= N:  # without masks, which would keep accesses narrow
                tl.store(out + i, (tl.load(kept + i).to(tl.float32) * by).to(out.dtype.element_ty))
            else:
                value = tl.load(kept + i, mask=i < N, other=0.0).to(tl.float32) * by
                tl.store(out + i, value.to(out.dtype.element_ty), mask=i < N)
