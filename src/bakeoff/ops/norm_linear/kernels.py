"""norm_linear in Triton: normalisation, both ways.

Rows of x are K long and x_units * ALIGN apart; the product tells the compiler what 16-byte accesses need. A
row lies in the registers of one program, COLS >= K of them.
"""

import triton
import triton.language as tl

__all__: list[str] = []


@triton.jit(do_not_specialize=["N", "x_units", "eps"])
def _normalize(
    x, gamma, beta, h, N: tl.int64, x_units: tl.int64, eps: tl.float32,
    K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """h = n * gamma + beta of ROWS rows. Reads x, writes h: 2 * itemsize bytes an element."""
    rows, k, here = _tile(tl.program_id(0), N, K, COLS, ROWS)
    value = tl.load(x + rows * (x_units * ALIGN) + k, mask=here, other=0.0).to(tl.float32)
    n, _ = _normed(value, here, eps, K, LAYER, x.dtype.element_ty == tl.float32)
    h_value = _scaled(n, gamma, beta, k, K)
    tl.store(h + rows * K + k, h_value.to(h.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "x_units", "eps"])
def _backward(
    x, gamma, beta, dh, dx, h, partial, N: tl.int64, x_units: tl.int64, eps: tl.float32,
    K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dx = r * (g - [mean(g)] - n * mean(g * n)) with g = dh * gamma, h again for the weight's gradient, and
    partial[program] = the sums over its rows of dh * n and of dh. Results that are None aren't wanted.

    Programs walk over tiles of ROWS rows. Reads x and dh, writes dx and h: 4 * itemsize bytes an element.
    """
    dgamma = tl.zeros([ROWS, COLS], tl.float32)
    dbeta = tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows, k, here = _tile(tile, N, K, COLS, ROWS)
        value = tl.load(x + rows * (x_units * ALIGN) + k, mask=here, other=0.0).to(tl.float32)
        n, scale = _normed(value, here, eps, K, LAYER, x.dtype.element_ty == tl.float32)
        if h is not None:
            tl.store(h + rows * K + k, _scaled(n, gamma, beta, k, K).to(h.dtype.element_ty), mask=here)
        if dh is not None:
            g = tl.load(dh + rows * K + k, mask=here, other=0.0).to(tl.float32)
            if partial is not None:
                dgamma += g * n
                dbeta += g
            if dx is not None:
                g = _scaled(g, gamma, None, k, K)
                slope = g - n * (tl.sum(g * n, axis=1, keep_dims=True) * (1.0 / K))
                if LAYER:
                    slope -= tl.sum(g, axis=1, keep_dims=True) * (1.0 / K)
                tl.store(dx + rows * K + k, (slope * scale).to(dx.dtype.element_ty), mask=here)
    if partial is not None:
        k = tl.arange(0, COLS)[None, :]
        at = partial + tl.program_id(0).to(tl.int64) * (2 * K) + k
        tl.store(at, tl.sum(dgamma, axis=0, keep_dims=True), mask=k < K)
        tl.store(at + K, tl.sum(dbeta, axis=0, keep_dims=True), mask=k < K)


@triton.jit(do_not_specialize=["P"])
def _add_up(
    partial, dgamma, dbeta, P: tl.int32, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dgamma and dbeta: the sums of partial[p] [2, K] over p, always in the same order."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        p = (start + tl.arange(0, ROWS))[:, None]
        at = p.to(tl.int64) * (2 * K) + which * K + k[None, :]
        total += tl.load(partial + at, mask=(p < P) & (k < K)[None, :], other=0.0)
    found = tl.sum(total, axis=0)
    if which == 0:
        if dgamma is not None:
            tl.store(dgamma + k, found.to(dgamma.dtype.element_ty), mask=k < K)
    elif dbeta is not None:
        tl.store(dbeta + k, found.to(dbeta.dtype.element_ty), mask=k < K)


@triton.jit
def _tile(tile, N, K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = tl.arange(0, COLS)[None, :]
    return rows, k, (rows < N) & (k < K)


@triton.jit
def _normed(value, here, eps, K: tl.constexpr, LAYER: tl.constexpr, EXACT: tl.constexpr):
    # n, and 1 / sqrt(var + eps), of whole rows. EXACT: the mean's own rounding is taken off, too, as float32
    # results show it where the mean is large.
    if LAYER:
        for _ in tl.static_range(2 if EXACT else 1):
            mean = tl.sum(value, axis=1, keep_dims=True) * (1.0 / K)
            value = tl.where(here, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) * (1.0 / K) + eps)
    return value * scale, scale


@triton.jit
def _scaled(value, gamma, beta, k, K: tl.constexpr):
    if gamma is not None:
        value *= tl.load(gamma + k, mask=k < K, other=0.0).to(tl.float32)
    if beta is not None:
        value += tl.load(beta + k, mask=k < K, other=0.0).to(tl.float32)
    return value
