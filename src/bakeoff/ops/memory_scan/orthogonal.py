"""The orthogonalised update of memory_scan: how a chunk moves a matrix whose step Newton-Schulz iterations
flatten.

The iteration is Jordan et al.'s (2024, Muon); that rows keep their lengths is Zhang et al.'s (2025, Test-Time
Training Done Right).
"""

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "moved", "newton_schulz"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST = 1e-7
"""Added to lengths that are divided by."""


def newton_schulz(matrices: Tensor, steps: int, narrow: torch.dtype) -> Tensor:
    """NS(X): the nearest half-orthogonal matrices, roughly, of [G, rows, columns].

    X/|X|, then `steps` times X <- a X + (b A + c A^2) X with A = X X'; products are taken in `narrow`.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = (wide / (wide.norm(dim=(1, 2), keepdim=True) + _LEAST)).to(narrow)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    done: Tensor = x.mT if tall else x
    return done.to(matrices.dtype)


def moved(weight: Tensor, kept: Tensor, step: Tensor, steps: int, narrow: torch.dtype) -> Tensor:
    """The matrices after a chunk: kept W + NS(step), whose rows then get the lengths of W's.

    Args:
        weight: W [G, rows, columns], before the chunk.
        kept: [G], what forgetting leaves of W.
        step: [G, rows, columns], by what the chunk moves W without orthogonalisation.
        steps, narrow: as in `newton_schulz`.
    """
    new = kept[:, None, None] * weight + newton_schulz(step, steps, narrow)
    return new * (weight.norm(dim=2, keepdim=True) / (new.norm(dim=2, keepdim=True) + _LEAST))
