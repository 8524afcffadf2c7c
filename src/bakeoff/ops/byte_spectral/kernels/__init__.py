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

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from bakeoff.ops.byte_spectral.reference import EPS

__all__ = [
    "BackwardTiling",
    "ForwardTiling",
    "backward_launch",
    "backward_tiling",
    "backward_tilings",
    "block",
    "constants",
    "forward_launch",
    "forward_tiling",
    "forward_tilings",
    "sum_launch",
]

ROWS, COLUMNS, SUM_WARPS = 128, 32, 8
"""The tile of `_sum_partials`."""


class ForwardTiling(NamedTuple):
    """How the forward is cut into programs."""

    positions: int
    """Of a program."""
    channels: int
    """Of a program. The spectra of its positions are made once for every so many channels."""
    warps: int
    stages: int
    """Tiles of the weight that are read ahead, where the table has several columns."""


class BackwardTiling(NamedTuple):
    """How the backward is cut into programs, each of which takes all channels of several tiles."""

    positions: int
    """Of a tile."""
    channels: int
    """Of dout that are held at once."""
    warps: int
    programs: int
    """On each multiprocessor, at most."""


def block(size: int) -> int:
    """The power of two that holds `size`, and is enough for a tensor core's operand."""
    return max(16, triton.next_power_of_2(size))


def constants(
    C: int, W: int, K: int, D: int, features: str, dtype: torch.dtype, tensor_cores: bool
) -> dict[str, Any]:
    """The constants that both kernels share, for results of `dtype`; D is 1 without a weight."""
    whole = features == "complex"
    BJ = max(32, 2 * triton.next_power_of_2(K))
    split = 0 if not tensor_cores else 2 if dtype == torch.bfloat16 else 3
    return {
        "C": C, "W": W, "K": K, "F": 2 * K if whole else K, "D": D, "BW": block(W), "BJ": BJ,
        "BF": BJ if whole else BJ // 2, "FEATURES": features, "EPS": EPS, "SPLIT": split,
    }  # fmt: skip


def forward_tiling(
    sizes: Mapping[str, Any], itemsize: int, generation: int, shared_memory: int
) -> ForwardTiling:
    """The forward's default for the sizes of `constants`, on a GPU of that generation and shared memory."""
    D, split = sizes["D"], sizes["SPLIT"]
    channels = min(256 if split == 2 else 128, block(D))
    stages = 3 if _reads_ahead(sizes) else 1
    tiling = ForwardTiling(_positions(split, generation), channels, 8 if D > 128 else 4, stages)
    if not _fits(tiling, sizes, itemsize, shared_memory):
        tiling = tiling._replace(stages=1)
    while tiling.channels > 16 and not _fits(tiling, sizes, itemsize, shared_memory):
        tiling = tiling._replace(channels=tiling.channels // 2)
    return tiling


def forward_tilings(
    sizes: Mapping[str, Any], itemsize: int, generation: int, shared_memory: int
) -> list[ForwardTiling]:
    """What the forward may be launched with: the default, then those that differ from it least."""
    default = forward_tiling(sizes, itemsize, generation, shared_memory)
    channels, warps = default.channels, 12 - default.warps  # 4 or 8
    others = [
        default._replace(warps=warps),
        default._replace(positions=128),
        default._replace(positions=32),
        default._replace(channels=channels // 2),
        default._replace(channels=channels // 2, warps=warps),
        default._replace(positions=128, channels=channels // 2),
        default._replace(positions=32, warps=warps),
        default._replace(channels=channels * 2),
        *(default._replace(stages=stages) for stages in (3, 2, 1) if _reads_ahead(sizes)),
        default._replace(positions=16, warps=4),
    ]
    most = block(sizes["D"])
    kept = [
        tiling
        for tiling in others
        if 16 <= tiling.channels <= most
        and _fits(tiling, sizes, itemsize, shared_memory)
        and (generation < 10 or tiling.positions <= default.positions)
    ]
    return [*dict.fromkeys([default, *kept])]


def backward_tiling(sizes: Mapping[str, Any], generation: int) -> BackwardTiling:
    """The backward's default for the sizes of `constants`, on a GPU of that generation."""
    D, split = sizes["D"], sizes["SPLIT"]
    channels = min(64, block(D))
    if sizes["FEATURES"] == "complex" and split == 2 and D > 1:  # twice the rows of the weight
        return BackwardTiling(128, channels, 8, 1)
    return BackwardTiling(_positions(split, generation), channels, 4, 2)


def backward_tilings(sizes: Mapping[str, Any], generation: int) -> list[BackwardTiling]:
    """What the backward may be launched with: the default, then those that differ from it least."""
    default = backward_tiling(sizes, generation)
    channels = default.channels
    others = [
        default._replace(warps=12 - default.warps),
        default._replace(programs=3 - default.programs),
        default._replace(positions=64, warps=4, programs=2),
        default._replace(positions=64, warps=8, programs=1),
        default._replace(positions=128, warps=8, programs=1),
        default._replace(channels=channels // 2),
        default._replace(channels=channels * 2, warps=8, programs=1),
        default._replace(programs=4),
    ]
    kept = [
        tiling
        for tiling in others
        if 16 <= tiling.channels <= block(sizes["D"])
        and (generation < 10 or tiling.positions <= default.positions)
    ]
    return [*dict.fromkeys([default, *kept])]


def _positions(split: int, generation: int) -> int:
    # Three parts of every product ask for more tensor memory than a multiprocessor of generation 10 has.
    return 32 if split == 3 and generation >= 10 else 64


def _reads_ahead(sizes: Mapping[str, Any]) -> bool:
    # The loop over the table's columns reads a tile of the weight for each.
    return sizes["C"] > 1 and sizes["D"] > 1


def _fits(tiling: ForwardTiling, sizes: Mapping[str, Any], itemsize: int, shared_memory: int) -> bool:
    # Half of the shared memory may be taken by tiles of the weight; the rest is for phases and values.
    weight = sizes["BF"] * tiling.channels * itemsize if sizes["D"] > 1 else 0
    return tiling.stages * weight <= shared_memory // 2


def forward_launch(
    B: int, T: int, sizes: Mapping[str, Any], tiling: ForwardTiling
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the constants by name; `sizes` are those of `constants`."""
    grid = B * -(-T // tiling.positions), -(-sizes["D"] // tiling.channels)
    return grid, {**sizes, **_tile(sizes, tiling), "num_stages": tiling.stages}


def backward_launch(
    B: int, T: int, sizes: Mapping[str, Any], tiling: BackwardTiling, multiprocessors: int
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the number of tiles and the constants by name; `sizes` are those of `constants`."""
    tiles = B * -(-T // tiling.positions)
    programs = min(tiles, tiling.programs * multiprocessors)
    return (programs,), {"tiles": tiles, **sizes, **_tile(sizes, tiling), "num_stages": 1}


def sum_launch(columns: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid of `_sum_partials`, and its constants by name."""
    return (-(-columns // COLUMNS),), {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": SUM_WARPS}


def _tile(sizes: Mapping[str, Any], tiling: ForwardTiling | BackwardTiling) -> dict[str, int]:
    seen = triton.next_power_of_2(tiling.positions + sizes["BW"])  # bytes that the tile's spectra cover
    return {"BT": tiling.positions, "BD": tiling.channels, "SPAN": seen, "num_warps": tiling.warps}
