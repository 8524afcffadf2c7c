"""linear_cross_entropy in chunks of rows: what its chunked candidates share.

A chunk's logits are made, replaced by their gradients in place, multiplied into the gradients of x and
weight, and forgotten. Where the loss is one number, that happens in the forward pass, since the gradient that
will arrive is one factor of everything: 6 N D V FLOPs in all. With reduction="none" it is a factor of each
row, which must be known before rows are added up: the backward makes the logits again, 8 N D V.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tiling, Tilings
from bakeoff.ops.linear_cross_entropy.classes import default_classes, run_in_blocks
from bakeoff.ops.linear_cross_entropy.method import Method, Terms
from bakeoff.ops.linear_cross_entropy.products import (
    add_sum,
    add_to_classes,
    multiplicable,
)

__all__ = ["Chunked", "chunked_op", "classes_at_once", "default_rows", "even_share", "sums_are_wide"]

MOST_SUMS = 8
"""Chunks above which a large gradient of the weight is summed up in float32."""
_CHEAP = 1 << 28  # bytes of a float32 weight gradient that is worth its accuracy above `_FEW_SUMS` chunks
_LARGE = 4  # how many times its usual bytes a chunk may take for there to be no more than MOST_SUMS
_FEW_SUMS = 4
"""Chunks up to which sums in 16 bits, which each round once, stay as exact as eager's gradients."""
_PADDED = 64  # elements: rows of logits begin at multiples, or products of odd V would be slow


def default_rows(N: int, V: int, itemsize: int, budget: int) -> int:
    """Rows of a chunk: some `budget` bytes of logits, less than twice as many where that makes `_FEW_SUMS`
    chunks of them, and up to `_LARGE` times as many where it makes `MOST_SUMS`."""
    row = max(V * itemsize, 1)
    rows = max(budget // row, min(-(-N // MOST_SUMS), _LARGE * budget // row), 1)
    few = -(-N // _FEW_SUMS)
    if few * row < 2 * budget:
        rows = max(rows, few)
    chunks = max(-(-N // rows), 1)
    even = -(-N // chunks)
    return max(min(-(-even // _PADDED) * _PADDED, rows, N), 1)


def sums_are_wide(N: int, V: int, D: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether the weight's gradient is summed up in float32 over chunks: in 16 bits every chunk rounds it
    once, and float32 costs V D 4 bytes more, which are read and written for every chunk."""
    chunks = -(-N // max(rows, 1))
    return dtype.itemsize < 4 and chunks > _FEW_SUMS and (chunks > MOST_SUMS or 4 * V * D <= _CHEAP)


def classes_at_once(N: int, V: int, D: int, rows: int, dtype: torch.dtype, budget: int) -> int:
    """Classes of a block of `budget` bytes of logits, or 0 for chunks of `rows`.

    Sums in 16 bits over many chunks are no choice of ours: where rows of all chunks add alike to one that a
    large row began, each rounding errs to the same side. Float16 is summed up in float32 anyway (`keeps`).
    """
    many = -(-N // max(rows, 1)) > _FEW_SUMS
    dear = dtype == torch.bfloat16 and many and not sums_are_wide(N, V, D, rows, dtype)
    return default_classes(N, V, dtype.itemsize, budget) if dear else 0


@lru_cache(maxsize=64)
def even_share(smoothing: float, dtype: torch.dtype) -> float:
    """What gradients of logits are multiplied by until all are added up, at most 1.

    Of a row whose best class is nearly sure they are 1 there and smoothing - 1 at the target. 16 bits would
    round 1 - smoothing alike in all rows, 0.9 in bfloat16 by a 570th, and make whole gradients smaller. So
    both are multiplied by a number of 8 binary digits: that of which the product is rounded by least.
    """
    rest = 1.0 - smoothing
    if dtype.itemsize >= 4 or not 0.0 < rest < 1.0:
        return 1.0
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))

    def rounded_by(share: float) -> float:
        mantissa = math.ldexp(math.frexp(share * rest)[0], digits)
        return abs(round(mantissa) - mantissa) / mantissa

    return min((n / 256 for n in range(256, 127, -1)), key=rounded_by)


def results(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> Tensor:
    """Room for the loss."""
    del weight, bias, ignore_index, label_smoothing, z_loss, softcap, want_x, want_weight, want_bias
    shape = target.shape if reduction == "none" else ()
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def keeps(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, ...]:
    """Room for the gradients of the sum of losses, where they are wanted, and for the `factor` of a mean.

    It is left for the end, or for x's gradient before that is rounded, because 16 bits would round it alike
    for all targets: 1 - p of a class that is hardly expected is nearly a power of two, and 1 / count is none.
    Float16 has no room for p / count either, and its sums over rows need the range of float32.
    """
    del target, ignore_index, label_smoothing, z_loss, softcap
    wide = torch.promote_types(x.dtype, torch.float32)
    once = reduction != "none"
    sums = wide if weight.dtype == torch.float16 else weight.dtype
    return (
        empty_like(x) if once and want_x else x.new_empty(0),
        x.new_empty(weight.shape, dtype=sums) if once and want_weight else x.new_empty(0),
        x.new_empty(weight.shape[0], dtype=wide) if once and want_bias else x.new_empty(0),
        x.new_empty((), dtype=wide),
    )


def chunked_op(name: str, method: Method, tilings: Tilings) -> KernelOp:
    """The op that runs `method` on chunks."""

    def forward(
        plan: Plan,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
        reduction: str,
        want_x: bool,
        want_weight: bool,
        want_bias: bool,
        loss: Tensor,
        of_x: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
        factor: Tensor | None,
        tiling: Any,
    ) -> None:
        terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
        wanted = [
            kept if want and reduction != "none" else None
            for kept, want in ((of_x, want_x), (of_weight, want_weight), (of_bias, want_bias))
        ]
        plan.run(_forward, method, tiling, terms, reduction, x, weight, target, bias, loss, factor, *wanted)

    def backward(
        plan: Plan,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
        reduction: str,
        of_x: Tensor,
        of_weight: Tensor,
        of_bias: Tensor,
        factor: Tensor,
        dloss: Tensor,
        dx: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        kept = (of_x, dx), (of_weight, dweight), (of_bias, dbias)
        if all(out is None or held.shape == out.shape for held, out in kept):
            scaled = method.scales(weight.shape[0], x.dtype)
            plan.run(method.multiply, scaled, dloss, factor, *kept[0], *kept[1], *kept[2])
            return
        terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
        plan.run(_backward, method, terms, reduction, x, weight, target, bias, dloss, dx, dweight, dbias)

    return kernel_op(
        name,
        results=results,
        forward=forward,
        backward=backward,
        names=("loss",),
        keeps=keeps,
        kept=("of_x", "of_weight", "of_bias", "factor"),
        reuses={"x": "of_x", "weight": "of_weight"},
        tilings={"forward": tilings},
    )


class Chunked:
    """A chunked op with the arguments of the definition."""

    def __init__(self, op: KernelOp) -> None:
        self.op, self.variant = op, op.variant
        self.__name__, self.__module__ = op.__name__, op.__module__
        self._bound: dict[str, Chunked] = {"": self}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        reduction: str,
    ) -> Tensor:
        recorded = torch.is_grad_enabled()
        wants = [recorded and t is not None and t.requires_grad for t in (x, weight, bias)]
        capped = 0.0 if softcap is None else softcap
        loss: Tensor = self.op(
            x, weight, target, bias, ignore_index, label_smoothing, z_loss, capped, reduction, *wants
        )
        return loss

    def variants(self, case: Any) -> Mapping[str, Sequence[Tiling]]:
        """The tilings that it may be launched with for a case, the default first."""
        return self.op.variants(case)

    def bind(self, text: str) -> "Chunked":
        """The op with the variant that `text` names."""
        bound = self._bound.get(text)
        if bound is None:
            bound = self._bound[text] = Chunked(self.op.bind(text))
        return bound


def _forward(
    method: Method,
    tiling: Any,
    terms: Terms,
    reduction: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    loss: Tensor,
    factor: Tensor | None,
    of_x: Tensor | None,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
) -> None:
    """The loss, and of the gradients those that there is room for."""
    target = target.reshape(-1)
    N, V = target.numel(), weight.shape[0]
    tiling = tiling or method.tiling(N, V, weight.shape[1], x.dtype)
    share = even_share(terms.label_smoothing, x.dtype)
    numbers = loss.new_empty(2)
    method.begin(target, terms, reduction, share, numbers, factor)
    each = 1 if reduction == "none" else method.together(N, V, tiling)
    losses = loss.view(-1) if reduction == "none" else loss.new_empty(-(-N // each))
    scale, by = numbers[0].expand(N), factor if method.scales(V, x.dtype) else None
    _run(method, tiling, terms, x, weight, target, bias, losses, each, scale, by, of_x, of_weight, of_bias)
    if reduction != "none":
        method.finish(losses, numbers, loss)


def _backward(
    method: Method,
    terms: Terms,
    reduction: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    dloss: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """The gradients that there is room for, from logits that are made again."""
    target = target.reshape(-1)
    scale = dloss.reshape(-1)
    if reduction == "mean":
        scale = scale / (target != terms.ignore_index).sum().clamp_(min=1)
    scale = scale.expand(target.numel())
    losses = torch.empty_like(scale, memory_format=torch.contiguous_format)
    of_bias = None if dbias is None else dloss.new_empty(dbias.shape)
    tiling = method.tiling(target.numel(), weight.shape[0], weight.shape[1], x.dtype)
    _run(method, tiling, terms, x, weight, target, bias, losses, 1, scale, None, dx, dweight, of_bias)
    if dbias is not None and of_bias is not None:
        dbias.copy_(of_bias)


def _run(
    method: Method,
    tiling: Any,
    terms: Terms,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    losses: Tensor,
    each: int,
    scale: Tensor,
    factor: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """All chunks: the loss of `each` rows, and the sums of the gradients times each row's `scale`, x's also
    times `factor`."""
    N, (V, D) = target.numel(), weight.shape
    _check_classes(target, V, terms.ignore_index)
    x, weight = x.reshape(N, D), multiplicable(weight)
    dx = None if dx is None else dx.view(N, D)
    head = 0
    if N and dweight is not None and tiling.classes and not tiling.wide and dweight.dtype == x.dtype:
        head = min(tiling.head or N, N)
        run_in_blocks(
            method, tiling, terms, x[:head], weight, target[:head], bias, losses[:head], scale[:head], factor,
            None if dx is None else dx[:head], dweight, dbias,
        )  # fmt: skip
        if head == N:
            return
    total = dweight
    if dweight is not None and tiling.wide and tiling.rows < N:
        total = dweight if dweight.dtype == losses.dtype else losses.new_empty(V, D)
    if N == 0:
        for gradient in (total, dbias):
            if gradient is not None:
                gradient.zero_()
    gradients = not (dx is None and dweight is None and dbias is None)
    height, width = min(tiling.rows, N), -(-V // _PADDED) * _PADDED
    written = gradients or not tiling.tile
    buffer = x.new_empty(height if written else 1, width).expand(height, width)
    for start in range(head, N, tiling.rows):
        here = slice(start, min(start + tiling.rows, N))
        rows, logits = x[here], buffer[: here.stop - start, :V]
        their = losses[start // each : -(-here.stop // each)]
        method.chunk(rows, weight, bias, logits, target[here], their, scale[here], terms, gradients, tiling)
        if dx is not None:
            method.to_rows(logits, weight, dx[here], factor)
        if total is not None:
            add_to_classes(total, logits, rows, first=start == 0)
        if dbias is not None:
            add_sum(dbias, logits, first=start == 0)
    if dweight is not None and total is not None and total is not dweight:
        dweight.copy_(total)


def _check_classes(target: Tensor, V: int, ignore_index: int) -> None:
    """Raises IndexError for a target that is no class, on the CPU: on a GPU the host can't see it."""
    if target.device.type != "cpu":
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= V))]
    if wrong.numel():
        raise IndexError(
            f"linear_cross_entropy: target holds {int(wrong[0])}, expected classes 0 to {V - 1}, as weight "
            f"has {V} rows, or ignore_index {ignore_index}"
        )
