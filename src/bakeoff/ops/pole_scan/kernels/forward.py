"""y from the chunks' first states, and one position alone."""

import triton
import triton.language as tl

from bakeoff.ops.pole_scan.kernels.poles import (
    COEF,
    LACK,
    POLE,
    _advance,
    _far,
    _pair,
    _place,
    _polar,
    _rows,
    _sound,
    _times,
)


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
    pr, pi = _pair(table, POLE, at, N, mask)
    p2r, p2i = _pair(table, POLE + 2, at, N, mask)
    er, ei = _pair(table, LACK + 2, at, N, mask)
    c1r, c1i = _pair(table, COEF + 2, at, N, mask)
    c2r, c2i = _pair(table, COEF + 4, at, N, mask)
    h0 = tl.sum(tl.load(table + COEF * N + at, mask=mask, other=0.0), 0)
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
