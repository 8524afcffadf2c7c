"""The change of an output that rounding explains, column by column, and changes measured by it."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Change", "Rounding"]

_SAMPLE = 1024  # positions that the quantiles of a column are taken over
_TAIL = 256  # times a column's tenth percentile: beyond stand masks such as -1e9, which round nothing else


class Rounding:
    """What rounding explains of a change of logits [B, T, V].

    A column is judged by its own scale, so that one of -1e9 blinds no other; its own noise is that of all
    columns no larger than itself, at the 90th percentile over positions.
    """

    def __init__(self, base: Tensor, repeat: Tensor, shaken: Tensor, step: float) -> None:
        """Outputs [B, T, V], those of an equal pass, and those of parameters rounded by a relative `step`."""
        size = base.abs().flatten(0, 1)
        finite = size.masked_fill(~size.isfinite(), 0.0)
        few = _sampled(finite)
        low = few.kthvalue(max(1, len(few) // 10), dim=0).values
        top = finite.amax(0)
        top = torch.where(low > 0, torch.minimum(top, _TAIL * low), top)
        typical = top.median()
        self.top = torch.maximum(top, typical * 2.0**-20).clamp(min=torch.finfo(top.dtype).tiny)
        again = _apart(base, repeat).flatten(0, 1).amax(0)
        self.unsteady = bool((again > 0.05 * torch.maximum(self.top, 0.01 * typical)).any())
        self.repeat = float(again.max())
        order = self.top.argsort()
        noise = _sampled(_apart(base, shaken).flatten(0, 1))[:, order].cummax(1).values
        noise = noise.kthvalue(-(-9 * len(noise) // 10), dim=0).values
        own = torch.empty_like(noise).index_copy_(0, order, noise)
        self.step = step
        self.column = 3 * own.nan_to_num(posinf=0.0) + 4 * again.nan_to_num(posinf=0.0) + self.step * self.top

    def allowed(self, base: Tensor) -> Tensor:
        """The change of each output of `base` [B, T, V] that rounding explains."""
        beyond = (base.abs().nan_to_num(nan=0.0, posinf=0.0) - self.top).clamp_(min=0.0)
        return beyond.mul_(self.step).add_(self.column)


@dataclass(frozen=True)
class Change:
    """At each position [B, T] the change furthest beyond what rounding explains: its size, what was allowed,
    and the ratio of both; a NaN on one side counts as infinite."""

    size: Tensor
    allowed: Tensor
    ratio: Tensor

    @classmethod
    def between(cls, base: Tensor, other: Tensor, rounding: Rounding, slack: float = 1.0) -> "Change":
        """From outputs `base` to `other`, both [B, T, V], with `slack` times the rounding allowed."""
        size, allowed = _apart(base, other), slack * rounding.allowed(base)
        ratio, column = (size / allowed).max(dim=-1, keepdim=True)
        return cls(size.gather(-1, column)[..., 0], allowed.gather(-1, column)[..., 0], ratio[..., 0])

    def worst(self, where: Tensor) -> tuple[float, float, float]:
        """Size, allowed and ratio at the place of `where` [B, T] with the largest ratio."""
        place = self.ratio.masked_fill(~where, -1.0).argmax()
        return tuple(float(part.flatten()[place]) for part in (self.size, self.allowed, self.ratio))  # type: ignore[return-value]


def _apart(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one == other, 0.0, (one - other).abs()).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _sampled(rows: Tensor) -> Tensor:
    return rows[:: -(-len(rows) // _SAMPLE)]
