"""States at the chunks' edges, for both directions."""

import triton
import triton.language as tl

from bakeoff.ops.pole_scan.kernels.poles import (
    COEF,
    LEAP4,
    _advance,
    _group,
    _leap,
    _move,
    _pair,
    _powers,
    _rows,
    _three,
    _times,
)


@triton.jit(do_not_specialize=["T", "C", "G", "L", "x_b", "x_t"])
def _local(
    x, table, edges, T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, x_b: tl.int64, x_t: tl.int64,
    KP: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state, sum_t p^(end - t) x[t], for GROUP poles, into its edges.

    REVERSED: coef sum_t p^(t - start + 1) x[t], the cotangent that it hands to the chunk before it.
    Four positions at once, z = p^4 z + p^3 x0 + p^2 x1 + p x2 + x3, with p^4 to twice float32's precision:
    the fewer roundings, the better, since for a constant x they all go in the same direction. Reads x; 4 K
    FMAs an element.
    """
    c, k, chunk = _group(tl.program_id(0).to(tl.int64), C, KP, GROUP, BLOCK)
    b, g = chunk // G, chunk % G
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    p = _powers(table, at, N, mask, 3)
    leap = _leap(table, LEAP4, at, N, mask)
    n = tl.minimum(L, T - g * L)
    x += b * x_b + g * L * x_t + c
    if REVERSED:
        x += (n - 1) * x_t
        x_t = -x_t
    tr = tl.zeros([GROUP, BLOCK], tl.float32)
    ti = tl.zeros([GROUP, BLOCK], tl.float32)
    for _ in tl.range(0, n // UNROLL):
        rows = _rows(x, x_t, inside, UNROLL)
        x += UNROLL * x_t
        for j in tl.static_range(0, UNROLL, 4):
            re, im = _three(p, rows[j], rows[j + 1], rows[j + 2])
            tr, ti = _move(leap, tr, ti, re + rows[j + 3][None, :], im)
    for _ in tl.range(0, n % UNROLL):
        tr, ti = _advance(p[0], p[1], tr, ti, tl.load(x, mask=inside, other=0.0).to(tl.float32))
        x += x_t
    if REVERSED:
        tr, ti = _times(p[0], p[1], tr, ti)
        cr, ci = _pair(table, COEF, at, N, mask)
        tr, ti = _times(cr, ci, tr, ti)
    edges += chunk * 2 * N
    tl.store(edges + at, tr, mask=mask)
    tl.store(edges + N + at, ti, mask=mask)


@triton.jit(do_not_specialize=["C", "K", "G"])
def _carry(
    edges, powers, state, end, C: tl.int64, K: tl.int64, G: tl.int64,
    KP: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """In place: what each chunk adds to the state becomes the state at its beginning; the last state into
    `end`.

    REVERSED, from the last chunk to the first: what it hands back becomes what it is handed, the last chunk
    being handed conj(state), and the conjugate of what the first hands back goes into `end`. One thread a
    pole of one sequence; AHEAD chunks are read together. In float64.
    """
    N = C * KP
    blocks = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    b = pid // blocks
    i = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    k = i // C
    known = inside & (k < K)
    at = ((b * C + i % C) * K + k) * 2
    zr = tl.zeros([BLOCK], tl.float64)
    zi = tl.zeros([BLOCK], tl.float64)
    if state is not None:
        zr = tl.load(state + at, mask=known, other=0.0).to(tl.float64)
        zi = tl.load(state + at + 1, mask=known, other=0.0).to(tl.float64)
        if REVERSED:
            zi = -zi
    pr, pi = _pair(powers, 0, i, N, inside)
    last_r, last_i = _pair(powers, 2, i, N, inside)
    LAST = 0 if REVERSED else G - 1  # in the order of the walk: only that chunk may be shorter
    step = 2 * N
    if REVERSED:
        step = -step
    edges += (b * G + (G - 1 if REVERSED else 0)) * 2 * N + i
    for done in tl.range(0, G, AHEAD):
        parts = ()
        for j in tl.static_range(AHEAD):
            parts = parts + (_pair(edges + j * step, 0, 0, N, inside & (done + j < G)),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            live = done + j < G
            tl.store(edges + j * step, zr.to(tl.float32), mask=inside & live)
            tl.store(edges + j * step + N, zi.to(tl.float32), mask=inside & live)
            short = done + j == LAST
            nr, ni = _times(tl.where(short, last_r, pr), tl.where(short, last_i, pi), zr, zi)
            zr = tl.where(live, nr + parts[j][0].to(tl.float64), zr)
            zi = tl.where(live, ni + parts[j][1].to(tl.float64), zi)
        edges += AHEAD * step
    if end is not None:
        tl.store(end + at, zr.to(tl.float32), mask=known)
        tl.store(end + at + 1, (-zi if REVERSED else zi).to(tl.float32), mask=known)
