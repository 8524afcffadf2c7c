"""How the kernels of memory_update are launched: precision, tiles, and the sizes that follow from them."""

from typing import Any, NamedTuple

import torch

__all__ = [
    "BENT",
    "BLOCK",
    "Tiling",
    "across",
    "blocks",
    "gradient_programs",
    "tiling_for",
    "tilings",
]

BLOCK = 4096
"""Elements that one program of an elementwise pass takes."""
BENT = 64
"""Most columns of a tile that takes two derivatives of the activation: more don't fit into registers."""
_HIP = torch.version.hip is not None


class Tiling(NamedTuple):
    """How products are cut into tiles: those over rows, and the gradients of matrices, sums over all rows."""

    rows: int
    cols: int
    deep: int
    """Elements of the sum that are multiplied at a time."""
    warps: int
    stages: int
    sum_rows: int
    sum_cols: int
    sum_deep: int
    sum_warps: int
    sum_stages: int

    def over_rows(self, *features: int) -> dict[str, int]:
        """Constants and options of a product over rows; tiles are no wider than what they are cut from."""
        return {
            "ROWS": self.rows, "COLS": min(self.cols, _padded(max(features))),
            "DEEP": min(self.deep, _padded(min(features), 32)),
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip

    def over_all(self, *features: int) -> dict[str, int]:
        """Constants and options of a sum over all rows."""
        widest = _padded(max(features))
        return {
            "ROWS": min(self.sum_rows, widest), "COLS": min(self.sum_cols, widest), "DEEP": self.sum_deep,
            "num_warps": self.sum_warps, "num_stages": self.sum_stages,
        }  # fmt: skip


def _padded(size: int, least: int = 16) -> int:
    """The next power of two that tensor cores take."""
    return max(least, 1 << (size - 1).bit_length())


_SMALL_16 = Tiling(128, 64, 64, 8, 4, 64, 64, 64, 4, 4)
_LARGE_16 = Tiling(64, 128, 64, 4, 4, 128, 128, 64, 8, 4)
_SMALL_32 = Tiling(128, 64, 32, 8, 3, 64, 64, 32, 4, 3)
_LARGE_32 = Tiling(128, 64, 32, 8, 3, 128, 128, 32, 8, 3)


_ROWS_16 = (
    (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4),
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
)  # fmt: skip
_SUMS_16 = (
    (64, 64, 64, 4, 4), (128, 128, 64, 8, 4), (64, 64, 128, 4, 3), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3),
)  # fmt: skip
_ROWS_32 = (
    (64, 64, 32, 4, 3), (128, 64, 32, 8, 3), (64, 64, 32, 8, 3), (64, 128, 32, 4, 3), (128, 128, 32, 8, 2),
)  # fmt: skip
_SUMS_32 = (
    (64, 64, 32, 4, 3), (64, 64, 32, 8, 3), (64, 64, 64, 8, 2), (128, 64, 32, 8, 3), (128, 128, 32, 8, 3),
)  # fmt: skip


def tiling_for(
    G: int, N: int, D: int, H: int, V: int, itemsize: int, multiprocessors: int, hip: bool = _HIP
) -> Tiling:
    """The default: large tiles where there are enough of them for every multiprocessor, else small ones."""
    small, large = (_SMALL_16, _LARGE_16) if itemsize == 2 else (_SMALL_32, _LARGE_32)
    least = min(D, H, V)
    over_rows = G * -(-N // large.rows) * -(-least // large.cols)
    over_all = G * (
        -(-H // large.sum_rows) * -(-D // large.sum_cols) + -(-V // large.sum_rows) * -(-H // large.sum_cols)
    )
    rows = large if over_rows >= multiprocessors else small
    sums = large if over_all >= multiprocessors else small
    tiling = Tiling(*rows[:5], *sums[5:])
    # AMD's GPUs have 64 KiB of shared memory.
    return tiling._replace(stages=3, sum_stages=3) if hip else tiling


def tilings(case: Any, multiprocessors: int) -> list[Tiling]:
    """What a direction may be launched with for a case: the default, then others for rows and for sums."""
    (G, N, D), H, V = case.k.shape, case.memory_w1.shape[1], case.v.shape[2]
    default = tiling_for(G, N, D, H, V, case.k.dtype.itemsize, multiprocessors)
    rows, sums = (_ROWS_16, _SUMS_16) if case.k.dtype.itemsize == 2 else (_ROWS_32, _SUMS_32)
    found = [default]
    found += [Tiling(*tile, *default[5:]) for tile in rows]
    found += [Tiling(*default[:5], *tile) for tile in sums]
    return list(dict.fromkeys(found))


def blocks(D: int, H: int, V: int) -> int:
    """Programs of an elementwise pass over one group's memory."""
    return sum(-(-size // BLOCK) for size in (H * D, H, V * H, V))


def across(width: int, cols: int) -> int:
    """Tiles side by side."""
    return -(-width // cols)


def gradient_programs(D: int, H: int, V: int, rows: int, cols: int) -> int:
    """Programs of the matrices' gradients for one group: tiles of both, and pieces of both biases."""
    tiles = across(H, rows) * across(D, cols) + across(V, rows) * across(H, cols)
    return tiles + across(H, cols) + across(V, cols)


def flat(G: int, D: int, H: int, V: int) -> tuple[int, int]:
    """The shape of all groups' gradients."""
    return G, H * D + H + V * H + V
