"""What a chunk's gates make of memory, momentum and gradients: numbers from lr, decay and forget alone.

M_t = beta_t M_0 + f_t S_0 - sum_i G_ti u_i and S_t = m_t S_0 - sum_i n_ti u_i, token by token and without a
division, so that rates of exactly 0 and 1 are like all others.
"""

import triton
import triton.language as tl

from bakeoff.ops.memory_scan.kernels.tiles import _length, _tile

__all__ = ["_tables", "_tables_backward"]


@triton.jit(do_not_specialize=["T", "C"])
def _tables(
    lr, decay, forget, gates, rates, T: tl.int64, C: tl.int64, CHUNK: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    # One chunk of one group a program. `gates` [b + 2, b + 2]: row t <= b holds beta_t, f_t and G_t1 to G_tb,
    # the last row 0, m_b and n_b1 ... n_bb. `rates` [b, b + 2]: row t - 1 holds 0, m_t and n_t1 ... n_tb.
    # Tokens that the last chunk lacks count as lr 0, decay 1, forget 0.
    W: tl.constexpr = CHUNK + 2
    chunk = tl.program_id(0).to(tl.int64)
    g, c = chunk // C, chunk % C
    i = tl.arange(0, BT)
    length = _length(T, c, CHUNK)
    first = g * T + c * CHUNK
    table, row = gates + chunk * W * W, rates + chunk * CHUNK * W
    inside = i < CHUNK
    learned, pushed = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    beta, f, m = 1.0, 0.0, 1.0
    tl.store(table, beta)
    tl.store(table + 1, f)
    tl.store(table + 2 + i, learned, mask=inside)
    for t in range(CHUNK):
        known = t < length
        rate = tl.load(lr + first + t, mask=known, other=0.0).to(tl.float32)
        keep_momentum = tl.load(decay + first + t, mask=known, other=1.0).to(tl.float32)
        keep = 1 - tl.load(forget + first + t, mask=known, other=0.0).to(tl.float32)
        m *= keep_momentum
        pushed = tl.where(i == t, rate, keep_momentum * pushed)
        beta *= keep
        f = keep * f + m
        learned = keep * learned + pushed
        table += W
        tl.store(table, beta)
        tl.store(table + 1, f)
        tl.store(table + 2 + i, learned, mask=inside)
        tl.store(row, 0.0)
        tl.store(row + 1, m)
        tl.store(row + 2 + i, pushed, mask=inside)
        row += W
    table += W
    tl.store(table, 0.0)
    tl.store(table + 1, m)
    tl.store(table + 2 + i, pushed, mask=inside)


@triton.jit(do_not_specialize=["T", "C"])
def _tables_backward(
    decay, forget, gates, rates, dread, dwritten, dweights, dlast, dlr, ddecay, dforget, T: tl.int64,
    C: tl.int64, CHUNK: tl.constexpr, SHIFT: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr,
):  # fmt: skip
    # The gates' gradients, from the last token to the first. Given are those of the tables: dread [PARTS, 2,
    # b] of beta and f where they are read, dweights [b, b] of G where it is read; dwritten [ALL_PARTS, 2, b]
    # of the last token's G and n, dlast [ALL_PARTS, 3] of its beta, f and m.
    W: tl.constexpr = CHUNK + 2
    chunk = tl.program_id(0).to(tl.int64)
    g, c = chunk // C, chunk % C
    i, three = tl.arange(0, BT), tl.arange(0, 4)
    length = _length(T, c, CHUNK)
    first = g * T + c * CHUNK
    inside = i < CHUNK
    read_beta, read_push = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    ends, of_pushed = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    last = tl.zeros((4,), tl.float32)
    for start in range(0, PARTS, 16):
        part = start + tl.arange(0, 16)
        here = dread + chunk * PARTS * 2 * CHUNK
        if SHIFT >= 0:
            read_beta += tl.sum(_tile(here, 2 * part, i, 2 * PARTS, CHUNK), 0)
            read_push += tl.sum(_tile(here, 2 * part + 1, i, 2 * PARTS, CHUNK), 0)
    for start in range(0, ALL_PARTS, 16):
        part = start + tl.arange(0, 16)
        here = dwritten + chunk * ALL_PARTS * 2 * CHUNK
        ends += tl.sum(_tile(here, 2 * part, i, 2 * ALL_PARTS, CHUNK), 0)
        of_pushed += tl.sum(_tile(here, 2 * part + 1, i, 2 * ALL_PARTS, CHUNK), 0)
        last += tl.sum(_tile(dlast + chunk * ALL_PARTS * 3, part, three, ALL_PARTS, 3), 0)
    of_beta, of_f, of_m = 0.0, 0.0, tl.sum(tl.where(three == 2, last, 0.0))
    of_learned = tl.zeros((BT,), tl.float32)
    for step in range(CHUNK):
        t = CHUNK - step
        before, asked = t - 1, t - SHIFT
        if SHIFT >= 0:
            of_beta += tl.sum(tl.where(i == asked, read_beta, 0.0))
            of_f += tl.sum(tl.where(i == asked, read_push, 0.0))
            weights = dweights + (chunk * CHUNK + asked) * CHUNK
            of_learned += tl.load(weights + i, mask=inside & (asked < CHUNK), other=0.0)
        at_end = t == length
        of_beta += tl.where(at_end, tl.sum(tl.where(three == 0, last, 0.0)), 0.0)
        of_f += tl.where(at_end, tl.sum(tl.where(three == 1, last, 0.0)), 0.0)
        of_learned += tl.where(at_end, ends, 0.0)
        of_pushed += of_learned
        of_m += of_f
        table = gates + (chunk * W + before) * W
        row = rates + (chunk * CHUNK + before - 1) * W
        learned = tl.load(table + 2 + i, mask=inside, other=0.0)
        pushed = tl.load(row + 2 + i, mask=inside & (before > 0), other=0.0)
        m = tl.load(row + 1, mask=before > 0, other=1.0)
        of_keep = tl.sum(of_learned * learned) + of_beta * tl.load(table) + of_f * tl.load(table + 1)
        known = before < length
        tl.store(dforget + first + before, -of_keep, mask=known)
        tl.store(ddecay + first + before, tl.sum(of_pushed * pushed) + of_m * m, mask=known)
        tl.store(dlr + first + before, tl.sum(tl.where(i == before, of_pushed, 0.0)), mask=known)
        keep_momentum = tl.load(decay + first + before, mask=known, other=1.0).to(tl.float32)
        keep = 1 - tl.load(forget + first + before, mask=known, other=0.0).to(tl.float32)
        of_beta *= keep
        of_f *= keep
        of_learned *= keep
        of_m *= keep_momentum
        of_pushed = tl.where(i == before, 0.0, keep_momentum * of_pushed)
