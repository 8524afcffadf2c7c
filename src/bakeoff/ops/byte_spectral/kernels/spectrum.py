"""From bytes to spectra and their features, a tile at a time."""

import triton
import triton.language as tl


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
def _add(a, b, acc, SPLIT: tl.constexpr):
    """acc + a @ b, a term of a long sum.

    Tensor cores round sums towards zero: of float32 results the product is kept apart and subtracted, as an
    addition would be taken into it.
    """
    if a.dtype == tl.float32 and SPLIT == 3:
        acc -= _dot(a, -b, tl.zeros(acc.shape, tl.float32), SPLIT)
    else:
        acc = _dot(a, b, acc, SPLIT)
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
def _root(x, SPLIT: tl.constexpr):
    """sqrt(x), as exactly as SPLIT parts are."""
    return tl.sqrt(x) if SPLIT == 2 else tl.sqrt_rn(x)


@triton.jit
def _ratio(a, b, SPLIT: tl.constexpr):
    """a / b, as exactly as SPLIT parts are."""
    return a / b if SPLIT == 2 else tl.div_rn(a, b)


@triton.jit
def _log_of_more(x, SPLIT: tl.constexpr):
    """log(1 + x), as exactly as SPLIT parts are."""
    return tl.log(1.0 + x) if SPLIT == 2 else tl.log(1.0 + x.to(tl.float64)).to(tl.float32)


@triton.jit
def _features(
    spectrum, BT: tl.constexpr, BJ: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The spectrum itself, its magnitude, or the logarithm of 1 + that."""
    if FEATURES == "complex":
        found = spectrum
    else:
        re, im = _parts(spectrum, BT, BJ)
        power = re * re + im * im
        found = _ratio(power, _root(power + EPS, SPLIT) + EPS**0.5, SPLIT)
        if FEATURES == "log":  # a series where 1 + magnitude would drop digits
            series = found * (1 - found * (0.5 - found * (1 / 3)))
            found = tl.where(found < 1e-3, series, _log_of_more(found, SPLIT))
    return found
