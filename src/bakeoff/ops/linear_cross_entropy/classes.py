"""linear_cross_entropy in blocks of classes: a large weight's gradient with one rounding and no float32 sum.

A block has some classes of all rows, so that its part of the weight's gradient is one product. A row's
gradients need its sum of exponentials over all classes first: logits are made in a first pass for those sums
and needed again in a second one. What of them fits is kept in between, in memory that is there anyway: in
the room for the weight's gradient, which the second pass fills from its front while it uses the logits up,
and in the buffer of one block. The rest is made twice: where N = 2 D half of it, 7 N D V FLOPs in all, and 8
at most, beyond the 6 of chunks of rows, whose 16-bit sums are rounded once a chunk.

With N = D nearly all is kept: a `head` of so many rows costs 6 and one rounding, and chunks may follow.
"""

from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.linear_cross_entropy.method import Method, Terms
from bakeoff.ops.linear_cross_entropy.products import add_sum, add_to_classes, add_to_rows, logits_of

__all__ = ["default_classes", "kept_blocks", "run_in_blocks"]

_PADDED = 64


def default_classes(N: int, V: int, itemsize: int, budget: int) -> int:
    """Classes of a block: some `budget` bytes of logits, in even blocks."""
    most = max(budget // max(N * itemsize, 1) // _PADDED * _PADDED, _PADDED)
    even = -(-V // -(-V // most))
    return -(-even // _PADDED) * _PADDED


def kept_blocks(N: int, V: int, D: int, classes: int) -> int:
    """How many blocks of logits the room of the weight's gradient keeps.

    They lie at its end in their order. Writing block i's gradient, the (i + 1)-th `classes` rows of D, must
    leave block i and those behind it alone. As both move on evenly, that holds if it does for the first and
    the last of them.
    """
    room, logits, rows = V * D // _PADDED * _PADDED, N * classes, classes * D
    fitting = min((room - rows) // max(logits, 1), (room - logits) // rows, -(-V // classes) - 1)
    return max(fitting, 0)


def run_in_blocks(
    method: Method,
    tiling: Any,
    terms: Terms,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    losses: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor,
    dbias: Tensor | None,
) -> None:
    """What `chunks._run` does, with `tiling.classes` at a time, for a `dweight` of x's dtype."""
    N, (V, D) = x.shape[0], weight.shape
    target, scale = target.contiguous(), scale.contiguous()
    width = -(-tiling.classes // _PADDED) * _PADDED
    blocks = [slice(start, min(start + width, V)) for start in range(0, V, width)]
    kept = kept_blocks(N, V, D, width) if dweight.is_contiguous() else 0
    room, buffer = dweight.view(-1) if kept else dweight, x.new_empty(N * width)
    end = V * D // _PADDED * _PADDED

    def place(i: int) -> Tensor:
        start = end - (kept - i) * N * width
        held = room[start : start + N * width] if i < kept else buffer
        return held.view(N, width)[:, : blocks[i].stop - blocks[i].start]

    def make(i: int) -> Tensor:
        logits = place(i)
        logits_of(x, weight[blocks[i]], None if bias is None else bias[blocks[i]], logits)
        return logits

    state = losses.new_zeros(5, N)
    state[0], state[2] = -torch.inf, torch.nan
    order = [*range(kept + 1, len(blocks)), *range(kept + 1)]  # the buffer keeps what is made last
    for i in order:
        method.part(make(i), target, blocks[i].start, state, i == order[0], terms, tiling)
    most, weights, factors = _of_rows(state, target, terms, V, losses, scale)
    total = dx if dx is None or dx.dtype == losses.dtype else losses.new_empty(N, D)
    for i, classes in enumerate(blocks):
        logits = make(i) if i > kept else place(i)
        method.slopes(logits, target, classes.start, most, weights, factors, V, terms, tiling)
        if total is not None:
            add_to_rows(total, logits, weight[classes], first=i == 0)
        if dbias is not None:
            add_sum(dbias[classes], logits, first=True)
        add_to_classes(dweight[classes], logits, x, first=True)
    if dx is not None and total is not None and total is not dx:
        dx.copy_(total if factor is None else total.mul_(factor))


def _of_rows(
    state: Tensor, target: Tensor, terms: Terms, V: int, losses: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills in `losses`; of each row its largest logit, and what exponentials and gradients are multiplied
    by."""
    most, sums, at, first, beyond = state
    log_sums, smoothing = sums.log(), terms.label_smoothing
    lse = most + log_sums
    loss = (log_sums - (at - most)) * (1 - smoothing) + terms.z_loss * lse.square()
    if smoothing:
        loss += smoothing * (log_sums + (most - first) - beyond / V)
    losses.copy_(loss.masked_fill_(target == terms.ignore_index, 0))
    # What is no class is never met, so that its logit is still NaN.
    return most, (1 + 2 * terms.z_loss * lse) / sums, scale.masked_fill(at.isnan(), torch.nan)
