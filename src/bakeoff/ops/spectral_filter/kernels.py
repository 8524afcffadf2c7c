"""The gradient of the weights, from sums in the order in which FFTs on the chip leave spectra."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["C", "K", "splits"])
def _fold(
    sums, dw, C, K, splits, T: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr,
    R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    FREQUENCIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dw[f, c] = (P[c, f] + conj(P[c, T - f])) / T, half of it where the two are one; P the sum over splits.

    Of two real rows a, b and dy's transformed as one, P = conj(A + i B) (DA + i DB): what is meant,
    conj(A) DA + conj(B) DB, and i (conj(A) DB - conj(B) DA), which cancels. Of one row alone P[T - f] is
    conj(P[f]), and the first PARTS parts are all there is.
    """
    f = tl.program_id(0) * FREQUENCIES + tl.arange(0, FREQUENCIES)
    c = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    mirrored = tl.where(f == 0, 0, T - f)
    real = f == mirrored
    sign = 1.0
    if PARTS < SEGMENTS:
        absent = f % SEGMENTS >= PARTS
        f_here = tl.where(absent, mirrored, f)
        sign = tl.where(absent, -1.0, 1.0)[:, None]
    else:
        f_here = f
    here = _position(f_here, SEGMENTS, R1, R2, R3)[:, None]
    mirror = _position(mirrored, SEGMENTS, R1, R2, R3)[:, None]
    inside = (f < K)[:, None] & (c < C)[None, :]
    re = tl.zeros((FREQUENCIES, CHANNELS), tl.float32)
    im = tl.zeros((FREQUENCIES, CHANNELS), tl.float32)
    for split in range(splits):
        row = sums + (split * C + c)[None, :] * (2 * PARTS * (R1 * R2 * R3))
        one_re = tl.load(row + 2 * here, mask=inside, other=0.0)
        one_im = sign * tl.load(row + 2 * here + 1, mask=inside, other=0.0)
        if PARTS < SEGMENTS:
            re += 2 * one_re
            im += 2 * one_im
        else:
            re += one_re + tl.load(row + 2 * mirror, mask=inside, other=0.0)
            im += one_im - tl.load(row + 2 * mirror + 1, mask=inside, other=0.0)
    scale = tl.where(real, 0.5 / T, 1.0 / T)[:, None]
    target = dw + 2 * (f.to(tl.int64)[:, None] * C + c[None, :])
    tl.store(target, re * scale, mask=inside)
    tl.store(target + 1, tl.where(real[:, None], 0.0, im * scale), mask=inside)


@triton.jit
def _position(f, SEGMENTS: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    """Where frequency f = (k1 + R1 (k2 + R2 k3)) SEGMENTS + part lies: `fft.cu` says how."""
    part = f % SEGMENTS
    k = f // SEGMENTS
    k3 = k // (R1 * R2)
    high = k % R1 * R2 + k // R1 % R2
    low = tl.zeros_like(k)
    for level in tl.static_range(5):
        if (R3 >> level) > 1:
            low += (k3 >> level & 1) * (R3 >> level + 1)
    threads: tl.constexpr = R2 * R3
    e = high // threads * R3 + low
    return part * (R1 * R2 * R3) + e * threads + high % threads
