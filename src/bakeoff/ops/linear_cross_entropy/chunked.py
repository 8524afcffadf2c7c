"""The ``chunked`` candidate of linear_cross_entropy: chunks of rows in plain PyTorch, on any device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels.variants import Tilings
from bakeoff.ops.linear_cross_entropy.chunks import (
    Chunked,
    chunked_op,
    classes_at_once,
    default_rows,
    sums_are_wide,
)
from bakeoff.ops.linear_cross_entropy.method import Method, Terms
from bakeoff.ops.linear_cross_entropy.products import logits_of, to_rows

__all__ = ["Tiling", "chunked"]

_BUDGET = 1 << 26  # bytes of a chunk's logits; up to six times as many are about while a row's loss is taken


class Tiling(NamedTuple):
    """How rows are cut."""

    rows: int
    """Of a chunk."""
    wide: int
    """1: the weight's gradient is summed up over chunks in float32, else in its own dtype."""
    classes: int = 0
    """Above 0: the weight's gradient is made in blocks of so many classes of all rows, not in chunks."""
    head: int = 0
    """Above 0: only that of so many rows, to which chunks of the others are added."""

    @property
    def tile(self) -> int:
        """0: logits are always written."""
        return 0


def default(N: int, V: int, D: int, dtype: torch.dtype) -> Tiling:
    """For N rows, V classes and D features."""
    rows = default_rows(N, V, dtype.itemsize, _BUDGET)
    wide = int(sums_are_wide(N, V, D, rows, dtype))
    return Tiling(rows, wide, classes_at_once(N, V, D, rows, dtype, _BUDGET))


def tilings(case: Any) -> list[Tiling]:
    """The default, chunks of half as many rows, and float32 sums."""
    V, D = case.weight.shape
    N, dtype = case.target.numel, case.x.dtype
    first = default(N, V, D, dtype)
    half = max(first.rows // 2, 1)
    found = [first, Tiling(half, int(sums_are_wide(N, V, D, half, dtype))), Tiling(first.rows, 1)]
    return list(dict.fromkeys(found))


def chunk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scale: Tensor,
    terms: Terms,
    gradients: bool,
    tiling: Any,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    del tiling
    logits_of(x, weight, bias, logits)
    smoothing, uncapped = terms.label_smoothing, None
    shifted = logits.to(losses.dtype, copy=True)
    if terms.softcap:
        uncapped = shifted.div_(terms.softcap)
        shifted = torch.tanh(uncapped) * terms.softcap
    counted = target != terms.ignore_index
    classes = target.long().masked_fill(~counted, 0)[:, None]
    most = shifted.amax(1, keepdim=True)
    shifted -= most
    at = shifted.gather(1, classes)
    mean = shifted.mean(1, keepdim=True) if smoothing else None
    p = shifted.exp_()
    total = p.sum(1, keepdim=True)
    log_total = total.log()
    loss = log_total - (1 - smoothing) * at
    if mean is not None:
        loss -= smoothing * mean
    lse = most + log_total
    if terms.z_loss:
        loss += terms.z_loss * lse.square()
    losses.copy_(loss[:, 0].masked_fill_(~counted, 0))
    if not gradients:
        return
    p.mul_((1 + 2 * terms.z_loss * lse) / total)
    if smoothing:
        p.sub_(smoothing / p.shape[1])
    p.scatter_(1, classes, p.gather(1, classes) - (1 - smoothing))
    if uncapped is not None:  # 1 - tanh^2 would have no digits left of large logits
        p.div_(uncapped.cosh_().square_())
    logits.copy_(p.mul_(scale[:, None]).masked_fill_(~counted[:, None], 0))


def part(
    logits: Tensor, target: Tensor, begin: int, state: Tensor, first: bool, terms: Terms, tiling: Any
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    del tiling
    most, sums, at, one, beyond = state
    value = logits.to(state.dtype, copy=True)
    if terms.softcap:
        value.div_(terms.softcap).tanh_().mul_(terms.softcap)
    if first:
        one.copy_(value[:, 0])
    if terms.label_smoothing:
        beyond += (value - one[:, None]).sum(1)
    t = target.long() - begin
    here = (t >= 0) & (t < value.shape[1])
    at.copy_(value.gather(1, t.masked_fill(~here, 0)[:, None])[:, 0].where(here, at))
    high = torch.maximum(most, value.amax(1))
    base = high.masked_fill(high == -torch.inf, 0)
    sums.mul_((most - base).exp_()).add_(value.sub_(base[:, None]).exp_().sum(1))
    most.copy_(high)


def slopes(
    logits: Tensor,
    target: Tensor,
    begin: int,
    most: Tensor,
    weights: Tensor,
    factors: Tensor,
    V: int,
    terms: Terms,
    tiling: Any,
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    del tiling
    value, uncapped = logits.to(most.dtype, copy=True), None
    if terms.softcap:
        uncapped = value.div_(terms.softcap)
        value = torch.tanh(uncapped) * terms.softcap
    p = value.sub_(most[:, None]).exp_().mul_(weights[:, None])
    if terms.label_smoothing:
        p.sub_(terms.label_smoothing / V)
    t = target.long() - begin
    here = (t >= 0) & (t < p.shape[1])
    t = t.masked_fill_(~here, 0)[:, None]
    p.scatter_add_(1, t, (here * (terms.label_smoothing - 1.0)).to(p.dtype)[:, None])
    if uncapped is not None:
        p.div_(uncapped.cosh_().square_())
    ignored = (target == terms.ignore_index)[:, None]
    logits.copy_(p.mul_(factors[:, None]).masked_fill_(ignored, 0))


def begin(
    target: Tensor, terms: Terms, reduction: str, share: float, numbers: Tensor, factor: Tensor | None
) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    numbers[0].fill_(share)
    if reduction == "mean":
        numbers[1].copy_((target != terms.ignore_index).sum().clamp_(min=1))
    else:
        numbers[1].fill_(1)
    if factor is not None:
        factor.copy_(1 / numbers.prod())


def finish(losses: Tensor, numbers: Tensor, loss: Tensor) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`."""
    torch.div(losses.sum(0), numbers[1], out=loss)


def multiply(scaled: bool, dloss: Tensor, factor: Tensor, *kept: Tensor | None) -> None:
    """See `bakeoff.ops.linear_cross_entropy.method.Method`. One dimension makes PyTorch take a factor as wide
    as it is."""
    del scaled
    by = (dloss * factor).reshape(1)
    for held, out in zip(kept[::2], kept[1::2], strict=True):
        if held is not None and out is not None:
            torch.mul(held, by, out=out)


def _to_rows(grads: Tensor, weight: Tensor, out: Tensor, factor: Tensor | None) -> None:
    del factor
    to_rows(grads, weight, out)


chunked = Chunked(
    chunked_op(
        "linear_cross_entropy.chunked",
        Method(
            begin,
            lambda N, V, tiling: 1,
            chunk,
            _to_rows,
            lambda V, dtype: False,
            part,
            slopes,
            finish,
            multiply,
            default,
        ),
        Tilings(Tiling, tilings),
    )
)
"""For every floating dtype."""
