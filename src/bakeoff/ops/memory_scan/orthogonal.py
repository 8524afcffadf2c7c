"""The orthogonalised update of memory_scan: how a chunk moves a matrix whose step Newton-Schulz iterations
flatten.

The iteration is Jordan et al.'s (2024, Muon); that rows keep their lengths is Zhang et al.'s (2025, Test-Time
Training Done Right).
"""

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "moved", "moved_backward", "newton_schulz"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST = 1e-7
"""Added to lengths that are divided by."""


def newton_schulz(matrices: Tensor, steps: int, narrow: torch.dtype) -> Tensor:
    """NS(X): the nearest half-orthogonal matrices, roughly, of [G, rows, columns].

    X/|X|, then `steps` times X <- a X + (b A + c A^2) X with A = X X'; products are taken in `narrow`.
    """
    return _iterated(matrices, steps, narrow)[0]


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


def moved_backward(
    weight: Tensor, kept: Tensor, step: Tensor, steps: int, narrow: torch.dtype, arriving: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `moved` in weight, kept and step, where `arriving` is that of its result."""
    flat, states = _iterated(step, steps, narrow)
    new = kept[:, None, None] * weight + flat
    old, now = weight.norm(dim=2, keepdim=True), new.norm(dim=2, keepdim=True)
    share = (arriving * new).sum(2, keepdim=True) / (now + _LEAST)
    to_new = (arriving - share * _over(new, now)) * (old / (now + _LEAST))
    to_weight = share * _over(weight, old) + kept[:, None, None] * to_new
    to_kept = (weight * to_new).sum((1, 2))
    return to_weight, to_kept, _iterated_backward(step, states, to_new, narrow)


def _over(x: Tensor, length: Tensor) -> Tensor:
    """x / length, 0 where x is."""
    return torch.where(length > 0, x / length, 0)


def _iterated(matrices: Tensor, steps: int, narrow: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """`newton_schulz`, and X before each step."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = (wide / (wide.norm(dim=(1, 2), keepdim=True) + _LEAST)).to(narrow)
    states = []
    for _ in range(steps):
        states.append(x)
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    done: Tensor = x.mT if tall else x
    return done.to(matrices.dtype), states


def _iterated_backward(
    matrices: Tensor, states: list[Tensor], arriving: Tensor, narrow: torch.dtype
) -> Tensor:
    """With A = X X' and P = b A + c A^2, symmetric: X <- (a + P) X."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide, going = (matrices.mT, arriving.mT) if tall else (matrices, arriving)
    for x in reversed(states):
        back = going.to(narrow)
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        to_polynomial = back @ x.mT
        both = to_polynomial + to_polynomial.mT  # A and P change symmetrically
        to_gram = b * both + c * (both @ gram + gram @ both)
        going = a * going + (polynomial @ back + to_gram @ x).to(going.dtype)
    length = wide.norm(dim=(1, 2), keepdim=True)
    along = (going * wide).sum((1, 2), keepdim=True) / (length + _LEAST)
    found = (going - along * _over(wide, length)) / (length + _LEAST)
    return found.mT if tall else found
