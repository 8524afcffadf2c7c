"""Orthogonalised steps of large chunks, in PyTorch: functions that write into tensors they are given."""

import torch
from torch import Tensor

from bakeoff.autocast import without_autocast
from bakeoff.ops.memory_scan.reference import COEFFICIENTS, LEAST, iterated, moved

__all__ = ["moved_backward", "orthogonalise", "orthogonalise_backward"]


def _matrices(steps: Tensor, c: int, shape: torch.Size, second: bool) -> Tensor:
    """One of the matrices in row c of `steps` [C, G, both], a view."""
    size = shape[1] * shape[2]
    flat = steps[c, :, -size:] if second else steps[c, :, :size]
    return flat.unflatten(1, shape[1:])  # type: ignore[no-any-return]


def orthogonalise(
    step: Tensor, weight: Tensor, ends: Tensor, steps: Tensor, c: int, second: bool, count: int,
    narrow: torch.dtype, new: Tensor,
) -> None:  # fmt: skip
    """Fills `new`, and keeps the step."""
    _matrices(steps, c, weight.shape, second).copy_(step)
    with without_autocast(weight):
        new.copy_(moved(weight, ends[:, c, 0], step, count, narrow))


def orthogonalise_backward(
    weight: Tensor, ends: Tensor, steps: Tensor, c: int, second: bool, count: int, narrow: torch.dtype,
    arriving: Tensor, to_weight: Tensor, to_step: Tensor, to_beta: Tensor,
) -> None:  # fmt: skip
    """Fills `to_weight` and `to_step`, adds to `to_beta`."""
    step = _matrices(steps, c, weight.shape, second)
    with without_autocast(weight):
        found = moved_backward(weight, ends[:, c, 0], step, count, narrow, arriving)
    to_weight.copy_(found[0])
    to_step.copy_(found[2])
    to_beta[c].add_(found[1])


def moved_backward(
    weight: Tensor, kept: Tensor, step: Tensor, steps: int, narrow: torch.dtype, arriving: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `moved` in weight, kept and step, where `arriving` is that of its result."""
    flat, states = iterated(step, steps, narrow)
    new = kept[:, None, None] * weight + flat
    old, now = weight.norm(dim=2, keepdim=True), new.norm(dim=2, keepdim=True)
    share = (arriving * new).sum(2, keepdim=True) / (now + LEAST)
    to_new = (arriving - share * _over(new, now)) * (old / (now + LEAST))
    to_weight = share * _over(weight, old) + kept[:, None, None] * to_new
    to_kept = (weight * to_new).sum((1, 2))
    return to_weight, to_kept, _iterated_backward(step, states, to_new, narrow)


def _over(x: Tensor, length: Tensor) -> Tensor:
    """x / length, 0 where x is."""
    return torch.where(length > 0, x / length, 0)


def _iterated_backward(
    matrices: Tensor, states: list[Tensor], arriving: Tensor, narrow: torch.dtype
) -> Tensor:
    """With A = X X' and P = b A + c A^2, symmetric: X <- (a + P) X.

    What goes back is rounded after each step, as autograd does: in float32 it would come out 0.1 % shorter,
    as X's own rounding makes it.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide, arrived = (matrices.mT, arriving.mT) if tall else (matrices, arriving)
    back = arrived.to(narrow)
    for x in reversed(states):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        to_polynomial = back @ x.mT
        both = to_polynomial + to_polynomial.mT  # A and P change symmetrically
        to_gram = b * both + c * (both @ gram + gram @ both)
        back = a * back + polynomial @ back + to_gram @ x
    going = back.to(arriving.dtype)
    length = wide.norm(dim=(1, 2), keepdim=True)
    along = (going * wide).sum((1, 2), keepdim=True) / (length + LEAST)
    found: Tensor = (going - along * _over(wide, length)) / (length + LEAST)
    return found.mT if tall else found
