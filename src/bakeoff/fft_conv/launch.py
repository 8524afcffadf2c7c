"""Launches of `fft.cu` on rows of time."""

import math
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.channel_major.rows import Rows
from bakeoff.fft_conv.plans import FFTPlan
from bakeoff.kernels.cuda import DATA, CudaKernel, cuda_kernel
from bakeoff.kernels.plan import Plan

__all__ = [
    "SOURCE",
    "convolve",
    "differentiate_convolution",
    "differentiate_spectrum",
    "multiply_spectrum",
    "splits",
]

SOURCE = Path(__file__).with_name("fft.cu")


def convolve(
    plan: Plan, fft: FFTPlan, x: Rows, taps: Tensor, skip: Tensor | None, y: Rows, T: int, *, backwards: bool
) -> None:
    """y = taps * x (correlated with them if `backwards`) + skip x, causally, for T times, by a plan that
    isn't circular; float32 taps [C, L] and skip [C]."""
    _convolve(plan, fft, x, taps, taps.shape[1], skip, y, T, -1 if backwards else 1)


def multiply_spectrum(
    plan: Plan, fft: FFTPlan, x: Rows, weights: Tensor, y: Rows, T: int, *, conjugate: bool
) -> None:
    """y = irfft(weights rfft(x)), or with the weights' conjugates, by a circular plan; weights [K, C, 2] of
    the first K frequencies are pairs of float32, others count as 1."""
    _convolve(plan, fft, x, weights, weights.shape[0], None, y, T, -1 if conjugate else 1)


def differentiate_convolution(
    plan: Plan,
    fft: FFTPlan,
    x: Rows,
    dy: Rows,
    taps: Tensor,
    skip: Tensor | None,
    dx: Rows | None,
    T: int,
    dtaps: Tensor | None,
) -> Tensor | None:
    """The gradients of `convolve`: that of x into dx if it is given, and that of the taps as float32 sums
    [splits, C, L], which are to be added up. Where one split is enough it goes into `dtaps` [C, L] if that is
    given, and there are no sums."""
    L = taps.shape[1]
    count = splits(fft, x, T, L)
    into = dtaps if count == 1 else None
    sums = plan.empty((count, *taps.shape), torch.float32) if into is None else None
    _differentiate(plan, fft, x, dy, taps, L, skip, dx, sums if into is None else into, T, count)
    return sums


def differentiate_spectrum(
    plan: Plan, fft: FFTPlan, x: Rows, dy: Rows, weights: Tensor, dx: Rows | None, T: int
) -> Tensor:
    """The gradients of `multiply_spectrum`: that of x into dx if it is given, and what makes up that of the
    weights: sums [splits, C, parts * segment, 2] of spectra in the order that `fft.cu` leaves them in."""
    count = splits(fft, x, T, T)
    sums = plan.empty((count, x.shape[1], fft.segment * fft.parts, 2), torch.float32)
    _differentiate(plan, fft, x, dy, weights, weights.shape[0], None, dx, sums, T, count)
    return sums


def splits(fft: FFTPlan, x: Rows, T: int, L: int) -> int:
    """The blocks among which the pairs of a channel's rows are split: as many as cost the fewest waves of
    blocks. A pair and what is done once for the filter cost so many transforms."""
    B, C, _ = x.shape
    return _splits(fft, C, _pairs(fft, B, T, L), hardware.multiprocessors(x.data.get_device()))


@lru_cache(maxsize=4096)
def _splits(fft: FFTPlan, C: int, pairs: int, multiprocessors: int) -> int:
    once = 1 if fft.circular or not fft.backward else 2 if fft.passes.stores_spectrum else 0
    resident = fft.blocks * multiprocessors

    def cost(count: int) -> int:
        waves = -(-C * fft.parts * count // resident)
        return waves * (fft.transforms * -(-pairs // count) + once)

    return min(range(1, pairs + 1), key=cost)


def _convolve(
    plan: Plan,
    fft: FFTPlan,
    x: Rows,
    filters: Tensor,
    L: int,
    skip: Tensor | None,
    y: Rows,
    T: int,
    sign: int,
) -> None:
    B, C, _ = x.shape
    taps = T if fft.circular else L
    count = splits(fft, x, T, taps)
    x_b, x_c = x.strides_8
    y_b, y_c = y.strides_8
    parts, counts = _parts(plan, fft, _pairs(fft, B, T, taps), C)
    plan.launch(
        _kernel(plan, fft, x), (C * fft.parts * count,), threads=fft.threads,
        x=x.data, filter=filters, skips=skip, y=y.data, parts=parts, counts=counts,
        twiddles=plan.constant(twiddles(fft.segment, fft.segments, plan.device)), sign=sign,
        B=B, T=T, L=L, C=C, valid=fft.valid(T, taps), splits=count, x_b=x_b, x_c=x_c, y_b=y_b, y_c=y_c,
    )  # fmt: skip


def _differentiate(
    plan: Plan,
    fft: FFTPlan,
    x: Rows,
    dy: Rows,
    filters: Tensor,
    L: int,
    skip: Tensor | None,
    dx: Rows | None,
    sums: Tensor | None,
    T: int,
    count: int,
) -> None:
    B, C, _ = x.shape
    taps = T if fft.circular else L
    x_b, x_c = x.strides_8
    dy_b, dy_c = dy.strides_8
    dx_b, dx_c = (0, 0) if dx is None else dx.strides_8
    parts, counts = _parts(plan, fft, _pairs(fft, B, T, taps) + count, C)
    plan.launch(
        _kernel(plan, fft, x), (C * fft.parts * count,), threads=fft.threads,
        x=x.data, dy=dy.data, filter=filters, skips=skip, dx=None if dx is None else dx.data, sums=sums,
        parts=parts, counts=counts,
        twiddles=plan.constant(twiddles(fft.segment, fft.segments, plan.device)),
        B=B, T=T, L=L, C=C, valid=fft.valid(T, taps), splits=count,
        x_b=x_b, x_c=x_c, dy_b=dy_b, dy_c=dy_c, dx_b=dx_b, dx_c=dx_c,
    )  # fmt: skip


def _kernel(plan: Plan, fft: FFTPlan, x: Rows) -> CudaKernel:
    name = "differentiate" if fft.backward else "convolve"
    return cuda_kernel(SOURCE, name, plan.device, fft.shared, **fft.macros, DATA=DATA[x.dtype])


def _pairs(fft: FFTPlan, B: int, T: int, L: int) -> int:
    """Of rows of a channel."""
    return (B * -(-T // fft.valid(T, L)) + 1) // 2


def _parts(plan: Plan, fft: FFTPlan, rows: int, C: int) -> tuple[Tensor | None, Tensor | None]:
    """Workspace for the parts of so many transforms of every channel, and zeros to count them; none where a
    block transforms whole rows."""
    if fft.segments == 1:
        return None, None
    return (
        plan.empty((rows, C, fft.segment * fft.parts, 2), torch.float32),
        plan.zeros((rows, C), torch.int32),
    )


@lru_cache(maxsize=64)
def twiddles(segment: int, segments: int, device: torch.device) -> Tensor:
    """The tables that `fft.cu` describes at `look_up`, as [.., 2]."""
    r1, r2, r3 = FFTPlan(segment).passes.radices
    total = segment * segments

    def count(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float64)

    turns = _powers(count(r3) / (r2 * r3), r2)
    turns += _powers(count(segment // r1) / segment, r1)
    turns += _powers(count(segment) / total, segments)
    for part in range(segments):
        k1 = count(r1) * segments + part
        k2 = k1[:, None] + count(r2) * (r1 * segments)
        turns += [count(segments) * part / segments % 1, *_powers(count(1) + part / (segments * r1), r1)]
        turns += _powers(k1 / (segments * r1 * r2), r2) + _powers(k2 / total, r3)
    angle = torch.cat(turns) * (-2 * math.pi)
    return torch.stack([angle.cos(), angle.sin()], dim=1).float().to(device)


def _powers(turns: Tensor, radix: int) -> list[Tensor]:
    """w, w^2, w^4, .. up to w^(radix / 2) in rows, for every w = exp(-2 pi i turn)."""
    return [(turns * 2**level % 1).flatten() for level in range(radix.bit_length() - 1)]
