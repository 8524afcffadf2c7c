"""The Triton kernels of large chunks: products over tokens with what stands behind them, sums over tokens
with the step behind them, and passes over the state."""

from typing import NamedTuple

import torch

__all__ = ["BLOCK", "NARROW", "SCAN", "Tiling", "across", "precision", "tiling_for", "tilings"]

BLOCK = 2048
"""Elements of a matrix a program."""
NARROW = 64
"""Elements of a bias a program."""
SCAN = 1024
"""Tokens that are scanned at once."""
_HIP = torch.version.hip is not None


class Tiling(NamedTuple):
    """How products are cut into tiles: those over tokens, and sums over all tokens."""

    rows: int
    cols: int
    deep: int
    """Elements of the sum that are multiplied at a time."""
    warps: int
    stages: int
    pair_cols: int
    """Columns where two sums are held at a time."""
    slope_cols: int
    """Columns of `_from_slopes`, which also reads and writes most."""
    limit: int
    """Most registers of a thread where its sums take up to half of them, 0 for any number."""
    sum_rows: int
    sum_cols: int
    sum_deep: int
    sum_warps: int
    sum_stages: int

    def over_rows(self, kind: str, *features: int) -> dict[str, int]:
        """Constants and options of products over tokens: "single", a "pair" of them, or "slope"."""
        widest = {"single": self.cols, "pair": self.pair_cols, "slope": self.slope_cols}[kind]
        cols = min(widest, _padded(max(features)))
        tile = {
            "ROWS": self.rows, "COLS": cols, "DEEP": min(self.deep, _padded(min(features), 32)),
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip
        sums = (1 + (kind != "single")) * self.rows * cols // (32 * self.warps)
        return tile | ({"maxnreg": self.limit} if 2 * sums <= self.limit else {})

    def over_all(self, *features: int) -> dict[str, int]:
        """Constants and options of a sum over all tokens."""
        widest = _padded(max(features))
        return {
            "ROWS": min(self.sum_rows, widest), "COLS": min(self.sum_cols, widest), "DEEP": self.sum_deep,
            "num_warps": self.sum_warps, "num_stages": self.sum_stages,
        }  # fmt: skip


def _padded(size: int, least: int = 16) -> int:
    """The next power of two that tensor cores take."""
    return max(least, 1 << (size - 1).bit_length())


# 128 registers let two programs of eight warps share a multiprocessor: one writes while the other multiplies.
_ROWS_16 = (
    (128, 128, 64, 8, 3, 128, 64, 128), (128, 128, 64, 8, 3, 64, 64, 128),
    (128, 128, 64, 8, 3, 128, 128, 128), (128, 256, 64, 8, 3, 128, 64, 0), (64, 128, 64, 4, 3, 64, 64, 0),
)  # fmt: skip
_ROWS_32 = ((128, 64, 32, 8, 3, 64, 64, 0), (64, 64, 32, 4, 3, 32, 32, 0))
_SUMS_16 = {
    # Forward a program holds the sums of memory and momentum.
    "forward": ((128, 128, 64, 8, 3), (64, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 128, 64, 4, 4)),
    "backward": ((128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4)),
}
_SUMS_32 = ((128, 64, 32, 8, 3), (64, 64, 32, 4, 3))


def tiling_for(axis: str, rows: int, H: int, itemsize: int, multiprocessors: int, hip: bool = _HIP) -> Tiling:
    """The default "forward" or "backward": large tiles of products over tokens where there are enough of them
    for every multiprocessor, else small ones. `rows` are all tokens of a chunk."""
    large, *_, small = _ROWS_16 if itemsize == 2 else _ROWS_32
    sums = _SUMS_16[axis] if itemsize == 2 else _SUMS_32
    enough = across(rows, large[0]) * across(H, large[1]) >= multiprocessors
    tiling = Tiling(*(large if enough else small), *sums[hip])
    # AMD's GPUs have 64 KiB of shared memory, and its compiler takes no limit.
    return tiling._replace(limit=0, stages=2, sum_stages=2) if hip else tiling


def tilings(axis: str, rows: int, H: int, itemsize: int, multiprocessors: int) -> list[Tiling]:
    """The default, then others for products over tokens and for sums."""
    default = tiling_for(axis, rows, H, itemsize, multiprocessors)
    over_rows, sums = (_ROWS_16, _SUMS_16[axis]) if itemsize == 2 else (_ROWS_32, _SUMS_32)
    found = [default]
    found += [Tiling(*tile, *default[8:]) for tile in over_rows]
    found += [Tiling(*default[:8], *tile) for tile in sums]
    if _HIP:
        found = [tiling._replace(limit=0, stages=2, sum_stages=2) for tiling in found]
    return list(dict.fromkeys(found))


def across(size: int, each: int) -> int:
    """Programs side by side."""
    return -(-size // each)
