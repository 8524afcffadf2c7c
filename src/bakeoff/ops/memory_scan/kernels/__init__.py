"""The Triton kernels of memory_scan.

Chunks follow each other; a chunk's keys are one launch for each of its products that needs the one before
whole, spread over groups and tiles of hidden units or outputs. Queries need only the states at chunks'
starts: one launch for all chunks. Names: Z, the keys' hidden units before s; A, the errors carried back to
them; F = A s'(Z); E, twice the errors of the answers to keys. A state lies packed, W1, b1, W2, b2, the
momentum behind the memory.
"""

from typing import NamedTuple

import torch

__all__ = ["PAIR", "Tiling", "tilings"]

PAIR = 2
"""Warps that wgmma has no use for."""


_HIP = torch.version.hip is not None
_SHORT = 64
"""Most features over which loops are too short to fetch ahead."""


class Tiling(NamedTuple):
    """Hidden units a program, inputs or outputs a step of its loops, and how it runs."""

    hidden: int
    width: int
    warps: int
    """Of the kernels that follow each other chunk by chunk."""
    stages: int

    @property
    def turned(self) -> bool:
        """Whether products over tokens are taken turned."""
        return self.warps > PAIR


def tilings(direction: str, hidden: int, width: int, itemsize: int, hip: bool = _HIP) -> list[Tiling]:
    """The default, then others; `width` is the larger of keys' and values' features, `itemsize` their bytes.

    Products must be mma.sync: with wgmma, which takes four warps and 64 rows, Triton 3.6 builds kernels here
    that read illegal addresses. So two warps take products as they stand. More take those over tokens turned
    (`turned`), with 16 or 32 rows, in the kernels that chunks wait for; the others keep two.
    """
    short, turned = Tiling(16, 32, PAIR, 1), Tiling(16, 32, 4, 2)
    ahead = Tiling(16, 32, PAIR, 2 if hip else 3)  # AMD's GPUs have 64 KiB of shared memory
    found = [short, Tiling(16, 32, 4, 1), Tiling(16, 16, 4, 1), turned, ahead]
    if hidden > 16:
        found += [Tiling(32, 32, PAIR, 1), Tiling(32, 32, 8, 1), Tiling(16, 32, 8, 1)]
    default = short
    if width > _SHORT and direction == "forward":
        default = ahead
    elif width > _SHORT and itemsize == 2:  # not timed in float32
        default = turned
    return [default, *(tiling for tiling in found if tiling != default)]
