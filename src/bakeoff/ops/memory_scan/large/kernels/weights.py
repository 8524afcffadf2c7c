"""What a large chunk's gates make of the state at its end, by scans: O(b) where `coefficients` is O(b^2).

Behind token i the memory keeps K_i = (1 - forget_{i+1}) ... (1 - forget_b) and the momentum P_i = decay_{i+1}
... decay_b. With T_i = K_i + decay_{i+1} T_{i+1}, T_b = 1, token i's gradient counts G_bi = lr_i T_i in the
memory and n_bi = lr_i P_i in the momentum. `tables` [5, G, T] holds T, P, K, G and n, `ends` [G, C, 3] what
is left of memory and momentum in the memory, beta and f, and of the momentum, m: a token before the first
one. No division, so that rates of exactly 0 and 1 are like all others.
"""

import triton
import triton.language as tl

__all__ = ["_weights_of", "_weights_of_backward"]


@triton.jit
def _last(x, r, SCAN: tl.constexpr):
    return tl.sum(tl.where(r == SCAN - 1, x, 0.0))


@triton.jit
def _then(k1, p1, t1, k2, p2, t2):
    # Of (K, P, T): K <- k K, P <- p P, T <- t K + p T, the first and then the second.
    return k1 * k2, p1 * p2, t2 * k1 + p2 * t1


@triton.jit(do_not_specialize=["G", "T", "C", "chunk"])
def _weights_of(
    lr, decay, forget, tables, ends, G: tl.int64, T: tl.int64, C: tl.int64, chunk: tl.int64,
    SCAN: tl.constexpr,
):  # fmt: skip
    # One chunk of one group a program, from its last token to its first. 32 bytes a token.
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    b = tl.minimum(chunk, T - c * chunk)
    first = g * T + c * chunk
    r = tl.arange(0, SCAN)
    kept, left, total = 1.0, 1.0, 1.0
    for start in range(0, b, SCAN):
        i = b - 1 - start - r
        behind = (i >= 0) & (i < b - 1)
        keep = 1.0 - tl.load(forget + first + i + 1, mask=behind, other=0.0).to(tl.float32)
        fade = tl.load(decay + first + i + 1, mask=behind, other=1.0).to(tl.float32)
        through = tl.associative_scan((keep, fade, tl.where(behind, keep, 0.0)), 0, _then)
        totals = through[2] * kept + through[1] * total
        lefts, kepts = through[1] * left, through[0] * kept
        at = tables + first + i
        tl.store(at, totals, mask=i >= 0)
        tl.store(at + G * T, lefts, mask=i >= 0)
        tl.store(at + 2 * G * T, kepts, mask=i >= 0)
        rate = tl.load(lr + first + i, mask=i >= 0, other=0.0).to(tl.float32)
        tl.store(at + 3 * G * T, rate * totals, mask=i >= 0)
        tl.store(at + 4 * G * T, rate * lefts, mask=i >= 0)
        kept, left, total = _last(kepts, r, SCAN), _last(lefts, r, SCAN), _last(totals, r, SCAN)
    fade = tl.load(decay + first).to(tl.float32)
    at = ends + (g * C + c) * 3
    tl.store(at, (1.0 - tl.load(forget + first).to(tl.float32)) * kept)
    tl.store(at + 1, fade * total)
    tl.store(at + 2, fade * left)


@triton.jit
def _then_back(f1, k1, m1, t1, u1, p1, f2, k2, m2, t2, u2, p2):
    # Of what arrives for T, K and P: T <- f T + t, K <- k K + m T + u, P <- f P + p.
    return (
        f1 * f2, k1 * k2, k2 * m1 + m2 * f1, f2 * t1 + t2, k2 * u1 + m2 * t1 + u2, f2 * p1 + p2
    )  # fmt: skip


@triton.jit
def _arrived(row_dots, at, inside, rows, PARTS: tl.constexpr):
    # What arrives for the tokens' weights in memory and in momentum; `row_dots` [2, PARTS, rows].
    in_memory, in_momentum = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    for start in range(0, PARTS, 4):
        for part in tl.static_range(4):
            own = row_dots + (start + part) * rows + at
            some = inside & (start + part < PARTS)
            in_memory += tl.load(own, mask=some, other=0.0)
            in_momentum += tl.load(own + PARTS * rows, mask=some, other=0.0)
    return in_memory, in_momentum


@triton.jit(do_not_specialize=["G", "T", "C", "chunk", "programs"])
def _weights_of_backward(
    lr, decay, forget, tables, row_dots, dots, beta_bar, dlr, ddecay, dforget,
    G: tl.int64, T: tl.int64, C: tl.int64, chunk: tl.int64, programs: tl.int64,
    PARTS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    # One chunk of one group a program, from its first token to its last. `dots` are shares of what arrives
    # for the ends, `beta_bar` [C, G] what else does for beta.
    g, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0).to(tl.int64) % C
    b = tl.minimum(chunk, T - c * chunk)
    first = g * T + c * chunk
    r = tl.arange(0, SCAN)
    kept, total, left = 0.0, 0.0, 0.0
    for start in range(0, programs, SCAN):
        at = dots + ((g * C + c) * programs + start + r) * 3
        mask = start + r < programs
        kept += tl.sum(tl.load(at, mask=mask, other=0.0))
        total += tl.sum(tl.load(at + 1, mask=mask, other=0.0))
        left += tl.sum(tl.load(at + 2, mask=mask, other=0.0))
    if beta_bar is not None:
        kept += tl.load(beta_bar + c * G + g)
    for start in range(0, b, SCAN):
        i = start + r
        inside, before = i < b, (i > 0) & (i < b)
        # What arrives behind the token before each.
        rate = tl.load(lr + first + i - 1, mask=before, other=0.0).to(tl.float32)
        keep = 1.0 - tl.load(forget + first + i - 1, mask=before, other=0.0).to(tl.float32)
        fade = tl.load(decay + first + i - 1, mask=before, other=1.0).to(tl.float32)
        in_memory, in_momentum = _arrived(row_dots, first + i - 1, before, G * T, PARTS)
        in_memory, in_momentum = rate * in_memory, rate * in_momentum
        through = tl.associative_scan(
            (fade, keep, tl.where(before, fade, 0.0), in_memory, in_memory, in_momentum), 0, _then_back
        )
        kepts = through[1] * kept + through[2] * total + through[4]
        lefts = through[0] * left + through[5]
        totals = through[0] * total + through[3]
        at = tables + first + i
        total_i = tl.load(at, mask=inside, other=0.0)
        left_i = tl.load(at + G * T, mask=inside, other=0.0)
        kept_i = tl.load(at + 2 * G * T, mask=inside, other=0.0)
        in_memory, in_momentum = _arrived(row_dots, first + i, inside, G * T, PARTS)
        dlr_i, ddecay_i = in_memory * total_i + in_momentum * left_i, totals * total_i + lefts * left_i
        tl.store(dlr + first + i, dlr_i.to(dlr.dtype.element_ty), mask=inside)
        tl.store(ddecay + first + i, ddecay_i.to(ddecay.dtype.element_ty), mask=inside)
        tl.store(dforget + first + i, (-kepts * kept_i).to(dforget.dtype.element_ty), mask=inside)
        kept, left, total = _last(kepts, r, SCAN), _last(lefts, r, SCAN), _last(totals, r, SCAN)
