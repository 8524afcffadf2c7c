"""How a tensor lies in memory, as kernels over rows take it."""

import torch

__all__ = ["rows_of"]


def rows_of(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`t` with a dense last dimension and one stride between rows, and that stride; a copy if need be."""
    width = t.shape[-1]
    if t.is_contiguous():
        return t, width
    sizes, strides = t.shape, t.stride()
    step = extent = -1  # between rows, and between blocks of the rows seen so far
    for i in range(t.dim() - 2, -1, -1):
        if sizes[i] == 1:
            continue
        if step < 0:
            step = strides[i]
        elif strides[i] != extent:
            return t.contiguous(), width
        extent = strides[i] * sizes[i]
    if width > 1 and strides[-1] != 1:
        return t.contiguous(), width
    return t, width if step < 0 else step
