"""Orthogonalised steps of large chunks, in PyTorch: functions that write into tensors they are given."""

import torch
from torch import Tensor

from bakeoff.ops.memory_scan.orthogonal import moved, moved_backward

__all__ = ["orthogonalise", "orthogonalise_backward"]


def _matrices(steps: Tensor, c: int, shape: torch.Size, second: bool) -> Tensor:
    """One of the matrices in row c of `steps` [C, G, both], a view."""
    size = shape[1] * shape[2]
    return (
        steps[c, :, -size:].unflatten(1, shape[1:]) if second else steps[c, :, :size].unflatten(1, shape[1:])
    )


def orthogonalise(
    step: Tensor, weight: Tensor, ends: Tensor, steps: Tensor, c: int, second: bool, count: int,
    narrow: torch.dtype, new: Tensor,
) -> None:  # fmt: skip
    """Fills `new`, and keeps the step."""
    _matrices(steps, c, weight.shape, second).copy_(step)
    with torch.autocast(weight.device.type, enabled=False):
        new.copy_(moved(weight, ends[:, c, 0], step, count, narrow))


def orthogonalise_backward(
    weight: Tensor, ends: Tensor, steps: Tensor, c: int, second: bool, count: int, narrow: torch.dtype,
    arriving: Tensor, to_weight: Tensor, to_step: Tensor, to_beta: Tensor,
) -> None:  # fmt: skip
    """Fills `to_weight` and `to_step`, adds to `to_beta`."""
    step = _matrices(steps, c, weight.shape, second)
    with torch.autocast(weight.device.type, enabled=False):
        found = moved_backward(weight, ends[:, c, 0], step, count, narrow, arriving)
    to_weight.copy_(found[0])
    to_step.copy_(found[2])
    to_beta[c].add_(found[1])
