"""Copying: a row holds random symbols, a mark, and the symbols again, which are to be told.

Attention copies rows longer than it was trained on more easily than a state of fixed size can (Jelassi et al.
2024, Repeat After Me); a filter that is the same at every position reaches back a fixed distance only.
"""

import dataclasses

import torch
from torch import Tensor

__all__ = ["Copying", "draw"]

_MARK = 255


@dataclasses.dataclass(frozen=True)
class Copying:
    """How many symbols there are, how many a row holds, rows a step."""

    alphabet: int = 64
    length: int = 128
    rows: int = 32


def draw(task: Copying, generator: torch.Generator, length: int | None = None) -> tuple[Tensor, Tensor]:
    """(ids, targets) [rows, 2 length] of fresh rows; targets are -100 but for the copy, which begins at the
    mark."""
    length = task.length if length is None else length
    symbols = torch.randint(task.alphabet, (task.rows, length), generator=generator)
    mark = torch.full((task.rows, 1), _MARK)
    ids = torch.cat([symbols, mark, symbols[:, :-1]], dim=1)
    targets = torch.full_like(ids, -100)
    targets[:, length:] = symbols
    return ids, targets
