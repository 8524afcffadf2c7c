"""pole_scan in Triton: a channel's poles walk through time in one thread's registers.

Time is cut into chunks of L positions. `_local` walks all chunks at once from zero states, `_carry` passes
states from chunk to chunk, and `_forward` walks the chunks again from their true states and writes y. The
backward is the same in reverse for u, and for the poles a walk that carries Z and its derivative.

A walk costs 3.5 K to 15 K float32 FMAs a position and reads u once; at K = 8 that is of the order of what
the memory takes, and unlike matrix products on tensor cores it is float32 throughout.

Precision: roundings add up along a walk, for a constant input all in the same direction, and a rounded p is a
slightly different pole. So walks take two or four positions at once, with that power of p to twice float32's
precision, and `_carry`, whose work is negligible, computes in float64.

Tiles are [KP poles, BLOCK channels] with BLOCK = the threads of a program: the compiler then keeps all poles
of a channel in one thread, and sums over poles exchange nothing. C is a run-time number, because knowing it
makes the compiler read tables four channels at a time, which destroys that layout.

Buffers, complex numbers as two rows, re and im: table [TABLE_ROWS, KP, C] float32 = p, coef, p^2, p^3, p^4,
what float32(p^4) lacks, what float32(p^2) lacks, coef p, coef p^2; powers [4, KP, C] float64 = p^L and
p^(length of the last chunk); edges and handed [B, G, 2, KP, C] float32 = states at the chunks' beginnings
and ends.
"""

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["CHUNK", "TABLE_ROWS", "Tiling", "padded", "tiling"]


@triton.jit
def _polar(log_radius, theta, n):
    """exp(n (log_radius + i theta))."""
    size = tl.exp(n * log_radius)
    return size * tl.cos(n * theta), size * tl.sin(n * theta)


@triton.jit
def _times(ar, ai, br, bi):
    return ar * br - ai * bi, ar * bi + ai * br


@triton.jit
def _put_rounded(table, N, re, im, inside, known):
    """Stores a pole's number as float32, 0 for a pole that isn't there; returns the stored one as float64."""
    near_re = tl.where(known, re, 0.0).to(tl.float32)
    near_im = tl.where(known, im, 0.0).to(tl.float32)
    tl.store(table, near_re, mask=inside)
    tl.store(table + N, near_im, mask=inside)
    return near_re.to(tl.float64), near_im.to(tl.float64)


@triton.jit(do_not_specialize=["C", "K", "L", "LAST"])
def _prepare(
    log_radius, theta, coef, table, powers, C: tl.int64, K: tl.int32, L: tl.int32, LAST: tl.int32,
    KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One thread a pole: its tables, pole-major, zeros for poles from K on."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = i // C
    N = C * KP
    inside = i < N
    known = inside & (k < K)
    at = (i % C) * K + k
    a = tl.load(log_radius + at, mask=known, other=0.0).to(tl.float64)
    b = tl.load(theta + at, mask=known, other=0.0).to(tl.float64)
    one = tl.full([BLOCK], 1.0, tl.float64)
    re, im = _polar(a, b, one)
    _put_rounded(table + i, N, re, im, inside, known)
    tl.store(table + 2 * N + i, tl.load(coef + 2 * at, mask=known, other=0.0), mask=inside)
    tl.store(table + 3 * N + i, tl.load(coef + 2 * at + 1, mask=known, other=0.0), mask=inside)
    cr = tl.load(coef + 2 * at, mask=known, other=0.0).to(tl.float64)
    ci = tl.load(coef + 2 * at + 1, mask=known, other=0.0).to(tl.float64)
    far_re, far_im = _times(cr, ci, re, im)
    _put_rounded(table + 14 * N + i, N, far_re, far_im, inside, known)
    for n in tl.static_range(2, 5):
        re, im = _polar(a, b, one * n)
        near_re, near_im = _put_rounded(table + 2 * n * N + i, N, re, im, inside, known)
        if n == 2:
            _put_rounded(table + 12 * N + i, N, re - near_re, im - near_im, inside, known)
            far_re, far_im = _times(cr, ci, re, im)
            _put_rounded(table + 16 * N + i, N, far_re, far_im, inside, known)
        if n == 4:
            _put_rounded(table + 10 * N + i, N, re - near_re, im - near_im, inside, known)
    re, im = _polar(a, b, one * L)
    tl.store(powers + i, tl.where(known, re, 0.0), mask=inside)
    tl.store(powers + N + i, tl.where(known, im, 0.0), mask=inside)
    re, im = _polar(a, b, one * LAST)
    tl.store(powers + 2 * N + i, tl.where(known, re, 0.0), mask=inside)
    tl.store(powers + 3 * N + i, tl.where(known, im, 0.0), mask=inside)


@triton.jit
def _pair(table, row, at, N, mask):
    """Rows `row` and `row` + 1 of a table: real and imaginary parts."""
    re = tl.load(table + row * N + at, mask=mask, other=0.0)
    return re, tl.load(table + (row + 1) * N + at, mask=mask, other=0.0)


@triton.jit
def _rows(x, step, inside, N: tl.constexpr):
    """N rows, `step` apart, all asked for before the first is used."""
    rows = ()
    for j in tl.static_range(N):
        rows = rows + (tl.load(x + j * step, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    return rows


@triton.jit
def _advance(pr, pi, zr, zi, row):
    """p z + row."""
    return pr * zr + row[None, :] - pi * zi, pr * zi + pi * zr


@triton.jit
def _three(pr, pi, p2r, p2i, p3r, p3i, x0, x1, x2):
    """p^3 x0 + p^2 x1 + p x2."""
    x0, x1, x2 = x0[None, :], x1[None, :], x2[None, :]
    return p3r * x0 + (p2r * x1 + pr * x2), p3i * x0 + (p2i * x1 + pi * x2)


@triton.jit
def _four(pr, pi, p2r, p2i, p3r, p3i, p4r, p4i, x0, x1, x2, x3):
    """p x0 + p^2 x1 + p^3 x2 + p^4 x3."""
    re, im = _three(pr, pi, p2r, p2i, p3r, p3i, x2, x1, x0)
    return p4r * x3[None, :] + re, p4i * x3[None, :] + im


@triton.jit
def _far(p4r, p4i, er, ei, zr, zi, re, im):
    """(p4 + e) z + (re, im), the large products last."""
    nr = p4r * zr + (er * zr + (re - ei * zi)) - p4i * zi
    return nr, p4r * zi + (er * zi + (ei * zr + im)) + p4i * zr


@triton.jit(do_not_specialize=["T", "C", "G", "L", "x_b", "x_t"])
def _local(
    x, table, edges, T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, x_b: tl.int64, x_t: tl.int64,
    KP: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state, sum_t p^(end - t) x[t], for GROUP poles, into its edges.

    REVERSED: coef sum_t p^(t - start + 1) x[t], the cotangent that it hands to the chunk before it.
    Four positions at once, z = p^4 z + p^3 x0 + p^2 x1 + p x2 + x3, with p^4 to twice float32's precision:
    the fewer roundings, the better, since for a constant x they all go in the same direction. Reads x; 3.5 K
    FMAs an element.
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    pid = pid // blocks
    groups: tl.constexpr = KP // GROUP
    k = (pid % groups) * GROUP + tl.arange(0, GROUP).to(tl.int64)
    chunk = pid // groups
    b, g = chunk // G, chunk % G
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    pr, pi = _pair(table, 0, at, N, mask)
    p2r, p2i = _pair(table, 4, at, N, mask)
    p3r, p3i = _pair(table, 6, at, N, mask)
    p4r, p4i = _pair(table, 8, at, N, mask)
    er, ei = _pair(table, 10, at, N, mask)
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
            re, im = _three(pr, pi, p2r, p2i, p3r, p3i, rows[j], rows[j + 1], rows[j + 2])
            tr, ti = _far(p4r, p4i, er, ei, tr, ti, re + rows[j + 3][None, :], im)
    for _ in tl.range(0, n % UNROLL):
        tr, ti = _advance(pr, pi, tr, ti, tl.load(x, mask=inside, other=0.0).to(tl.float32))
        x += x_t
    if REVERSED:
        tr, ti = _times(pr, pi, tr, ti)
        cr, ci = _pair(table, 2, at, N, mask)
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


@triton.jit
def _place(pid, C, G, BLOCK: tl.constexpr):
    """A walk's channels, sequence and chunk: neighbours in the grid read neighbouring memory."""
    blocks = tl.cdiv(C, BLOCK)
    chunk = pid // blocks
    return (pid % blocks) * BLOCK + tl.arange(0, BLOCK), chunk // G, chunk % G


@triton.jit
def _sound(cr, ci, zr, zi):
    """Re sum_k c_k z_k; two sums of products, so that each product is an FMA."""
    return tl.sum(cr * zr, 0) - tl.sum(ci * zi, 0)


@triton.jit(do_not_specialize=["T", "C", "G", "L", "u_b", "u_t"])
def _forward(
    u, table, edges, y, T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, u_b: tl.int64, u_t: tl.int64,
    KP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one chunk, two positions at once: y0 = Re coef p z + h0 u0, y1 = Re coef p^2 z + h0 u1 + h1 u0.

    Reads u, writes y; 7 K FMAs an element.
    """
    c, b, g = _place(tl.program_id(0).to(tl.int64), C, G, BLOCK)
    k = tl.arange(0, KP).to(tl.int64)
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    pr, pi = _pair(table, 0, at, N, mask)
    p2r, p2i = _pair(table, 4, at, N, mask)
    er, ei = _pair(table, 12, at, N, mask)
    c1r, c1i = _pair(table, 14, at, N, mask)
    c2r, c2i = _pair(table, 16, at, N, mask)
    h0 = tl.sum(tl.load(table + 2 * N + at, mask=mask, other=0.0), 0)
    h1 = tl.sum(c1r, 0)
    zr, zi = _pair(edges + (b * G + g) * 2 * N, 0, at, N, mask)
    n = tl.minimum(L, T - g * L)
    u += b * u_b + g * L * u_t + c
    y += (b * T + g * L) * C + c
    for _ in tl.range(0, n // UNROLL):
        rows = _rows(u, u_t, inside, UNROLL)
        u += UNROLL * u_t
        for j in tl.static_range(0, UNROLL, 2):
            x0, x1 = rows[j], rows[j + 1]
            y0 = _sound(c1r, c1i, zr, zi) + h0 * x0
            y1 = _sound(c2r, c2i, zr, zi) + (h0 * x1 + h1 * x0)
            re, im = pr * x0[None, :] + x1[None, :], pi * x0[None, :]
            zr, zi = _far(p2r, p2i, er, ei, zr, zi, re, im)
            tl.store(y + j * C, y0.to(y.dtype.element_ty), mask=inside)
            tl.store(y + (j + 1) * C, y1.to(y.dtype.element_ty), mask=inside)
        y += UNROLL * C
    for _ in tl.range(0, n % UNROLL):
        row = tl.load(u, mask=inside, other=0.0).to(tl.float32)
        out = _sound(c1r, c1i, zr, zi) + h0 * row
        zr, zi = _advance(pr, pi, zr, zi, row)
        tl.store(y, out.to(y.dtype.element_ty), mask=inside)
        u += u_t
        y += C


@triton.jit(do_not_specialize=["T", "C", "G", "L", "dy_b", "dy_t"])
def _backward_input(
    dy, table, handed, du, T: tl.int64, C: tl.int64, G: tl.int64, L: tl.int64, dy_b: tl.int64, dy_t: tl.int64,
    KP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du of one chunk, walking back from what it is handed, two positions at once.

    With a[t] the conjugate of Z[t]'s gradient and x = p a[t+1]: a[t] = coef dy[t] + x, du[t] = Re sum_k
    a_k[t]. Reads dy, writes du; 7 K FMAs an element.
    """
    c, b, g = _place(tl.program_id(0).to(tl.int64), C, G, BLOCK)
    k = tl.arange(0, KP).to(tl.int64)
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    pr, pi = _pair(table, 0, at, N, mask)
    p2r, p2i = _pair(table, 4, at, N, mask)
    er, ei = _pair(table, 12, at, N, mask)
    c1r, c1i = _pair(table, 14, at, N, mask)
    c2r, c2i = _pair(table, 16, at, N, mask)
    h0 = tl.sum(tl.load(table + 2 * N + at, mask=mask, other=0.0), 0)
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
            re = c2r * x0[None, :] + c1r * x1[None, :]
            im = c2i * x0[None, :] + c1i * x1[None, :]
            xr, xi = _far(p2r, p2i, er, ei, xr, xi, re, im)
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
    poles together. Reads u and dy; 15 K FMAs an element.
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    pid = pid // blocks
    groups: tl.constexpr = KP // GROUP
    k = (pid % groups) * GROUP + tl.arange(0, GROUP).to(tl.int64)
    share = pid // groups
    inside = c < C
    mask = inside[None, :]
    N = C * KP
    at = k[:, None] * C + c[None, :]
    pr, pi = _pair(table, 0, at, N, mask)
    p2r, p2i = _pair(table, 4, at, N, mask)
    p3r, p3i = _pair(table, 6, at, N, mask)
    p4r, p4i = _pair(table, 8, at, N, mask)
    er, ei = _pair(table, 10, at, N, mask)
    fr = tl.zeros([GROUP, BLOCK], tl.float32)
    fi = tl.zeros([GROUP, BLOCK], tl.float32)
    tr = tl.zeros([GROUP, BLOCK], tl.float32)
    ti = tl.zeros([GROUP, BLOCK], tl.float32)
    for chunk in tl.range(share, CHUNKS, SHARES):
        b, g = chunk // G, chunk % G
        zr, zi = _pair(edges + chunk * 2 * N, 0, at, N, mask)
        dr = tl.zeros([GROUP, BLOCK], tl.float32)
        di = tl.zeros([GROUP, BLOCK], tl.float32)
        gr = tl.zeros([GROUP, BLOCK], tl.float32)
        gi = tl.zeros([GROUP, BLOCK], tl.float32)
        sr = tl.zeros([GROUP, BLOCK], tl.float32)
        si = tl.zeros([GROUP, BLOCK], tl.float32)
        n = tl.minimum(L, T - g * L)
        u_at = u + b * u_b + g * L * u_t + c
        dy_at = dy + b * dy_b + g * L * dy_t + c
        r0 = tl.zeros([BLOCK], tl.float32)
        r1 = tl.zeros([BLOCK], tl.float32)
        r2 = tl.zeros([BLOCK], tl.float32)
        r3 = tl.zeros([BLOCK], tl.float32)
        for _ in tl.range(0, n // UNROLL):
            rows = _rows(u_at, u_t, inside, UNROLL)
            slopes = _rows(dy_at, dy_t, inside, UNROLL)
            u_at += UNROLL * u_t
            dy_at += UNROLL * dy_t
            for j in tl.static_range(0, UNROLL, 4):
                u0, u1, u2, u3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
                s0, s1, s2, s3 = slopes[j], slopes[j + 1], slopes[j + 2], slopes[j + 3]
                r0 += s0 * u0 + s1 * u1 + s2 * u2 + s3 * u3
                r1 += s1 * u0 + s2 * u1 + s3 * u2
                r2 += s2 * u0 + s3 * u1
                r3 += s3 * u0
                vr, vi = _four(pr, pi, p2r, p2i, p3r, p3i, p4r, p4i, s0, s1, s2, s3)
                wr, wi = _four(pr, pi, p2r, p2i, p3r, p3i, p4r, p4i, s0, 2.0 * s1, 3.0 * s2, 4.0 * s3)
                gr += vr * zr - vi * zi
                gi += vr * zi + vi * zr
                sr += wr * zr - wi * zi + vr * dr - vi * di
                si += wr * zi + wi * zr + vr * di + vi * dr
                nr, ni = dr + 4.0 * zr, di + 4.0 * zi
                re, im = _three(pr, pi, p2r, p2i, p3r, p3i, 3.0 * u0, 2.0 * u1, u2)
                dr, di = _far(p4r, p4i, er, ei, nr, ni, re, im)
                re, im = _three(pr, pi, p2r, p2i, p3r, p3i, u0, u1, u2)
                zr, zi = _far(p4r, p4i, er, ei, zr, zi, re + u3[None, :], im)
        re, im = _three(pr, pi, p2r, p2i, p3r, p3i, r3, r2, r1)
        gr += re + r0[None, :]
        gi += im
        re, im = _three(pr, pi, p2r, p2i, p3r, p3i, 3.0 * r3, 2.0 * r2, r1)
        sr += re
        si += im
        for _ in tl.range(0, n % UNROLL):
            row = tl.load(u_at, mask=inside, other=0.0).to(tl.float32)
            slope = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
            zr, zi, dr, di, gr, gi, sr, si = _learn(pr, pi, zr, zi, dr, di, gr, gi, sr, si, row, slope)
            u_at += u_t
            dy_at += dy_t
        cr, ci = _pair(table, 2, at, N, mask)  # coef
        sr, si = _times(cr, ci, sr, si)
        fr += gr  # each chunk's sums for themselves first: shorter sums, smaller errors
        fi += gi
        tr += sr
        ti += si
        ar, ai = _pair(handed + chunk * 2 * N, 0, at, N, mask)
        ar, ai = _times(ar, ai, dr, di)
        tr += ar
        ti += ai
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
    """Adds the shares up, in float64 and in order, and turns them into the parameters' gradients."""
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
            gr += tl.load(partial + (4 * j) * N, mask=live, other=0.0).to(tl.float64)
            gi += tl.load(partial + (4 * j + 1) * N, mask=live, other=0.0).to(tl.float64)
            sr += tl.load(partial + (4 * j + 2) * N, mask=live, other=0.0).to(tl.float64)
            si += tl.load(partial + (4 * j + 3) * N, mask=live, other=0.0).to(tl.float64)
        partial += AHEAD * 4 * N
    at = (i % C) * K + k
    tl.store(dlog_radius + at, sr.to(tl.float32), mask=inside)
    tl.store(dtheta + at, (-si).to(tl.float32), mask=inside)
    tl.store(dcoef + 2 * at, gr.to(tl.float32), mask=inside)
    tl.store(dcoef + 2 * at + 1, (-gi).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["B", "C", "K", "u_b"])
def _step(
    u, log_radius, theta, coef, state, y, end, B: tl.int64, C: tl.int64, K: tl.int64, u_b: tl.int64,
    KP: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """One position, decoding: Z = p Z + u in float64 (so that steps don't drift) for ITEMS sequences.

    Reads and writes the states, 16 K bytes a channel.
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    inside = c < C
    mask = inside[:, None] & (k < K)[None, :]
    at = c[:, None] * K + k[None, :]
    a = tl.load(log_radius + at, mask=mask, other=0.0).to(tl.float64)
    angle = tl.load(theta + at, mask=mask, other=0.0).to(tl.float64)
    cr = tl.load(coef + 2 * at, mask=mask, other=0.0)
    ci = tl.load(coef + 2 * at + 1, mask=mask, other=0.0)
    pr, pi = _polar(a, angle, 1.0)
    first = (pid // blocks) * ITEMS
    for b in tl.range(first, tl.minimum(first + ITEMS, B)):
        row = tl.load(u + b * u_b + c, mask=inside, other=0.0).to(tl.float64)[:, None]
        if state is not None:
            zr = tl.load(state + 2 * (b * C * K + at), mask=mask, other=0.0).to(tl.float64)
            zi = tl.load(state + 2 * (b * C * K + at) + 1, mask=mask, other=0.0).to(tl.float64)
            zr, zi = _times(pr, pi, zr, zi)
            zr += row
        else:
            zr = row + tl.zeros([BLOCK, KP], tl.float64)
            zi = tl.zeros([BLOCK, KP], tl.float64)
        zr, zi = zr.to(tl.float32), zi.to(tl.float32)
        tl.store(end + 2 * (b * C * K + at), zr, mask=mask)
        tl.store(end + 2 * (b * C * K + at) + 1, zi, mask=mask)
        sound = tl.sum(cr * zr - ci * zi, 1)
        tl.store(y + b * C + c, sound.to(y.dtype.element_ty), mask=inside)


TABLE_ROWS = 18
CHUNK = 64
"""Positions of a chunk: one constant, so that torch.compile can give buffers symbolic sizes."""


class Tiling(NamedTuple):
    """How a case is cut."""

    poles: int
    """K rounded up to a power of two."""
    unroll: int
    """Positions whose inputs are read together."""
    block: int
    """Channels of a program, one a thread."""
    warps: int
    group: int
    """Poles of one program of the parameters' gradients (and of up to four times as many in `_local`)."""
    shares: int
    """Into how many parts the chunks are dealt for the parameters' gradients."""


def tiling(B: int, T: int, C: int, K: int, sms: int, lanes: int = 32) -> Tiling:
    """Programs of up to four warps; shares so that the parameters' gradients occupy `sms` multiprocessors."""
    poles = padded(K)
    warps = 1
    while warps < 4 and lanes * warps < C:
        warps *= 2
    block = lanes * warps
    group = min(poles, 2)
    programs = -(-C // block) * (poles // group)
    shares = min(B * -(-T // CHUNK), max(1, sms * 16 // warps // programs))
    return Tiling(poles, 8 if poles <= 16 else 4, block, warps, group, shares)


def padded(K: int) -> int:
    """The least power of two that is not below K."""
    return 1 << (K - 1).bit_length()
