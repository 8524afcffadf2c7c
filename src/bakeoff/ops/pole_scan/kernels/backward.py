"""Gradients of the input and of the poles."""

import triton
import triton.language as tl

from bakeoff.ops.pole_scan.kernels.poles import (
    COEF,
    LACK,
    LEAP2,
    LEAP4,
    POLE,
    _group,
    _leap,
    _move,
    _pair,
    _place,
    _powers,
    _rows,
    _sound,
    _three,
    _times,
)


@triton.jit(do_not_specialize=["T", "C", "G", "L", "dy_b", "dy_t"])
def _backward_input(
    dy, table, handed, du, T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, dy_b: tl.int64, dy_t: tl.int64,
    KP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du of one chunk, walking back from what it is handed, two positions at once.

    With a[t] the conjugate of Z[t]'s gradient and x = p a[t+1]: a[t] = coef dy[t] + x, du[t] = Re sum_k
    a_k[t]. Reads dy, writes du; 9.5 K FMAs an element.
    """
    c, b, g = _place(tl.program_id(0).to(tl.int64), C, G, BLOCK)
    k = tl.arange(0, KP).to(tl.int64)
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    pr, pi = _pair(table, POLE, at, N, mask)
    leap = _leap(table, LEAP2, at, N, mask)
    c1r, c1i = _pair(table, COEF + 2, at, N, mask)
    h0 = tl.sum(tl.load(table + COEF * N + at, mask=mask, other=0.0), 0)
    h1 = tl.sum(c1r, 0)
    xr, xi = _pair(handed + (b * G + g) * 2 * N, 0, at, N, mask)
    n = tl.minimum(L, T - g * L)
    dy += b * dy_b + (g * L + n - 1) * dy_t + c
    du += (b * T + g * L + n - 1) * C + c
    for _ in tl.range(0, n // UNROLL):
        rows = _rows(dy, -dy_t, inside, UNROLL)
        dy -= UNROLL * dy_t
        for j in tl.static_range(0, UNROLL, 2):
            x0, x1 = rows[j], rows[j + 1]
            du0 = tl.sum(xr, 0) + h0 * x0
            du1 = _sound(pr, pi, xr, xi) + (h0 * x1 + h1 * x0)
            re, im = _times(c1r, c1i, pr * x0[None, :] + x1[None, :], pi * x0[None, :])
            xr, xi = _move(leap, xr, xi, re, im)
            tl.store(du - j * C, du0.to(du.dtype.element_ty), mask=inside)
            tl.store(du - (j + 1) * C, du1.to(du.dtype.element_ty), mask=inside)
        du -= UNROLL * C
    for _ in tl.range(0, n % UNROLL):
        row = tl.load(dy, mask=inside, other=0.0).to(tl.float32)
        tl.store(du, (tl.sum(xr, 0) + h0 * row).to(du.dtype.element_ty), mask=inside)
        xr, xi = _times(pr, pi, xr, xi)
        xr += c1r * row[None, :]
        xi += c1i * row[None, :]
        dy -= dy_t
        du -= C


@triton.jit
def _four(p, x0, x1, x2, x3):
    """p x0 + p^2 x1 + p^3 x2 + p^4 x3."""
    re, im = _three(p, x2, x1, x0)
    return p[6] * x3[None, :] + re, p[7] * x3[None, :] + im


@triton.jit
def _lags(u0, u1, u2, u3, s0, s1, s2, s3):
    """Products of slopes with inputs 0, 1, 2 and 3 positions before them, within four positions."""
    one = s1 * u0 + s2 * u1 + s3 * u2
    return s0 * u0 + s1 * u1 + s2 * u2 + s3 * u3, one, s2 * u0 + s3 * u1, s3 * u0


@triton.jit
def _learn(pr, pi, zr, zi, dr, di, gr, gi, sr, si, row, slope):
    """One step of Z, of d = p (d + Z before it), and of the sums of slope Z and slope d."""
    zr, zi = _times(pr, pi, zr, zi)
    nr = pr * dr + zr - pi * di
    ni = pr * di + zi + pi * dr
    zr += row[None, :]
    return (
        zr, zi, nr, ni, gr + slope[None, :] * zr, gi + slope[None, :] * zi,
        sr + slope[None, :] * nr, si + slope[None, :] * ni,
    )  # fmt: skip


@triton.jit
def _learn_four(p, leap, zr, zi, dr, di, gr, gi, sr, si, u0, u1, u2, u3, s0, s1, s2, s3):
    """Four steps of `_learn`, less the products that `_lags` sums."""
    vr, vi = _four(p, s0, s1, s2, s3)
    wr, wi = _four(p, s0, 2.0 * s1, 3.0 * s2, 4.0 * s3)
    gr += vr * zr - vi * zi
    gi += vr * zi + vi * zr
    sr += wr * zr - wi * zi + vr * dr - vi * di
    si += wr * zi + wi * zr + vr * di + vi * dr
    re, im = _three(p, 3.0 * u0, 2.0 * u1, u2)
    dr, di = _move(leap, dr + 4.0 * zr, di + 4.0 * zi, re, im)
    re, im = _three(p, u0, u1, u2)
    zr, zi = _move(leap, zr, zi, re + u3[None, :], im)
    return zr, zi, dr, di, gr, gi, sr, si


@triton.jit
def _walk(
    u, dy, u_t, dy_t, n, p, leap, lack_r, lack_i, zr, zi, inside,
    GROUP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d at the end of a chunk of `n` positions, sum dy Z and sum dy d, in float64.

    Sums may cancel: those over UNROLL positions, in float32, are added up in float64. What remains after
    whole groups of positions is in float64 altogether.
    """
    dr = tl.zeros([GROUP, BLOCK], tl.float32)
    di = tl.zeros([GROUP, BLOCK], tl.float32)
    gr = tl.zeros([GROUP, BLOCK], tl.float64)
    gi = tl.zeros([GROUP, BLOCK], tl.float64)
    sr = tl.zeros([GROUP, BLOCK], tl.float64)
    si = tl.zeros([GROUP, BLOCK], tl.float64)
    r0 = tl.zeros([BLOCK], tl.float64)
    r1 = tl.zeros([BLOCK], tl.float64)
    r2 = tl.zeros([BLOCK], tl.float64)
    r3 = tl.zeros([BLOCK], tl.float64)
    for _ in tl.range(0, n // UNROLL):
        x = _rows(u, u_t, inside, UNROLL)
        s = _rows(dy, dy_t, inside, UNROLL)
        u += UNROLL * u_t
        dy += UNROLL * dy_t
        l0, l1, l2, l3 = 0.0, 0.0, 0.0, 0.0
        hr, hi, tr, ti = 0.0, 0.0, 0.0, 0.0
        for j in tl.static_range(0, UNROLL, 4):
            u0, u1, u2, u3 = x[j], x[j + 1], x[j + 2], x[j + 3]
            s0, s1, s2, s3 = s[j], s[j + 1], s[j + 2], s[j + 3]
            lags = _lags(u0, u1, u2, u3, s0, s1, s2, s3)
            l0, l1, l2, l3 = l0 + lags[0], l1 + lags[1], l2 + lags[2], l3 + lags[3]
            zr, zi, dr, di, hr, hi, tr, ti = _learn_four(
                p, leap, zr, zi, dr, di, hr, hi, tr, ti, u0, u1, u2, u3, s0, s1, s2, s3
            )
        gr += hr.to(tl.float64)
        gi += hi.to(tl.float64)
        sr += tr.to(tl.float64)
        si += ti.to(tl.float64)
        r0 += l0.to(tl.float64)
        r1 += l1.to(tl.float64)
        r2 += l2.to(tl.float64)
        r3 += l3.to(tl.float64)
    re, im = _three(p, r3, r2, r1)
    gr, gi = gr + (re + r0[None, :]), gi + im
    re, im = _three(p, 3.0 * r3, 2.0 * r2, r1)
    sr, si = sr + re, si + im
    zr, zi, dr, di = zr.to(tl.float64), zi.to(tl.float64), dr.to(tl.float64), di.to(tl.float64)
    pr, pi = lack_r.to(tl.float64) + p[0], lack_i.to(tl.float64) + p[1]
    for _ in tl.range(0, n % UNROLL):
        row = tl.load(u, mask=inside, other=0.0).to(tl.float64)
        slope = tl.load(dy, mask=inside, other=0.0).to(tl.float64)
        zr, zi, dr, di, gr, gi, sr, si = _learn(pr, pi, zr, zi, dr, di, gr, gi, sr, si, row, slope)
        u += u_t
        dy += dy_t
    return dr, di, gr, gi, sr, si


@triton.jit(do_not_specialize=["T", "C", "G", "L", "CHUNKS", "SHARES", "u_b", "u_t", "dy_b", "dy_t"])
def _backward_poles(
    u, dy, table, edges, handed, partial,
    T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, CHUNKS: tl.int64, SHARES: tl.int64,
    u_b: tl.int64, u_t: tl.int64, dy_b: tl.int64, dy_t: tl.int64,
    KP: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of GROUP poles of BLOCK channels over every SHARES-th chunk of all CHUNKS = B G.

    sum dy Z for coef, and sum_t a[t] p Z[t-1] for log p, in which a[t] is split into what the chunk's own dy
    give, coef sum dy d with d = sum p^(t'-t) p Z[t-1], and what the chunk is handed, times d at its end.
    Four positions at once as in `_local`: of products within the four, the lags 0 to 3 are summed for all
    poles together. Reads u and dy; 16 K FMAs an element.
    """
    c, k, share = _group(tl.program_id(0).to(tl.int64), C, KP, GROUP, BLOCK)
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    p = _powers(table, at, N, mask, 4)
    leap = _leap(table, LEAP4, at, N, mask)
    fr = tl.zeros([GROUP, BLOCK], tl.float64)
    fi = tl.zeros([GROUP, BLOCK], tl.float64)
    tr = tl.zeros([GROUP, BLOCK], tl.float64)
    ti = tl.zeros([GROUP, BLOCK], tl.float64)
    for chunk in tl.range(share, CHUNKS, SHARES):
        b, g = chunk // G, chunk % G
        zr, zi = _pair(edges + chunk * 2 * N, 0, at, N, mask)
        lack_r, lack_i = _pair(table, LACK, at, N, mask)
        dr, di, gr, gi, sr, si = _walk(
            u + b * u_b + g * L * u_t + c, dy + b * dy_b + g * L * dy_t + c, u_t, dy_t,
            tl.minimum(L, T - g * L), p, leap, lack_r, lack_i, zr, zi, inside, GROUP, UNROLL, BLOCK,
        )  # fmt: skip
        cr, ci = _pair(table, COEF, at, N, mask)
        sr, si = _times(cr, ci, sr, si)
        ar, ai = _pair(handed + chunk * 2 * N, 0, at, N, mask)
        ar, ai = _times(ar, ai, dr, di)
        fr += gr
        fi += gi
        tr += sr + ar
        ti += si + ai
    partial += share * 4 * N + at
    tl.store(partial, fr, mask=mask)
    tl.store(partial + N, fi, mask=mask)
    tl.store(partial + 2 * N, tr, mask=mask)
    tl.store(partial + 3 * N, ti, mask=mask)


@triton.jit(do_not_specialize=["C", "K", "SHARES"])
def _finish(
    partial, dlog_radius, dtheta, dcoef, C: tl.int64, K: tl.int64, SHARES: tl.int64,
    KP: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the shares up, in float64 and in order, and turns them into the parameters' gradients, of which
    any may be absent."""
    N = C * KP
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = i // C
    inside = (i < N) & (k < K)
    gr = tl.zeros([BLOCK], tl.float64)
    gi = tl.zeros([BLOCK], tl.float64)
    sr = tl.zeros([BLOCK], tl.float64)
    si = tl.zeros([BLOCK], tl.float64)
    partial += i
    for share in tl.range(0, SHARES, AHEAD):
        for j in tl.static_range(AHEAD):
            live = inside & (share + j < SHARES)
            gr += tl.load(partial + (4 * j) * N, mask=live, other=0.0)
            gi += tl.load(partial + (4 * j + 1) * N, mask=live, other=0.0)
            sr += tl.load(partial + (4 * j + 2) * N, mask=live, other=0.0)
            si += tl.load(partial + (4 * j + 3) * N, mask=live, other=0.0)
        partial += AHEAD * 4 * N
    at = (i % C) * K + k
    if dlog_radius is not None:
        tl.store(dlog_radius + at, sr.to(tl.float32), mask=inside)
    if dtheta is not None:
        tl.store(dtheta + at, (-si).to(tl.float32), mask=inside)
    if dcoef is not None:
        tl.store(dcoef + 2 * at, gr.to(tl.float32), mask=inside)
        tl.store(dcoef + 2 * at + 1, (-gi).to(tl.float32), mask=inside)
