"""Tensors for kernels that read 16 bytes at a time and refuse, or misread, what begins elsewhere."""

from typing import TypeVar

from torch import Tensor
from torch.compiler import is_compiling

__all__ = ["aligned", "aligned_gradient"]

Given = TypeVar("Given", Tensor, Tensor | None)

_STEP = 16


def aligned(x: Given) -> Given:
    """x, or a copy of it where it doesn't begin at a multiple of 16 bytes, as a slice of another may not.

    Inside torch.compile, where tensors have no address, x.
    """
    return x if x is None or is_compiling() or x.data_ptr() % _STEP == 0 else x.clone()


def aligned_gradient(y: Tensor) -> Tensor:
    """y, made by such a kernel, whose gradient reaches that kernel's backward `aligned`."""
    if y.requires_grad and not is_compiling():
        y.register_hook(aligned)
    return y
