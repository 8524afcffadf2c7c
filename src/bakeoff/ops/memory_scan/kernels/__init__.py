"""The Triton kernels of memory_scan.

Chunks follow each other; a chunk's keys are one launch for each of its products that needs the one before
whole, spread over groups and tiles of hidden units or outputs. Queries need only the states at chunks'
starts: one launch for all chunks. Names: Z, the keys' hidden units before s; A, the errors carried back to
them; F = A s'(Z); E, twice the errors of the answers to keys. A state lies packed, W1, b1, W2, b2, the
momentum behind the memory.
"""

from typing import NamedTuple

__all__ = ["Tiling", "tilings"]


class Tiling(NamedTuple):
    """Hidden units a program, inputs or outputs a step of its loops, and how it runs."""

    hidden: int
    width: int
    warps: int
    stages: int


def tilings(hidden: int) -> list[Tiling]:
    """The default, then others. Always two warps, so that products are mma.sync: with wgmma, which takes four
    warps and 64 rows, Triton 3.6 builds kernels here that read illegal addresses."""
    narrow, wide = Tiling(16, 32, 2, 1), Tiling(32, 32, 2, 1)
    return [narrow, wide] if hidden > 16 else [narrow]
