"""How a tensor lies in memory, as kernels over rows take it."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bakeoff.kernels.plan import Plan

__all__ = ["alignment", "empty_like", "laid_out", "row_stride", "tile_of"]


def row_stride(t: torch.Tensor) -> int | None:
    """The one distance between rows of `t` [..., D] in elements; None where rows lie otherwise, or where the
    last dimension has gaps."""
    width = t.shape[-1]
    if t.is_contiguous():
        return width
    sizes, strides = t.shape, t.stride()
    if width > 1 and strides[-1] != 1:
        return None
    step = extent = -1  # between rows, and between blocks of the rows seen so far
    for i in range(t.dim() - 2, -1, -1):
        if sizes[i] == 1:
            continue
        if step < 0:
            step = strides[i]
        elif strides[i] != extent:
            return None
        extent = strides[i] * sizes[i]
    return width if step < 0 else step


def alignment(*elements: int) -> int:
    """The greatest power of two up to 16 that divides every number: in 16-bit dtypes and wider, rows whose
    strides it divides by 8 can be read 16 bytes at a time."""
    bits = 16
    for number in elements:
        bits |= number
    return bits & -bits


def tile_of(n: int) -> int:
    """The least power of two that is not below n, and at least 1: the size of a tile that holds n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def empty_like(t: torch.Tensor) -> torch.Tensor:
    """An uninitialised contiguous tensor of `t`'s shape and dtype."""
    # torch.empty_like takes half the time of new_empty, and keeps the strides of what isn't contiguous.
    return torch.empty_like(t) if t.is_contiguous() else t.new_empty(t.shape)


def laid_out(
    plan: "Plan", letters: str, **tensors: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors [..., D] with a dense last dimension, and their strides in units of ALIGN elements: x_b and
    x_t of a tensor x for the letters "bt", one for each leading dimension."""
    laid = {n: x if x.stride(-1) == 1 or x.shape[-1] == 1 else plan.contiguous(x) for n, x in tensors.items()}
    strides = {
        f"{name}_{letter}": x.stride(place) if x.shape[place] > 1 else 0
        for name, x in laid.items()
        for place, letter in enumerate(letters)
    }
    align = alignment(*strides.values())
    return laid, {name: stride // align for name, stride in strides.items()} | {"ALIGN": align}
