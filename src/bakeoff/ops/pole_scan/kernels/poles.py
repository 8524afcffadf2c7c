"""The table of each pole's powers, and arithmetic on complex numbers."""

import triton
import triton.language as tl

__all__ = ["TABLE_ROWS"]

# Where in the table each complex number's two rows begin.
POLE = tl.constexpr(0)  # p, p^2, p^3, p^4
COEF = tl.constexpr(8)  # coef, coef p, coef p^2
LACK = tl.constexpr(14)  # what float32(p) and float32(p^2) lack
LEAP2 = tl.constexpr(18)  # q and e of p^2 = a + q + e, then a; see `_leap`
LEAP4 = tl.constexpr(23)  # the same of p^4
TABLE_ROWS = 28


@triton.jit
def _polar(log_radius, theta, n):
    """exp(n (log_radius + i theta))."""
    size = tl.exp(n * log_radius)
    return size * tl.cos(n * theta), size * tl.sin(n * theta)


@triton.jit
def _times(ar, ai, br, bi):
    return ar * br - ai * bi, ar * bi + ai * br


@triton.jit
def _put(table, N, re, im, inside, known):
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
    cr = tl.load(coef + 2 * at, mask=known, other=0.0).to(tl.float64)
    ci = tl.load(coef + 2 * at + 1, mask=known, other=0.0).to(tl.float64)
    _put(table + COEF * N + i, N, cr, ci, inside, known)
    for n in tl.static_range(1, 5):
        re, im = _polar(a, b, one * n)
        near_re, near_im = _put(table + (POLE + 2 * (n - 1)) * N + i, N, re, im, inside, known)
        if n <= 2:
            _put(table + (LACK + 2 * (n - 1)) * N + i, N, re - near_re, im - near_im, inside, known)
            far_re, far_im = _times(cr, ci, re, im)
            _put(table + (COEF + 2 * n) * N + i, N, far_re, far_im, inside, known)
        if n == 2 or n == 4:
            leap = table + (LEAP2 if n == 2 else LEAP4) * N + i
            a_n = tl.where((re - 1.0) * (re - 1.0) + im * im < 0.25, 1.0, 0.0).to(tl.float64)
            near_re, near_im = _put(leap, N, re - a_n, im, inside, known)
            _put(leap + 2 * N, N, re - a_n - near_re, im - near_im, inside, known)
            tl.store(leap + 4 * N, a_n.to(tl.float32), mask=inside)
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
def _powers(table, at, N, mask, COUNT: tl.constexpr):
    """p, ..., p^COUNT, real and imaginary parts in turn."""
    found = ()
    for n in tl.static_range(2 * COUNT):
        found = found + (tl.load(table + (POLE + n) * N + at, mask=mask, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def _three(p, x0, x1, x2):
    """p^3 x0 + p^2 x1 + p x2."""
    x0, x1, x2 = x0[None, :], x1[None, :], x2[None, :]
    return p[4] * x0 + (p[2] * x1 + p[0] * x2), p[5] * x0 + (p[3] * x1 + p[1] * x2)


@triton.jit
def _leap(table, row, at, N, mask):
    """What leads a state n positions on: (a, q, e) with p^n = a + q + e, a being 1 near 1 and else 0, q the
    nearest float32, e what it lacks."""
    qr, qi = _pair(table, row, at, N, mask)
    er, ei = _pair(table, row + 2, at, N, mask)
    return tl.load(table + (row + 4) * N + at, mask=mask, other=0.0), qr, qi, er, ei


@triton.jit
def _far(qr, qi, er, ei, zr, zi, re, im):
    """(q + e) z + (re, im), the large products last."""
    nr = qr * zr + (er * zr + (re - ei * zi)) - qi * zi
    return nr, qr * zi + (er * zi + (ei * zr + im)) + qi * zr


@triton.jit
def _move(leap, zr, zi, re, im):
    """p^n z + (re, im).

    States are large where p is near 1; thanks to a only one rounding is then on their scale.
    """
    nr, ni = _far(leap[1], leap[2], leap[3], leap[4], zr, zi, re, im)
    return leap[0] * zr + nr, leap[0] * zi + ni


@triton.jit
def _group(pid, C, KP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A program's channels, its GROUP of the KP poles, and the number of what it works on."""
    blocks = tl.cdiv(C, BLOCK)
    groups: tl.constexpr = KP // GROUP
    k = (pid // blocks % groups) * GROUP + tl.arange(0, GROUP).to(tl.int64)
    return (pid % blocks) * BLOCK + tl.arange(0, BLOCK), k, pid // blocks // groups


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
