"""Partial gradients, and their sum."""

import triton
import triton.language as tl

from bakeoff.ops.byte_spectral.kernels.spectrum import (
    _add,
    _dot,
    _features,
    _parts,
    _phases,
    _ratio,
    _root,
    _spectrum,
    _strip,
    _tile,
    _values,
    _window,
)


@triton.jit
def _to_features(
    dout, weight, dweight, dbias, spectrum, first, count, c, again,
    C: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    SIGNAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Gradient of one column's features, [BT, BF]: dout @ weight', or dout itself, from row `first` on.

    While dout is here, the tile's part of weight's gradient, features' @ dout, and of bias's go to `dweight`
    and `dbias`, on top of what is there where `again`.
    """
    i = tl.arange(0, BT)[:, None]
    f = tl.arange(0, BF)
    if weight is None:
        at = dout + first * (C * F) + c * F + (i * (C * F) + f[None, :])
        df = tl.load(at, mask=(i < count) & (f < F)[None, :], other=0.0).to(tl.float32)
    else:
        dout += first * D
        weight += c * F * D
        dweight += c * F * D
        found = _features(spectrum, BT, BJ, FEATURES, EPS, SPLIT)
        df = tl.zeros([BT, BF], tl.float32)
        if WEIGHT or BIAS:
            tl.debug_barrier()  # behind it are sums of the tile before, whatever thread stored them
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            grad = tl.load(dout + (i * D + d[None, :]), mask=(i < count) & (d < D)[None, :], other=0.0)
            at = f[:, None] * D + d[None, :]
            inside = (f < F)[:, None] & (d < D)[None, :]
            if SIGNAL:
                df = _add(grad, tl.trans(tl.load(weight + at, mask=inside, other=0.0)), df, SPLIT)
            if WEIGHT:
                total = tl.load(dweight + at, mask=inside & again, other=0.0)
                tl.store(dweight + at, _add(tl.trans(found.to(grad.dtype)), grad, total, SPLIT), mask=inside)
            if BIAS:
                total = tl.load(dbias + d, mask=(d < D) & again, other=0.0)
                tl.store(dbias + d, total + tl.sum(grad.to(tl.float32), axis=0), mask=(d < D) & (c == 0))
    return df


@triton.jit
def _from_features(
    spectrum, df, BT: tl.constexpr, BJ: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradient of the spectrum from that of its features."""
    if FEATURES == "complex":
        dx = df
    else:
        re, im = _parts(spectrum, BT, BJ)
        power = re * re + im * im
        root = _root(power + EPS, SPLIT)
        if FEATURES == "log":
            df = df / (1 + _ratio(power, root + EPS**0.5, SPLIT))
        df = _ratio(df, root, SPLIT)
        dx = tl.reshape(tl.join(df * re, df * im), [BT, BJ])
    return dx


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


@triton.jit(do_not_specialize=["tiles", "T", "row", "columns", "bias_at", "signal_at"])
def _backward(
    ids, table, window, omega, weight, dout, partial,
    tiles: tl.int64, T: tl.int64, row: tl.int64, columns: tl.int64, bias_at: tl.int64, signal_at: tl.int64,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPAN: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr, WINDOW: tl.constexpr, OMEGA: tl.constexpr,
):  # fmt: skip
    """Partial gradients of tiles pid, pid + programs, and so on: of those that the flags ask for.

    Row pid of `partial`: [C * F, D] of the weight, [D] of the bias from column `bias_at` on, and from
    `signal_at` on [256, C] of the table, [W] of the window, [K] of omega.
    """
    phases = _phases(omega, W, K, BW, BJ)
    scale = _window(window, W, BW)
    partial += tl.program_id(0).to(tl.int64) * columns
    signal = partial + signal_at
    dwindow = tl.zeros([BW], tl.float32)
    domega = tl.zeros([BJ // 2], tl.float32)
    m = tl.arange(0, BW)
    for c in range(C):
        dtable = tl.zeros([16, 16], tl.float32)
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            at, first, before, count = _tile(tile, ids, T, row, BT, BW)
            values = _values(at, table + c, before, count, C, BW, SPAN)
            strip = _strip(values, count, W, BT, BW) * scale
            spectrum = _spectrum(strip, phases, BT, BJ, SPLIT)
            df = _to_features(
                dout, weight, partial, partial + bias_at, spectrum,
                first, count, c, tile >= tl.num_programs(0),
                C, F, D, BT, BJ, BF, BD, FEATURES, EPS, SPLIT, TABLE or WINDOW or OMEGA, WEIGHT, BIAS,
            )  # fmt: skip
            if TABLE or WINDOW or OMEGA:
                dx = _from_features(spectrum, df, BT, BJ, FEATURES, EPS, SPLIT)
            if OMEGA:  # d exp(-i omega m) / d omega = -i m exp(-i omega m)
                re, im = _parts(_spectrum(strip * m.to(tl.float32)[None, :], phases, BT, BJ, SPLIT), BT, BJ)
                dre, dim = _parts(dx, BT, BJ)
                domega += tl.sum(dre * im - dim * re, axis=0)
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
            tl.store(signal + byte * C + c, dtable)
    if TABLE:
        signal += 256 * C
    if WINDOW:
        tl.store(signal + m, dwindow, mask=m < W)
        signal += W
    if OMEGA:
        k = tl.arange(0, BJ // 2)
        tl.store(signal + k, domega, mask=k < K)


@triton.jit(do_not_specialize=["columns", "rows", "bias_at", "table_at", "window_at", "omega_at"])
def _sum_partials(
    partial, dweight, dbias, dtable, dwindow, domega,
    columns: tl.int64, rows: tl.int32,
    bias_at: tl.int64, table_at: tl.int64, window_at: tl.int64, omega_at: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of `partial`, always in the same order; a block of columns a program.

    The weight's columns come first; `bias_at` and so on say where those of each other gradient begin.
    """
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        mask = (p < rows) & (at < columns)[None, :]
        total += tl.load(partial + p.to(tl.int64) * columns + at[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    _put(dweight, sums, at, 0, bias_at)
    _put(dbias, sums, at, bias_at, table_at)
    _put(dtable, sums, at, table_at, window_at)
    _put(dwindow, sums, at, window_at, omega_at)
    _put(domega, sums, at, omega_at, columns)


@triton.jit
def _put(gradient, sums, at, begin, end):
    """Stores the sums of the columns from `begin` to `end` of those at `at`."""
    if gradient is not None:
        inside = (at >= begin) & (at < end)
        tl.store(gradient + at - begin, sums.to(gradient.dtype.element_ty), mask=inside)
