"""byte_spectral in Triton: bytes in, D channels out.

A tile is BT positions of one row. Its strip of byte values [BT, W], gathered from the table, which stays in
L1, is multiplied with the phases [W, 2K], which every program makes for itself; features go from registers
into the product with the weight. Nothing of size W or F times the positions is ever in memory, and the
backward makes the spectra again. Real and imaginary parts are neighbours, column 2k and 2k + 1, so that one
thread holds both.

float32 operands are cut into SPLIT bfloat16 parts whose products run on tensor cores: 2 parts keep 16 bits,
for results that are rounded to 8 or 11, 3 parts keep all 24. SPLIT = 0 is a plain float32 product.

Forward: 1 byte in and D * itemsize out a position, C * (4 W K + 2 K D) FLOPs. Backward: dout in,
and for each program as many float32 sums as gradients out.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

__all__ = ["Tiling", "backward_tiling", "block", "constants", "forward_tiling", "span"]


class Tiling(NamedTuple):
    """How a kernel cuts its work: positions and channels of a tile, warps, programs along the positions."""

    positions: int
    channels: int
    warps: int
    programs: int = 2**31 - 1


def span(positions: int, W: int) -> int:
    """Bytes that a tile of `positions` sees, as a power of two."""
    return triton.next_power_of_2(positions + block(W))


def block(size: int) -> int:
    """The power of two that holds `size`, and is enough for a tensor core's operand."""
    return max(16, triton.next_power_of_2(size))


def constants(
    C: int, W: int, K: int, D: int, features: str, dtype: torch.dtype, tensor_cores: bool
) -> dict[str, int | str]:
    """The constants that all kernels share, for results of `dtype`."""
    whole = features == "complex"
    BJ = max(32, 2 * triton.next_power_of_2(K))
    split = 0 if not tensor_cores else 2 if dtype == torch.bfloat16 else 3
    return {
        "C": C, "W": W, "K": K, "F": 2 * K if whole else K, "D": D, "BW": block(W), "BJ": BJ,
        "BF": BJ if whole else BJ // 2, "FEATURES": features, "SPLIT": split,
    }  # fmt: skip


def _positions(split: int, major: int) -> int:
    # Three parts of every product ask for more tensor memory than a multiprocessor of generation 10 has.
    return 32 if split == 3 and major >= 10 else 64


@lru_cache(maxsize=4096)
def forward_tiling(D: int, split: int, major: int) -> Tiling:
    """The forward's tiling for D channels on a GPU of generation `major`.

    A program of more channels makes the spectra again less often.
    """
    channels = min(256 if split == 2 else 128, block(D))
    return Tiling(_positions(split, major), channels, 8 if D > 128 else 4)


@lru_cache(maxsize=4096)
def backward_tiling(D: int, features: str, split: int, sms: int, major: int) -> Tiling:
    """The backward's tiling for D channels on `sms` multiprocessors of generation `major`."""
    channels = min(64, block(D))
    if features == "complex" and split == 2 and D > 1:  # twice the rows of the weight
        return Tiling(128, channels, 8, sms)
    return Tiling(_positions(split, major), channels, 4, 2 * sms)


ROWS, COLUMNS, SUM_WARPS = 128, 32, 8
"""The tile of `_sum_partials`."""
