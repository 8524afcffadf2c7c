"""norm_linear in Triton: normalisation alone, both ways, and matrix products that normalise.

Rows of x are K long and x_units * ALIGN apart; the product tells the compiler what 16-byte accesses need. A
row that is normalised alone lies in the registers of one program, COLS >= K of them.
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
def _statistics(
    x, stats, N: tl.int64, x_units: tl.int64, eps: tl.float32,
    K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """stats[0] = 1 / sqrt(var + eps) of each row, stats[1] = its mean (0 without LAYER). Reads x."""
    rows, k, here = _tile(tl.program_id(0), N, K, COLS, ROWS)
    value = tl.load(x + rows * (x_units * ALIGN) + k, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1, keep_dims=True) * (1.0 / K) if LAYER else tl.zeros([ROWS, 1], tl.float32)
    _, scale = _normed(value, here, eps, K, LAYER, False)
    tl.store(stats + rows, scale, mask=rows < N)
    tl.store(stats + N + rows, mean, mask=rows < N)


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


@triton.jit(do_not_specialize=["M", "weight_units"])
def _scale_weight(
    weight, bias, gamma, beta, scaled, sums, M: tl.int64, weight_units: tl.int64,
    K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """scaled = weight * gamma; sums[0] = its rows' sums as rounded, sums[1] = weight beta + bias."""
    rows, k, here = _tile(tl.program_id(0), M, K, COLS, ROWS)
    value = tl.load(weight + rows * (weight_units * ALIGN) + k, mask=here, other=0.0).to(tl.float32)
    rounded = _scaled(value, gamma, None, k, K).to(scaled.dtype.element_ty)
    tl.store(scaled + rows * K + k, rounded, mask=here)
    tl.store(sums + rows, tl.sum(rounded.to(tl.float32), axis=1, keep_dims=True), mask=rows < M)
    constant = tl.zeros([ROWS, 1], tl.float32)
    if beta is not None:
        constant += tl.sum(value * tl.load(beta + k, mask=k < K, other=0.0).to(tl.float32), 1, keep_dims=True)
    if bias is not None:
        constant += tl.load(bias + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(sums + M + rows, constant, mask=rows < M)


@triton.jit(do_not_specialize=["N", "M", "x_units", "weight_units", "eps"])
def _prologue(
    x, weight, bias, gamma, beta, y,
    N: tl.int32, M: tl.int32, x_units: tl.int64, weight_units: tl.int64, eps: tl.float32,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LAYER: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """y in tiles of ROWS x COLS; x is normalised piece by piece on its way into the product.

    A program first goes over its rows for their statistics; the product then reads them from a cache. 2 N M K
    FLOPs, and some 6 N K for each COLS columns of y.
    """
    n, m, row_live, col_live = _product_tile(N, M, ROWS, COLS, GROUP)
    x += n.to(tl.int64)[:, None] * (x_units * ALIGN)
    weight += m.to(tl.int64)[:, None] * (weight_units * ALIGN)
    mean, scale = _row_statistics(x, row_live, eps, K, ROWS, BLOCK, LAYER)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        a = tl.load(x + k, mask=row_live & (k < K), other=0.0).to(tl.float32)
        b = tl.load(weight + k, mask=col_live & (k < K), other=0.0)
        h = tl.where(k < K, _scaled((a - mean) * scale, gamma, beta, k, K), 0.0)
        total = tl.dot(h.to(x.dtype.element_ty), b.T, total)
    if bias is not None:
        total += tl.load(bias + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    at = n.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=row_live & (m < M)[None, :])


@triton.jit(do_not_specialize=["N", "M", "x_units"])
def _epilogue(
    x, scaled, stats, sums, y, N: tl.int32, M: tl.int32, x_units: tl.int64,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LAYER: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """y = r * (x scaled' - mean * sums[0]) + sums[1] in tiles of ROWS x COLS: a plain matrix product whose
    result is corrected in registers. 2 N M K FLOPs."""
    n, m, row_live, col_live = _product_tile(N, M, ROWS, COLS, GROUP)
    x += n.to(tl.int64)[:, None] * (x_units * ALIGN)
    scaled += m.to(tl.int64)[:, None] * K
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        a = tl.load(x + k, mask=row_live & (k < K), other=0.0)
        b = tl.load(scaled + k, mask=col_live & (k < K), other=0.0)
        total = tl.dot(a, b.T, total)
    here = m < M
    if LAYER:
        mean = tl.load(stats + N + n, mask=n < N, other=0.0)
        total -= mean[:, None] * tl.load(sums + m, mask=here, other=0.0)[None, :]
    total *= tl.load(stats + n, mask=n < N, other=0.0)[:, None]
    total += tl.load(sums + M + m, mask=here, other=0.0)[None, :]
    at = n.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=row_live & here[None, :])


@triton.jit
def _row_statistics(
    x, live, eps, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr
):
    # mean and 1 / sqrt(var + eps) [ROWS, 1], piece by piece; pieces' variances are joined by Chan's rule, as
    # a difference of large sums would lose them.
    mean = tl.zeros([ROWS, 1], tl.float32)
    square = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + k, mask=live & (k < K), other=0.0).to(tl.float32)
        if LAYER:
            count = tl.minimum(K - start, BLOCK).to(tl.float32)
            own = tl.sum(value, axis=1, keep_dims=True) / count
            apart = tl.where(k < K, value - own, 0.0)
            share = count / (start + count)
            off = own - mean
            square += tl.sum(apart * apart, axis=1, keep_dims=True) + off * off * (share * start)
            mean += off * share
        else:
            square += tl.sum(value * value, axis=1, keep_dims=True)
    return mean, tl.rsqrt(square * (1.0 / K) + eps)


@triton.jit
def _product_tile(N, M, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    # The program's rows and columns of y, which exist; programs near in number share rows and columns.
    down = tl.cdiv(N, ROWS)
    across = tl.cdiv(M, COLS)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    place = tl.program_id(0) - group * (GROUP * across)
    n = (group * GROUP + place % height) * ROWS + tl.arange(0, ROWS)
    m = (place // height) * COLS + tl.arange(0, COLS)
    return n, m, (n < N)[:, None], (m < M)[:, None]


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
