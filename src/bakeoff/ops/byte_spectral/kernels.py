"""byte_spectral in Triton: bytes in, D channels out.

A tile is BT positions of one row. Its strip of byte values [BT, W], gathered from the table, which stays in
L1, is multiplied with the phases [W, 2K], which every program makes for itself; features go from registers
into the product with the weight. Nothing of size W or F times the positions is ever in memory, and the
backward makes the spectra again. Real and imaginary parts are neighbours, column 2k and 2k + 1, so that one
thread holds both.

float32 operands are cut into SPLIT bfloat16 parts whose products run on tensor cores: 2 parts keep 16 bits,
for results that are rounded to 8 or 11, 3 parts keep all 24. SPLIT = 0 is a plain float32 product.

Forward: 1 byte in and D * itemsize out a position, C * (4 W K + 2 K D) FLOPs. Backward: dout twice in.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["Tiling", "backward_tiling", "block", "constants", "forward_tiling", "span"]


@triton.jit
def _phases(omega, W: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr):
    """cos(omega[k] m) in column 2k, -sin(omega[k] m) in column 2k + 1, [BW, BJ], to float32's last bits.

    Angles are counted in turns. Of a frequency the whole turns are left out, in float64; m times its first 16
    bits is exact in float32 (m < 128), and so is what remains of that beyond whole quarters; the other bits
    then add little.
    """
    m = tl.arange(0, BW)[:, None].to(tl.float32)
    k = tl.arange(0, BJ // 2)[None, :]
    if omega is None:  # the grid of the transform
        turns = k.to(tl.float64) * (1.0 / W)
    else:
        turns = tl.load(omega + k, mask=k < K, other=0.0).to(tl.float64) * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    coarse = tl.floor(turns * 65536.0 + 0.5) * (1.0 / 65536.0)
    fine = (turns - coarse).to(tl.float32)
    whole = m * coarse.to(tl.float32)
    shifted = whole * 4.0 + 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    quarters = shifted - 12582912.0
    angle = (whole - quarters * 0.25 + m * fine) * 6.283185307179586
    quadrant = shifted.to(tl.int32, bitcast=True)
    z = angle * angle
    sine = angle * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880)))))
    cosine = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 - z * (1 / 3628800)))))
    odd = (quadrant & 1) != 0
    re = tl.where(odd, sine, cosine)
    im = tl.where(odd, cosine, sine)
    re = tl.where(((quadrant + 1) & 2) != 0, -re, re)
    im = tl.where((quadrant & 2) != 0, im, -im)
    return tl.reshape(tl.join(re, im), [BW, BJ])


@triton.jit
def _dot(a, b, acc, SPLIT: tl.constexpr):
    """acc + a @ b; float32 operands in SPLIT bfloat16 parts, small products first."""
    if a.dtype != tl.float32:
        acc = tl.dot(a, b, acc=acc)
    elif SPLIT == 0:
        acc = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        a0 = a.to(tl.bfloat16)
        b0 = b.to(tl.bfloat16)
        a -= a0.to(tl.float32)
        b -= b0.to(tl.float32)
        a1 = a.to(tl.bfloat16)
        b1 = b.to(tl.bfloat16)
        if SPLIT == 3:
            a2 = (a - a1.to(tl.float32)).to(tl.bfloat16)
            b2 = (b - b1.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(a2, b0, acc=acc)
            acc = tl.dot(a0, b2, acc=acc)
            acc = tl.dot(a1, b1, acc=acc)
        acc = tl.dot(a1, b0, acc=acc)
        acc = tl.dot(a0, b1, acc=acc)
        acc = tl.dot(a0, b0, acc=acc)
    return acc


@triton.jit
def _window(window, W: tl.constexpr, BW: tl.constexpr):
    m = tl.arange(0, BW)
    return tl.load(window + m, mask=m < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _tile(tile, ids, T, row, BT: tl.constexpr, BW: tl.constexpr):
    """Where the tile's first byte is, its first output row, how many bytes precede it (up to BW) and how many
    it has. Everything within a tile is then a small distance from its start, in 32 bits."""
    b = tile // tl.cdiv(T, BT)
    start = (tile % tl.cdiv(T, BT)) * BT
    before = tl.minimum(start, BW).to(tl.int32)
    return ids + b * row + start, b * T + start, before, tl.minimum(T - start, BT).to(tl.int32)


@triton.jit
def _values(ids, table, before, count, C: tl.constexpr, BW: tl.constexpr, SPAN: tl.constexpr):
    """What the tile's bytes and the BW before it stand for, [SPAN], from i = -BW on; 0 where there are none.

    `ids` points to the tile's first byte, `table` to the column that is wanted.
    """
    i = tl.arange(0, SPAN) - BW
    inside = (i >= -before) & (i < count)
    byte = tl.load(ids + i, mask=inside, other=0).to(tl.int32)
    return tl.load(table + byte * C, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _strip(values, count, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """The value of the byte at i - m, [BT, BW]; 0 from m = W and from i = count on."""
    i = tl.arange(0, BT)[:, None]
    m = tl.arange(0, BW)[None, :]
    strip = tl.gather(values, tl.reshape(i - m + BW, [BT * BW]), 0)
    return tl.where((m < W) & (i < count), tl.reshape(strip, [BT, BW]), 0.0)


@triton.jit
def _spectrum(value, phases, BT: tl.constexpr, BJ: tl.constexpr, SPLIT: tl.constexpr):
    return _dot(value, phases, tl.zeros([BT, BJ], tl.float32), SPLIT)


@triton.jit
def _parts(spectrum, ROWS: tl.constexpr, BJ: tl.constexpr):
    """Real and imaginary parts of [ROWS, BJ]."""
    return tl.split(tl.reshape(spectrum, [ROWS, BJ // 2, 2]))


@triton.jit
def _features(spectrum, BT: tl.constexpr, BJ: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr):
    """The spectrum itself, its magnitude, or the logarithm of 1 + that."""
    if FEATURES == "complex":
        found = spectrum
    else:
        re, im = _parts(spectrum, BT, BJ)
        power = re * re + im * im
        found = tl.div_rn(power, tl.sqrt_rn(power + EPS) + EPS**0.5)
        if FEATURES == "log":  # a series where 1 + magnitude would drop digits
            series = found * (1 - found * (0.5 - found * (1 / 3)))
            found = tl.where(found < 1e-3, series, tl.log(1.0 + found.to(tl.float64)).to(tl.float32))
    return found


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


@triton.jit(do_not_specialize=["T", "row"])
def _forward(
    ids, table, window, omega, weight, bias, out, T: tl.int64, row: tl.int64,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BJ: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    SPAN: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BT positions (axis 0) times BD channels (axis 1) a program; without a weight all features.

    F is the number of features of one column of the table.
    """
    ids, first, before, count = _tile(tl.program_id(0).to(tl.int64), ids, T, row, BT, BW)
    i = tl.arange(0, BT)
    f = tl.arange(0, BF)
    phases = _phases(omega, W, K, BW, BJ)
    scale = _window(window, W, BW)
    if weight is not None:
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        total = tl.zeros([BT, BD], tl.float32)
    for c in range(C):
        value = _strip(_values(ids, table + c, before, count, C, BW, SPAN), count, W, BT, BW) * scale
        found = _features(_spectrum(value, phases, BT, BJ, SPLIT), BT, BJ, FEATURES, EPS)
        if weight is None:
            at = out + first * (C * F) + c * F + (i[:, None] * (C * F) + f[None, :])
            tl.store(at, found.to(out.dtype.element_ty), mask=(i < count)[:, None] & (f < F)[None, :])
        else:
            at = weight + c * F * D + (f[:, None] * D + d[None, :])
            rows = tl.load(at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)
            total = _dot(found.to(rows.dtype), rows, total, SPLIT)
    if weight is not None:
        if bias is not None:
            total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        at = out + first * D + (i[:, None] * D + d[None, :])
        tl.store(at, total.to(out.dtype.element_ty), mask=(i < count)[:, None] & (d < D)[None, :])


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
            df = _dot(grad, tl.trans(rows), df, SPLIT)
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

    A product of two one-hot matrices, so that nothing is added in an unknown order.
    """
    s = tl.arange(0, SPAN) - BW
    byte = tl.load(ids + s, mask=(s >= -before) & (s < count), other=0).to(tl.int32)
    half = tl.arange(0, 16)
    high = (byte >> 4)[None, :] == half[:, None]
    low = tl.where((byte & 15)[:, None] == half[None, :], sums[:, None], 0.0)
    if SPLIT == 0:
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
        total = _dot(tl.trans(found.to(grad.dtype)), grad, total, SPLIT)
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


class Tiling(NamedTuple):
    """How a kernel cuts its work: positions and channels of a tile, warps, programs along the positions."""

    positions: int
    channels: int
    warps: int
    programs: int = 2**31 - 1


def span(positions: int, W: int) -> int:
    """Bytes that a tile of `positions` sees, as a power of two."""
    return triton.next_power_of_2(positions + block(W))


def block(size: int) -> int:
    """The power of two that holds `size`, and is enough for a tensor core's operand."""
    return max(16, triton.next_power_of_2(size))


def constants(
    C: int, W: int, K: int, D: int, features: str, dtype: torch.dtype, tensor_cores: bool
) -> dict[str, int | str]:
    """The constants that all kernels share, for results of `dtype`."""
    whole = features == "complex"
    BJ = max(32, 2 * triton.next_power_of_2(K))
    split = 0 if not tensor_cores else 2 if dtype == torch.bfloat16 else 3
    return {
        "C": C, "W": W, "K": K, "F": 2 * K if whole else K, "D": D, "BW": block(W), "BJ": BJ,
        "BF": BJ if whole else BJ // 2, "FEATURES": features, "SPLIT": split,
    }  # fmt: skip


def _positions(split: int, major: int) -> int:
    # Three parts of every product ask for more tensor memory than a multiprocessor of generation 10 has.
    return 32 if split == 3 and major >= 10 else 64


@lru_cache(maxsize=4096)
def forward_tiling(D: int, split: int, major: int) -> Tiling:
    """The forward's tiling for D channels on a GPU of generation `major`.

    Measured on one H100 SXM (us, 16x1024, W 64, K 32, D 256, bf16, an earlier form of the phases): 64
    positions and 256 channels with 4 warps 9.4, with 8 9.5; 128 positions 9.2; 128 channels 10.2.
    """
    channels = min(256 if split == 2 else 128, block(D))
    return Tiling(_positions(split, major), channels, 8 if D > 128 else 4)


@lru_cache(maxsize=4096)
def backward_tiling(D: int, split: int, sms: int, major: int) -> tuple[Tiling, Tiling]:
    """The tilings of `_backward_signal` and `_backward_weight` on `sms` multiprocessors, generation `major`.

    Measured as above, an earlier form of the diagonals: table, window and omega in one kernel of 64
    positions and 4 warps 26.1, table and window apart from omega 20.0 + 10.7; with 8 warps 38.4, with 32
    positions 54.0, with blocks of 256 channels 55.4.
    """
    signal = Tiling(_positions(split, major), min(64, block(D)), 4, 2 * sms)
    if split == 2 and D >= 256:
        return signal, Tiling(128, 256, 8, ROWS)
    return signal, Tiling(64, min(128 if split == 2 else 64, block(D)), 4, ROWS)


STAGES = 2
"""Of the loads in the loops over positions and channels, which turn a few times."""

ROWS, COLUMNS, SUM_WARPS = 128, 32, 8
"""The tile of `_sum_partials`."""
