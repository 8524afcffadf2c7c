"""One step of a `NestedController` in one launch, where PyTorch takes sixty for some hundred numbers."""

import math
from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from bakeoff.kernels.triton import TritonKernel

__all__ = ["advance", "fits"]

_MOST = 1 << 15
"""Most products of groups, units and inputs that one program multiplies at once."""


@triton.jit
def _finite(x):
    return tl.abs(x) <= 3.4028235e38  # which no NaN is


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _network(x, weight1, bias1, weight2, bias2):
    # y of each group, and the hidden units.
    units = _tanh(tl.sum(x[:, None, :] * weight1[None, :, :], axis=2) + bias1[None, :])
    return tl.sum(units * weight2[None, :], axis=1) + bias2, units


@triton.jit(do_not_specialize=["log_ratio", "rate", "inner", "margin", "pull", "decay", "wait"])
def _advance(
    sums, told, weight1, bias1, weight2, bias2, loss, depth, count, mean, square, cosine, size, x, x_last,
    multipliers, log_ratio: tl.float32, rate: tl.float32, inner: tl.float32, margin: tl.float32,
    pull: tl.float32, decay: tl.float32, wait: tl.float32,
    GROUPS: tl.constexpr, HIDDEN: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """`NestedController.advance` line by line; one program. G and H are GROUPS and HIDDEN rounded up."""
    TINY: tl.constexpr = 1e-30
    g, h, i = tl.arange(0, G), tl.arange(0, H), tl.arange(0, 8)
    group, unit = g < GROUPS, h < HIDDEN
    slope = tl.load(sums + 4 * g, mask=group, other=0.0)
    gg = tl.load(sums + 4 * g + 1, mask=group, other=0.0)
    pp = tl.load(sums + 4 * g + 2, mask=group, other=0.0)
    uu = tl.load(sums + 4 * g + 3, mask=group, other=0.0)
    size_old = tl.load(size + g, mask=group, other=0.0)
    stepped = ((gg != 0.0) | (uu != 0.0)) & group
    now = slope * tl.rsqrt(tl.maximum(gg, TINY)) / tl.maximum(size_old, TINY)
    now = tl.where(size_old > 0.0, now, 0.0 * slope)

    ahead = 0.0
    if told is not None:
        value = tl.load(told).to(tl.float32)
        value = tl.where(value == value, tl.log(tl.maximum(value, TINY)), value)
        seen = tl.load(loss + 1)
        usual = tl.load(loss)
        ahead = tl.where(seen > 0.0, value - usual, 0.0 * value)
        share = tl.maximum(1.0 / (seen + 1.0), 5.0 * (1.0 - decay))
        known = _finite(value) & (tl.max(stepped.to(tl.int32), axis=0) > 0)
        tl.store(loss, tl.where(known, usual + share * (value - usual), usual))
        tl.store(loss + 1, tl.where(known, seen + 1.0, seen))

    # The network's raw inputs, of which the sixth is the depth.
    column = i[None, :]
    raw = tl.where(column == 0, 0.5 * tl.log(tl.maximum(gg, TINY))[:, None], 0.0)
    raw = tl.where(column == 1, 0.5 * tl.log(tl.maximum(pp, TINY))[:, None], raw)
    moved = 0.5 * tl.log(tl.maximum(uu / tl.maximum(pp, TINY), TINY))
    raw = tl.where(column == 2, moved[:, None], raw)
    raw = tl.where(column == 3, now[:, None], raw)
    raw = tl.where(column == 4, ahead, raw)
    fine = stepped & (tl.min(_finite(raw).to(tl.int32), axis=1) > 0)
    fine = fine & _finite(slope) & _finite(gg) & _finite(pp) & _finite(uu)

    # What is learned from the last step's multipliers.
    steps = tl.load(count + g, mask=group, other=0.0) + 1.0
    before = tl.load(cosine + g, mask=group, other=0.0)
    averaged = before + (_clamped(now, -1.0, 1.0) - before) * tl.minimum(1.0, 10.0 * (1.0 - decay))
    beyond = averaged - _clamped(averaged, -margin, margin)
    six = group[:, None] & (column < 6)
    at_six = g[:, None] * 6 + column
    x_old = tl.load(x_last + at_six, mask=six, other=0.0)
    at1, inside1 = h[:, None] * 6 + column, unit[:, None] & (column < 6)
    w1 = tl.load(weight1 + at1, mask=inside1, other=0.0)
    b1 = tl.load(bias1 + h, mask=unit, other=0.0)
    w2 = tl.load(weight2 + h, mask=unit, other=0.0)
    b2 = tl.load(bias2)
    y, units = _network(x_old, w1, b1, w2, b2)
    bend = _tanh(y)
    learns = fine & (steps > tl.maximum(wait, 2.0))
    dy = tl.where(learns, (pull * y - beyond * log_ratio * (1.0 - bend * bend)) / GROUPS, 0.0)
    within = dy[:, None] * w2[None, :] * (1.0 - units * units)
    w1 -= rate * inner * tl.sum(within[:, :, None] * x_old[:, None, :], axis=0)
    b1 -= rate * inner * tl.sum(within, axis=0)
    w2 -= rate * inner * tl.sum(units * dy[:, None], axis=0)
    b2 -= rate * tl.sum(dy, axis=0)
    tl.store(weight1 + at1, w1, mask=inside1)
    tl.store(bias1 + h, b1, mask=unit)
    tl.store(weight2 + h, w2, mask=unit)
    tl.store(bias2, b2)

    # The inputs standardised by running averages, and the multipliers that they give.
    five, at_five = group[:, None] & (column < 5), g[:, None] * 5 + column
    mean_old = tl.load(mean + at_five, mask=five, other=0.0)
    square_old = tl.load(square + at_five, mask=five, other=0.0)
    share = tl.maximum(1.0 / steps, 1.0 - decay)[:, None]
    away = raw - mean_old
    mean_new = mean_old + share * away
    square_new = (1.0 - share) * (square_old + share * away * away)
    x_new = _clamped((raw - mean_new) / (tl.sqrt(square_new) + 1e-3), -3.0, 3.0)
    deep = tl.load(depth + g, mask=group, other=0.0)
    x_new = tl.where(column < 5, x_new, tl.where(column == 5, deep[:, None], 0.0))
    x_here = tl.load(x + at_six, mask=six, other=0.0)
    x_new = tl.where(fine[:, None], x_new, x_here)
    y, _ = _network(x_new, w1, b1, w2, b2)
    given = tl.where(fine, tl.exp(log_ratio * _tanh(y)), 1.0)
    tl.store(multipliers + g, given, mask=stepped)
    tl.store(count + g, steps, mask=fine)
    tl.store(cosine + g, averaged, mask=fine)
    tl.store(size + g, tl.sqrt(uu), mask=fine)
    tl.store(mean + at_five, mean_new, mask=five & fine[:, None])
    tl.store(square + at_five, square_new, mask=five & fine[:, None])
    tl.store(x_last + at_six, x_here, mask=six & fine[:, None])
    tl.store(x + at_six, x_new, mask=six & fine[:, None])


_advance_kernel = TritonKernel(_advance)


def fits(groups: int, hidden: int) -> bool:
    """Whether one program can hold that many groups and hidden units."""
    return _padded(groups) * _padded(hidden) * 8 <= _MOST


def advance(
    state: Mapping[str, Tensor], sums: Tensor, loss: Tensor | None, *, ratio: float, rate: float,
    inner: float, margin: float, pull: float, decay: float, wait: int,
) -> None:  # fmt: skip
    """Learns from `sums` [groups, 4] and the loss, and sets the multipliers, in the controller's state."""
    groups, hidden = state["count"].numel(), state["bias1"].numel()
    _advance_kernel(
        (1,), sums=sums, told=loss, **state, log_ratio=math.log(ratio), rate=rate, inner=inner,
        margin=margin, pull=pull, decay=decay, wait=1.0 * wait, GROUPS=groups, HIDDEN=hidden,
        G=_padded(groups), H=_padded(hidden), num_warps=4,
    )  # fmt: skip


def _padded(size: int) -> int:
    return max(2, 1 << (size - 1).bit_length())
