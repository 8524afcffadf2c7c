"""Partial gradients, and their sum."""

import triton
import triton.language as tl

from bakeoff.ops.byte_spectral.kernels.spectrum import (
    _add,
    _dot,
    _features,
    _parts,
    _phases,
    _spectrum,
    _strip,
    _tile,
    _values,
    _window,
)


@triton.jit
def _spectrum_gradient(
    values, scale, phases, df, count,
    W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr,
    FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradient of the spectrum, which is made again for it, from that of the features."""
    if FEATURES == "complex":
        dx = df
    else:
        re, im = _parts(_spectrum(_strip(values, count, W, BT, BW) * scale, phases, BT, BJ, SPLIT), BT, BJ)
        power = re * re + im * im
        root = tl.sqrt_rn(power + EPS)
        if FEATURES == "log":
            df = df / (1 + tl.div_rn(power, root + EPS**0.5))
        df = tl.div_rn(df, root)
        dx = tl.reshape(tl.join(df * re, df * im), [BT, BJ])
    return dx


@triton.jit
def _feature_gradient(
    dout, weight, first, count, c,
    C: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradient of one column's features, [BT, BF]: dout @ weight', or dout itself, from row `first` on."""
    i = tl.arange(0, BT)
    f = tl.arange(0, BF)
    if weight is None:
        at = dout + first * (C * F) + c * F + (i[:, None] * (C * F) + f[None, :])
        df = tl.load(at, mask=(i < count)[:, None] & (f < F)[None, :], other=0.0).to(tl.float32)
    else:
        dout += first * D
        weight += c * F * D
        df = tl.zeros([BT, BF], tl.float32)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            at = dout + (i[:, None] * D + d[None, :])
            grad = tl.load(at, mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)
            at = weight + (f[:, None] * D + d[None, :])
            rows = tl.load(at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)
            df = _add(grad, tl.trans(rows), df, SPLIT)
    return df


@triton.jit
def _diagonals(grad, before, count, BT: tl.constexpr, BW: tl.constexpr, SPAN: tl.constexpr):
    """grad[s + m, m] in row s + BW, [SPAN, BW]: what each byte the tile sees gets from each distance m."""
    s = tl.arange(0, SPAN)[:, None] - BW
    of = s + tl.arange(0, BW)[None, :]
    good = (of >= 0) & (of < count) & (s >= -before)
    return tl.where(good, tl.gather(grad, tl.where(good, of, 0), 0), 0.0)


@triton.jit
def _by_byte(total, ids, sums, before, count, BW: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr):
    """`total` [16, 16] plus `sums` [SPAN] by the value of their byte: its high half by its low half.

    A product of two one-hot matrices, so that nothing is added in an unknown order. Tensor cores round sums
    towards zero: float32 data, in 3 parts, do without them.
    """
    s = tl.arange(0, SPAN) - BW
    byte = tl.load(ids + s, mask=(s >= -before) & (s < count), other=0).to(tl.int32)
    half = tl.arange(0, 16)
    high = (byte >> 4)[None, :] == half[:, None]
    low = tl.where((byte & 15)[:, None] == half[None, :], sums[:, None], 0.0)
    if SPLIT == 0 or SPLIT == 3:
        total = tl.dot(high.to(tl.float32), low, acc=total, input_precision="ieee")
    else:
        high = high.to(tl.bfloat16)  # exact
        for _ in tl.static_range(SPLIT):
            part = low.to(tl.bfloat16)
            total = tl.dot(high, part, acc=total)
            low -= part.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tiles", "T", "row", "columns", "first"])
def _backward_signal(
    ids, table, window, omega, weight, dout, partial,
    tiles: tl.int64, T: tl.int64, row: tl.int64, columns: tl.int64, first: tl.int64,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPAN: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    TABLE: tl.constexpr, WINDOW: tl.constexpr, OMEGA: tl.constexpr,
):  # fmt: skip
    """Partial gradients of table, window and omega, as the flags ask, of tiles pid, pid + programs, ...

    Row pid of `partial`, from column `first` on: [256, C] of the table, [W] of the window, [K] of omega.
    """
    phases = _phases(omega, W, K, BW, BJ)
    scale = _window(window, W, BW)
    partial += tl.program_id(0).to(tl.int64) * columns + first
    dwindow = tl.zeros([BW], tl.float32)
    dphases = tl.zeros([BW, BJ], tl.float32)
    for c in range(C):
        dtable = tl.zeros([16, 16], tl.float32)
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            at, row_of, before, count = _tile(tile, ids, T, row, BT, BW)
            df = _feature_gradient(dout, weight, row_of, count, c, C, F, D, BT, BF, BD, SPLIT)
            values = _values(at, table + c, before, count, C, BW, SPAN)
            dx = _spectrum_gradient(values, scale, phases, df, count, W, BT, BW, BJ, FEATURES, EPS, SPLIT)
            if OMEGA:
                dphases = _dot(tl.trans(_strip(values, count, W, BT, BW) * scale), dx, dphases, SPLIT)
            if TABLE or WINDOW:
                grad = _dot(dx, tl.trans(phases), tl.zeros([BT, BW], tl.float32), SPLIT)
                grad = _diagonals(grad, before, count, BT, BW, SPAN)
            if WINDOW:
                dwindow += tl.sum(grad * values[:, None], axis=0)
            if TABLE:
                sums = tl.sum(grad * scale, axis=1)
                dtable = _by_byte(dtable, at, sums, before, count, BW, SPAN, SPLIT)
        if TABLE:
            byte = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(partial + byte * C + c, dtable)
    m = tl.arange(0, BW)
    if TABLE:
        partial += 256 * C
    if WINDOW:
        tl.store(partial + m, dwindow, mask=m < W)
        partial += W
    if OMEGA:
        re, im = _parts(_phases(omega, W, K, BW, BJ), BW, BJ)  # made again rather than held all the while
        dre, dim = _parts(dphases, BW, BJ)
        k = tl.arange(0, BJ // 2)
        tl.store(partial + k, tl.sum((dre * im - dim * re) * m.to(tl.float32)[:, None], axis=0), mask=k < K)


@triton.jit(do_not_specialize=["tiles", "T", "row", "columns"])
def _backward_weight(
    ids, table, window, omega, dout, partial,
    tiles: tl.int64, T: tl.int64, row: tl.int64, columns: tl.int64,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPAN: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Partial gradients of weight and bias, of tiles pid, pid + programs, ... (axis 0), for BD channels
    (axis 1) and one column of the table (axis 2) a program.

    Row pid of `partial`: [C * F, D] of the weight, then [D] of the bias.
    """
    c = tl.program_id(2)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    f = tl.arange(0, BF)
    phases = _phases(omega, W, K, BW, BJ)
    scale = _window(window, W, BW)
    total = tl.zeros([BF, BD], tl.float32)
    if BIAS:
        dbias = tl.zeros([BD], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        at, row_of, before, count = _tile(tile, ids, T, row, BT, BW)
        i = tl.arange(0, BT)
        mask = (i < count)[:, None] & (d < D)[None, :]
        grad = tl.load(dout + row_of * D + (i[:, None] * D + d[None, :]), mask=mask, other=0.0)
        value = _strip(_values(at, table + c, before, count, C, BW, SPAN), count, W, BT, BW) * scale
        found = _features(_spectrum(value, phases, BT, BJ, SPLIT), BT, BJ, FEATURES, EPS)
        total = _add(tl.trans(found.to(grad.dtype)), grad, total, SPLIT)
        if BIAS:
            dbias += tl.sum(grad.to(tl.float32), axis=0)
    partial += tl.program_id(0).to(tl.int64) * columns
    at = partial + c * F * D + (f[:, None] * D + d[None, :])
    tl.store(at, total, mask=(f < F)[:, None] & (d < D)[None, :])
    if BIAS:
        tl.store(partial + C * F * D + d, dbias, mask=(d < D) & (c == 0))


@triton.jit(do_not_specialize=["columns", "split", "above", "below", "a", "b", "c", "d"])
def _sum_partials(
    partial, dweight, dbias, dtable, dwindow, domega,
    columns: tl.int64, split: tl.int64, above: tl.int32, below: tl.int32,
    a: tl.int64, b: tl.int64, c: tl.int64, d: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of `partial`, always in the same order; a block of columns a program.

    Columns before `split` have `above` rows, the others `below`; a, b, c, d are where the bias's, the
    table's, the window's and omega's columns begin.
    """
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.where(at < split, above, below)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, tl.max(rows, axis=0), ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        mask = (p < rows[None, :]) & (at < columns)[None, :]
        total += tl.load(partial + p.to(tl.int64) * columns + at[None, :], mask=mask, other=0.0)
    found = tl.sum(total, axis=0)
    if dweight is not None:
        tl.store(dweight + at, found.to(dweight.dtype.element_ty), mask=at < a)
    if dbias is not None:
        tl.store(dbias + at - a, found.to(dbias.dtype.element_ty), mask=(at >= a) & (at < b))
    if dtable is not None:
        tl.store(dtable + at - b, found.to(dtable.dtype.element_ty), mask=(at >= b) & (at < c))
    if dwindow is not None:
        tl.store(dwindow + at - c, found.to(dwindow.dtype.element_ty), mask=(at >= c) & (at < d))
    if domega is not None:
        tl.store(domega + at - d, found.to(domega.dtype.element_ty), mask=(at >= d) & (at < columns))
