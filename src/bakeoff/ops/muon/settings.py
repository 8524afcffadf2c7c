"""What one step works on: lists of matrices of one shape, and the settings of the step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["COEFFICIENTS", "EPS", "SCALES", "Matrices", "Settings", "arguments", "size_of"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of an iteration X <- a X + (b A + c A^2) X."""
EPS = 1e-7
"""Added to the norm that a matrix is divided by."""
SCALES = ("match_rms", "spectral")


class Matrices(NamedTuple):
    """Lists of equal length, one entry a matrix."""

    params: list[Tensor]
    grads: list[Tensor]
    momentum: list[Tensor]
    direction: list[Tensor] | None = None
    """What the rate multiplied in the last step; written."""


class Settings(NamedTuple):
    """The settings of a step. Tensors among them are scalars on the device; the host never reads them."""

    lr: float | Tensor
    momentum_decay: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    steps: int = 5
    scale: str = "match_rms"
    maximize: bool = False
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    lr_mult: Tensor | None = None
    sums: Tensor | None = None
    """[4], written: sum of g*u_prev, g^2, p^2 and u^2 over all elements (see `muon_`)."""


def arguments(args: Sequence[Any]) -> tuple[Matrices, Settings]:
    """The arguments of muon_ as implementations get them, which are those of `Matrices`, then `Settings`."""
    return Matrices(*args[:4]), Settings(*args[4:])


def size_of(shape: Sequence[int], scale: str) -> float:
    """What an orthogonal matrix of this shape is multiplied by."""
    rows, columns = shape
    if scale == "spectral":
        return math.sqrt(max(1.0, rows / max(columns, 1)))
    return 0.2 * math.sqrt(max(rows, columns))
