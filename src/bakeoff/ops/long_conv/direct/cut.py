"""What a launch of `direct` is made of, whichever way its data lie."""

from typing import NamedTuple

from torch import Tensor

from bakeoff.kernels.cuda import CudaKernel

__all__ = ["Cut", "Laid"]


class Laid(NamedTuple):
    """A tensor as a kernel reads or writes it."""

    data: Tensor
    strides: tuple[int, int]
    """From sequence to sequence, and from position to position or from channel to channel."""


class Cut(NamedTuple):
    """A kernel, and how it is launched for one call."""

    kernel: CudaKernel
    blocks: int
    threads: int
    numbers: dict[str, int]
    """By the kernel's names: how many of what there are."""
    sums: tuple[int, int, int]
    """The shape of what the gradients of h and skip are added up from: [.., C, taps] or [.., taps, C]."""
