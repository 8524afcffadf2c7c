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
    """Hidden units a program, and how it runs."""

    hidden: int
    warps: int
    stages: int


def tilings(hidden: int) -> list[Tiling]:
    """The default, then others. Always four warps: with eight, Triton 3.6 lays a product of 64 rows out over
    128 (`warpsPerCTA = [8, 1]`), and wgmma reads past its operand."""
    wide = min(32, max(16, 1 << (hidden - 1).bit_length()))
    return [Tiling(wide, 4, 1), Tiling(wide, 4, 2)]
