"""What candidates of linear_cross_entropy do between matrix products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Method", "Terms"]


class Terms(NamedTuple):
    """What a row's loss is made of beside its logits."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    """0 for none."""


class Method(NamedTuple):
    """What a candidate does its own way."""

    begin: Callable[[Tensor, Terms, str, float, Tensor, Tensor | None], None]
    """begin(target, terms, reduction, share, numbers, factor): numbers = `share` and a count, of a mean the
    number of targets that count, else 1; where there is room for it factor = 1 / share / count."""
    together: Callable[[int, int, Any], int]
    """together(N, V, tiling): of how many rows `chunk` adds the losses up where nobody wants each."""
    chunk: Callable[..., None]
    """chunk(x, weight, bias, logits, target, losses, scale, terms, gradients, tiling): the losses of rows of
    x, each or `together`, and where `gradients` in `logits` the derivative of each row's by its logits times
    its `scale`. Without them `logits` may get anything."""
    to_rows: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    """to_rows(grads, weight, out, factor): out = grads weight, times a `factor` if any, rounded once."""
    scales: Callable[[int, torch.dtype], bool]
    """scales(V, dtype): whether `to_rows` takes a factor."""
    part: Callable[[Tensor, Tensor, int, Tensor, bool, Terms, Any], None]
    """part(logits, target, begin, state, first, terms, tiling): adds the classes from `begin` on to `state`,
    [5, N]: each row's largest logit, sum of exponentials below it, logit of its target, any one logit, set by
    the call that is the `first`, and with label smoothing the sum of what logits are beyond that one. Rows
    that are ignored may get anything."""
    slopes: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor, int, Terms, Any], None]
    """slopes(logits, target, begin, most, weights, factors, V, terms, tiling): writes over logits l of the
    classes from `begin` on their gradients, 0 in rows that are ignored, elsewhere
    factors (weights exp(l - most) - smoothing / V - (1 - smoothing) [target])."""
    finish: Callable[[Tensor, Tensor, Tensor], None]
    """finish(losses, numbers, loss): loss = the sum of `losses` over the count that `begin` wrote."""
    multiply: Callable[..., None]
    """multiply(scaled, dloss, factor, of_x, dx, of_weight, dweight, of_bias, dbias): what is kept times dloss
    and `factor`, x's, if `scaled`, times dloss alone. Nothing where there is no room; room may be what is
    kept."""
    tiling: Callable[[int, int, int, torch.dtype], Any]
    """tiling(N, V, D, dtype): the default, a NamedTuple that has `rows`, `wide`, `classes`,
    `head` and `tile`: above 0, `chunk` writes no logits without `gradients`."""
