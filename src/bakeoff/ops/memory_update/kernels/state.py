"""Elementwise passes over a memory and its momentum: the step, and what of its derivative is elementwise.

BLOCK elements of one tensor a program. Every program adds up the shares of the sums it needs by itself, in
the same order: no atomics, and no launch for a handful of numbers.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_update.kernels.products import _finite

__all__: list[str] = []


@triton.jit
def _place(D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    # A program's group and block, and the first block of each tensor behind the first.
    upto1: tl.constexpr = (H * D + BLOCK - 1) // BLOCK
    upto2: tl.constexpr = upto1 + (H + BLOCK - 1) // BLOCK
    upto3: tl.constexpr = upto2 + (V * H + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = upto3 + (V + BLOCK - 1) // BLOCK
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def _total(parts, count, BLOCK: tl.constexpr):
    # The sum of `count` numbers.
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(parts + start + lane, mask=lane < count - start, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _move(
    m, s, new_m, new_s, g, group, block, rate, decay, kept, good, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    # One block of one tensor.
    lane = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = group.to(tl.int64) * SIZE + lane, lane < SIZE
    m_old = tl.load(m + at, mask=inside, other=0.0)
    s_old = tl.load(s + at, mask=inside, other=0.0)
    slope = tl.load(g + lane, mask=inside, other=0.0)
    s_new = tl.where(good, decay * s_old - rate * slope, s_old)
    tl.store(new_s + at, s_new, mask=inside)
    tl.store(new_m + at, tl.where(good, kept * m_old + s_new, m_old), mask=inside)


@triton.jit(do_not_specialize=["max_norm", "factor", "shares", "losses_each"])
def _step(
    w1, b1, w2, b2, s1, c1, s2, c2, new_w1, new_b1, new_w2, new_b2, new_s1, new_c1, new_s2, new_c2,
    g, squares, losses, lr, decay, forget, loss, norm, ok, skipped,
    max_norm: tl.float32, factor: tl.float32, shares: tl.int32, losses_each: tl.int32,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new momentum and memory; loss, norm and ok by each group's first program.

    Reads 12 bytes an element, writes 8.
    """
    group, t = _place(D, H, V, BLOCK)
    upto1: tl.constexpr = (H * D + BLOCK - 1) // BLOCK
    upto2: tl.constexpr = upto1 + (H + BLOCK - 1) // BLOCK
    upto3: tl.constexpr = upto2 + (V * H + BLOCK - 1) // BLOCK
    length = tl.sqrt(_total(squares + group.to(tl.int64) * shares, shares, 128))
    good = _finite(length)
    if t == 0:
        tl.store(norm + group, length)
        tl.store(ok + group, good)
        if skipped is not None:
            tl.store(skipped + group, tl.load(skipped + group) + tl.where(good, 0, 1))
        total = _total(losses + group.to(tl.int64) * losses_each, losses_each, 1024)
        tl.store(loss + group, factor * total)
    rate = tl.load(lr + group).to(tl.float32) * tl.minimum(max_norm / (length + 1e-6), 1.0)
    old = tl.load(decay + group).to(tl.float32)
    kept = 1.0 - tl.load(forget + group).to(tl.float32)
    own = g + group.to(tl.int64) * (H * D + H + V * H + V)
    if t < upto1:
        _move(w1, s1, new_w1, new_s1, own, group, t, rate, old, kept, good, H * D, BLOCK)
    elif t < upto2:
        own += H * D
        _move(b1, c1, new_b1, new_c1, own, group, t - upto1, rate, old, kept, good, H, BLOCK)
    elif t < upto3:
        own += H * D + H
        _move(w2, s2, new_w2, new_s2, own, group, t - upto2, rate, old, kept, good, V * H, BLOCK)
    else:
        own += H * D + H + V * H
        _move(b2, c2, new_b2, new_c2, own, group, t - upto3, rate, old, kept, good, V, BLOCK)


# Its derivative. What arrives for a result y is called y_bar; it may be absent, which stands for zeros.


@triton.jit
def _arriving(y_bar, at, inside):
    found = tl.zeros(at.shape, tl.float32)
    if y_bar is not None:
        found = tl.load(y_bar + at, mask=inside, other=0.0)
    return found


@triton.jit
def _dots_of(m, s, m_bar, s_bar, g, group, block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # <g, s_bar + m_bar>, <s, s_bar + m_bar> and <m, m_bar> over one block.
    lane = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = group.to(tl.int64) * SIZE + lane, lane < SIZE
    to_memory = _arriving(m_bar, at, inside)
    total = to_memory + _arriving(s_bar, at, inside)
    along = 0.0
    if g is not None:
        along = tl.sum(tl.load(g + lane, mask=inside, other=0.0) * total, 0)
    speed = tl.sum(tl.load(s + at, mask=inside, other=0.0) * total, 0)
    state = tl.sum(tl.load(m + at, mask=inside, other=0.0) * to_memory, 0)
    return along, speed, state


@triton.jit
def _dots(
    w1, b1, w2, b2, s1, c1, s2, c2, w1_bar, b1_bar, w2_bar, b2_bar, s1_bar, c1_bar, s2_bar, c2_bar, g, dots,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each block's share of the three inner products that the gates' gradients are made of: [3, G, blocks].

    Reads up to 20 bytes an element.
    """
    group, t = _place(D, H, V, BLOCK)
    upto1: tl.constexpr = (H * D + BLOCK - 1) // BLOCK
    upto2: tl.constexpr = upto1 + (H + BLOCK - 1) // BLOCK
    upto3: tl.constexpr = upto2 + (V * H + BLOCK - 1) // BLOCK
    own = g
    if g is not None:
        own += group.to(tl.int64) * (H * D + H + V * H + V)
    if t < upto1:
        along, speed, state = _dots_of(w1, s1, w1_bar, s1_bar, own, group, t, H * D, BLOCK)
    elif t < upto2:
        if g is not None:
            own += H * D
        along, speed, state = _dots_of(b1, c1, b1_bar, c1_bar, own, group, t - upto1, H, BLOCK)
    elif t < upto3:
        if g is not None:
            own += H * D + H
        along, speed, state = _dots_of(w2, s2, w2_bar, s2_bar, own, group, t - upto2, V * H, BLOCK)
    else:
        if g is not None:
            own += H * D + H + V * H
        along, speed, state = _dots_of(b2, c2, b2_bar, c2_bar, own, group, t - upto3, V, BLOCK)
    programs = tl.num_programs(0)
    tl.store(dots + tl.program_id(0), along)
    tl.store(dots + programs + tl.program_id(0), speed)
    tl.store(dots + 2 * programs + tl.program_id(0), state)


@triton.jit
def _spread_of(
    m_bar, s_bar, g, u, dm, ds, group, block, push, pull, decay, kept, good,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One block of one tensor.
    lane = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = group.to(tl.int64) * SIZE + lane, lane < SIZE
    to_memory, to_speed = _arriving(m_bar, at, inside), _arriving(s_bar, at, inside)
    total = to_memory + to_speed
    slope = push * total
    if g is not None:
        slope += pull * tl.load(g + lane, mask=inside, other=0.0)
    if u is not None:
        tl.store(u + at, slope.to(u.dtype.element_ty), mask=inside)
    if dm is not None:
        tl.store(dm + at, tl.where(good, kept * to_memory, to_memory), mask=inside)
    if ds is not None:
        tl.store(ds + at, tl.where(good, decay * total, to_speed), mask=inside)


@triton.jit(do_not_specialize=["max_norm"])
def _spread(  # noqa: C901  four tensors, and gradients that may be absent
    w1_bar, b1_bar, w2_bar, b2_bar, s1_bar, c1_bar, s2_bar, c2_bar, norm_bar, g, dots, norm,
    lr, decay, forget, u1, v1, u2, v2, dw1, db1, dw2, db2, ds1, dc1, ds2, dc2, dlr, ddecay, dforget,
    max_norm: tl.float32,
    D: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cotangent u of the gradient; the momentum's gradient, the memory's as far as it goes past the step,
    and the gates' by each group's first program.

    Reads up to 12 bytes an element, writes up to 12.
    """
    group, t = _place(D, H, V, BLOCK)
    upto1: tl.constexpr = (H * D + BLOCK - 1) // BLOCK
    upto2: tl.constexpr = upto1 + (H + BLOCK - 1) // BLOCK
    upto3: tl.constexpr = upto2 + (V * H + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = upto3 + (V + BLOCK - 1) // BLOCK
    programs = tl.num_programs(0)
    length = tl.load(norm + group)
    good = _finite(length)
    rate = tl.load(lr + group).to(tl.float32)
    clip = max_norm / (length + 1e-6)
    scale = tl.minimum(clip, 1.0)
    push = -rate * scale
    pull = 0.0
    along = 0.0
    if g is not None:
        along = _total(dots + group * blocks, blocks, 128)
        # d scale / d norm where the clip is active, and the norm's derivative g / norm, which at 0 is 0.
        pull = tl.where(clip < 1.0, rate * scale / (length + 1e-6) * along, 0.0)
        if norm_bar is not None:
            pull += tl.load(norm_bar + group)
        pull = tl.where(length > 0.0, pull / length, 0.0)
    if t == 0:
        if dlr is not None:
            tl.store(dlr + group, tl.where(good, -scale * along, 0.0).to(dlr.dtype.element_ty))
        if ddecay is not None:
            speed = _total(dots + programs + group * blocks, blocks, 128)
            tl.store(ddecay + group, tl.where(good, speed, 0.0).to(ddecay.dtype.element_ty))
        if dforget is not None:
            state = _total(dots + 2 * programs + group * blocks, blocks, 128)
            tl.store(dforget + group, tl.where(good, -state, 0.0).to(dforget.dtype.element_ty))
    old = tl.load(decay + group).to(tl.float32)
    kept = 1.0 - tl.load(forget + group).to(tl.float32)
    own = g
    if g is not None:
        own += group.to(tl.int64) * (H * D + H + V * H + V)
    if t < upto1:
        _spread_of(w1_bar, s1_bar, own, u1, dw1, ds1, group, t, push, pull, old, kept, good, H * D, BLOCK)
    elif t < upto2:
        if g is not None:
            own += H * D
        _spread_of(b1_bar, c1_bar, own, v1, db1, dc1, group, t - upto1, push, pull, old, kept, good, H, BLOCK)
    elif t < upto3:
        if g is not None:
            own += H * D + H
        t -= upto2
        _spread_of(w2_bar, s2_bar, own, u2, dw2, ds2, group, t, push, pull, old, kept, good, V * H, BLOCK)
    else:
        if g is not None:
            own += H * D + H + V * H
        _spread_of(b2_bar, c2_bar, own, v2, db2, dc2, group, t - upto3, push, pull, old, kept, good, V, BLOCK)
