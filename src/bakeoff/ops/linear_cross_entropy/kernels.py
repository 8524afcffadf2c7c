"""linear_cross_entropy in Triton: a chunk's logits to losses and to their gradients, in place.

Products are cuBLAS's. A program has one row of V logits. Where that fits one block it is read once; else a
first pass takes the maximum and the sum of exponentials, by lane and rescaled as the maximum grows, and a
second one, mostly from L2, the gradient. Rows begin at multiples of 64 elements and are written to their
padded ends, so that accesses are 16 bytes wide whatever V is.
"""

import triton
import triton.language as tl

__all__: list[str] = []

PADDED = tl.constexpr(64)


@triton.jit(do_not_specialize=["row_units", "scale_step", "ignore_index", "smoothing", "z_loss", "softcap"])
def _rows(
    logits, target, losses, scale,
    row_units: tl.int64, scale_step: tl.int64, ignore_index: tl.int64,
    smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32,
    V: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """loss = (1 - smoothing) (lse - l[t]) + smoothing (lse - mean l) + z_loss lse^2 of l = logits, capped if
    CAP, and dl = scale * (p (1 + 2 z_loss lse) - smoothing / V - (1 - smoothing) [t]) in their place.

    Reads logits once or twice and writes them once: 4 or 6 bytes an element in 16 bits; about 10 FLOPs.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * (row_units * PADDED)
    t = tl.load(target + row).to(tl.int64)
    if t == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENTS:
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], logits.dtype.element_ty)
                tl.store(logits + cols, zeros, mask=cols < _padded(V))
    else:
        # What is no class makes the row's loss and gradients NaN: the host can't look at it.
        known = (t >= 0) & (t < V)
        at = tl.load(logits + t, mask=known, other=float("nan")).to(tl.float32)
        first = tl.load(logits).to(tl.float32)
        if CAP:
            at = _tanh(at / softcap)[0] * softcap
            first = _tanh(first / softcap)[0] * softcap
        if V <= BLOCK:
            cols = tl.arange(0, BLOCK)
            value, slope = _read(logits, cols, softcap, V, CAP)
            most = tl.max(value, axis=0)
            e = tl.exp(value - _finite(most))
            total = tl.sum(e, axis=0)
            beyond = tl.sum(tl.where(cols < V, value - first, 0.0), axis=0) if SMOOTH else 0.0
        else:
            most, total, beyond = _pass(logits, first, softcap, V, BLOCK, SMOOTH, CAP)
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
            if V <= BLOCK:
                _store(logits, cols, e, slope, t, weight, factor, smoothing, V, CAP)
            else:
                for start in range(0, V, BLOCK):
                    cols = start + tl.arange(0, BLOCK)
                    value, slope = _read(logits, cols, softcap, V, CAP)
                    e = tl.exp(value - _finite(most))
                    _store(logits, cols, e, slope, t, weight, factor, smoothing, V, CAP)


@triton.jit
def _pass(
    logits, first, softcap, V: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    # Of a row the maximum, the sum of exponentials below it, and the sum of what is beyond the first logit.
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    off = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value, _ = _read(logits, cols, softcap, V, CAP)
        higher = tl.maximum(high, value)
        base = _finite(higher)
        sums = sums * tl.exp(high - base) + tl.exp(value - base)
        high = higher
        if SMOOTH:
            off += tl.where(cols < V, value - first, 0.0)
    most = tl.max(high, axis=0)
    total = tl.sum(sums * tl.exp(high - _finite(most)), axis=0)
    return most, total, tl.sum(off, axis=0)


@triton.jit
def _read(logits, cols, softcap, V: tl.constexpr, CAP: tl.constexpr):
    # Logits in float32, -inf behind the last class, and the slope of the cap.
    value = tl.load(logits + cols, mask=cols < _padded(V), other=0.0).to(tl.float32)
    slope = value
    if CAP:
        value, slope = _tanh(value / softcap)
        value *= softcap
    return tl.where(cols < V, value, float("-inf")), slope


@triton.jit
def _store(logits, cols, e, slope, t, weight, factor, smoothing, V: tl.constexpr, CAP: tl.constexpr):
    # The gradients of logits: zeros behind the last class.
    grad = e * weight - smoothing / V
    grad = tl.where(cols == t, grad - (1.0 - smoothing), grad) * factor
    if CAP:
        grad *= slope
    grad = tl.where(cols < V, grad, 0.0)
    tl.store(logits + cols, grad.to(logits.dtype.element_ty), mask=cols < _padded(V))


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
def _finish(
    losses, target, loss, factor, ignore_index: tl.int64, share: tl.float32, N: tl.int64,
    MEAN: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = the sum of losses, and factor = 1 / share; of a MEAN both over the number of targets that count.

    One program reads N losses and, of a mean, N targets, and adds in the same order every time.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < N, other=0.0)
        if MEAN:
            t = tl.load(target + at, mask=at < N, other=0).to(tl.int64)
            counts += ((t != ignore_index) & (at < N)).to(tl.int32)
    total = tl.sum(sums, axis=0)
    count = 1.0
    if MEAN:
        count = tl.maximum(tl.sum(counts, axis=0), 1).to(tl.float32)
    tl.store(loss, total / count)
    if FACTOR:
        tl.store(factor, 1.0 / (share * count))


@triton.jit(do_not_specialize=["N"])
def _multiply(kept, dloss, factor, out, N: tl.int64, BLOCK: tl.constexpr, SAME: tl.constexpr):
    """out = kept * dloss * factor; nothing to do where they are SAME and the product is 1, as it mostly is.

    Otherwise reads kept and writes out, BLOCK elements a program.
    """
    by = tl.load(dloss).to(tl.float32) * tl.load(factor)
    if not SAME or by != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(kept + i, mask=i < N, other=0.0).to(tl.float32) * by
        tl.store(out + i, value.to(out.dtype.element_ty), mask=i < N)
