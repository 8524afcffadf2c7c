"""How the kernels that normalise and rotate are cut into programs, and what they are launched with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bakeoff.kernels.layout import alignment, tile_of
from bakeoff.ops.rotary.kernels import Tiling

__all__ = [
    "SUM_TILING",
    "BackwardTiling",
    "backward_launch",
    "backward_tilings",
    "forward_launch",
    "forward_tilings",
]

_LANES = 64 if torch.version.hip else 32  # threads of a warp

SUM_TILING = (256, 8, 4)
"""Partials and columns of a tile of the weights' final sum, and its warps."""


class BackwardTiling(NamedTuple):
    """How the backward is cut into programs: as `Tiling`, which walk over several tiles."""

    tile: int
    heads: int
    access: int
    programs: int
    """Of a multiprocessor; 0: a program for each tile, where no weight's gradient is asked for."""
    stages: int
    """Tiles that a program has under way at a time."""


def forward_tilings(case: Any) -> list[Tiling]:
    """What the forward may be launched with: the default, then larger and smaller tiles, fewer heads of more
    tokens, more or less work a thread."""
    del case
    return [
        Tiling(2048, 64, 16),
        Tiling(4096, 64, 16),
        Tiling(1024, 64, 16),
        Tiling(2048, 64, 8),
        Tiling(4096, 64, 32),
        Tiling(2048, 4, 16),
        Tiling(2048, 1, 16),
        Tiling(512, 64, 16),
        Tiling(8192, 64, 32),
    ]


def backward_tilings(case: Any) -> list[BackwardTiling]:
    """What the backward may be launched with: the default, then others as in the forward, with more programs
    or more tiles under way."""
    if not any(weight is not None and weight.requires_grad for weight in (case.q_weight, case.k_weight)):
        return [
            BackwardTiling(tile, heads, access, 0, 1)
            for tile, heads, access in (
                (2048, 64, 16), (1024, 64, 16), (4096, 64, 16), (2048, 64, 8), (2048, 4, 16), (2048, 1, 16),
            )
        ]  # fmt: skip
    return [
        BackwardTiling(2048, 64, 16, 3, 2),
        BackwardTiling(1024, 64, 16, 6, 2),
        BackwardTiling(2048, 64, 8, 3, 2),
        BackwardTiling(2048, 64, 16, 3, 3),
        BackwardTiling(1024, 64, 16, 7, 1),
        BackwardTiling(2048, 64, 16, 4, 2),
        BackwardTiling(4096, 64, 16, 2, 2),
        BackwardTiling(2048, 4, 16, 3, 2),
        BackwardTiling(2048, 1, 16, 3, 2),
        BackwardTiling(512, 64, 16, 12, 2),
    ]


def forward_launch(
    q: Any, k: Any, table_shape: Sequence[int], row: int, *, position_ids: int, interleaved: bool,
    head_major: tuple[bool, bool], tiling: Tiling | None = None, lanes: int = _LANES,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid, and the kernel's numbers and constants by name, for q and k whose last dimensions are
    contiguous: anything that has shape, stride() and a dtype.

    Table rows lie `row` apart; `position_ids` is how many dimensions they have, or 0. `head_major` says for
    each result whether its memory is [B, H, T, D].
    """
    steps = _steps(q=q, k=k)
    tiling = tiling or forward_tilings(None)[0]
    numbers = _numbers(q, k, steps, table_shape, row, position_ids, interleaved, tiling, lanes)
    numbers |= {"Q_HEAD_MAJOR": head_major[0], "K_HEAD_MAJOR": head_major[1]}
    return (_tiles(q, numbers, numbers["H"] + numbers["HK"]),), numbers


def backward_launch(
    gq: Any, gk: Any, q: Any, k: Any, table_shape: Sequence[int], row: int, *, position_ids: int,
    interleaved: bool, sums: bool, sms: int, tiling: BackwardTiling | None = None, lanes: int = _LANES,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """As `forward_launch`, of what arrives (gq, gk; None where no gradient is asked for) and of q and k, on a
    device of `sms` multiprocessors; `sums`: with the gradient of a weight."""
    present = {name: x for name, x in {"gq": gq, "gk": gk}.items() if x is not None}
    steps = dict.fromkeys(("gq_b", "gq_t", "gq_h", "gk_b", "gk_t", "gk_h"), 0) | _steps(**present, q=q, k=k)
    tiling = tiling or BackwardTiling(2048, 64, 16, 3 if sums else 0, 2 if sums else 1)
    cut = Tiling(tiling.tile, tiling.heads, tiling.access)
    numbers = _numbers(q, k, steps, table_shape, row, position_ids, interleaved, cut, lanes)
    numbers |= {"B": q.shape[0], "STAGES": tiling.stages}
    heads = [numbers[name] for name, x in (("H", gq), ("HK", gk)) if x is not None]
    tiles = _tiles(q, numbers, max(heads))
    # Each program leaves a gradient of the weights: with these there must be few.
    programs = (tiling.programs or (3 if sums else 0)) * sms
    return (min(tiles, programs or tiles),), numbers


def _tiles(q: Any, numbers: dict[str, Any], heads: int) -> int:
    B, T = q.shape[:2]
    return int(B * -(-T // numbers["BLOCK_T"]) * (heads // numbers["BLOCK_H"]))


def _steps(**tensors: Any) -> dict[str, int]:
    """The strides of items, tokens and heads; a dimension of one element may have any, and 0 keeps what is
    known of the others."""
    return {
        f"{name}_{axis}": 0 if size == 1 else step
        for name, x in tensors.items()
        for axis, size, step in zip("bth", x.shape, x.stride(), strict=False)
    }


def _numbers(
    q: Any, k: Any, steps: dict[str, int], table_shape: Sequence[int], row: int, position_ids: int,
    interleaved: bool, tiling: Tiling, lanes: int,
) -> dict[str, Any]:  # fmt: skip
    """What both kernels take."""
    _, T, H, D = q.shape
    HK = k.shape[2]
    rows, half = table_shape
    tokens_first = q.stride()[1] < q.stride()[2]
    cut = _blocks(T, H | HK, D, half, q.dtype.itemsize, tokens_first, tiling, lanes)
    return {
        **steps, "T": T, "S": rows, "row": row, "H": H, "HK": HK, "D": D, "HALF": half,
        "INTERLEAVED": interleaved, "IDS": position_ids, "VECTOR": alignment(*steps.values()),
        "TABLE_VECTOR": alignment(row), **cut,
    }  # fmt: skip


def _blocks(
    T: int, heads: int, D: int, half: int, itemsize: int, tokens_first: bool, tiling: Tiling, lanes: int
) -> dict[str, int]:  # fmt: skip
    """The shape of a tile, and num_warps such that a thread holds up to `access` bytes of each half of rows.

    What isn't turned counts half to either. A power of two that divides `heads` divides the heads of q and of
    k."""
    block, rest = tile_of(half), tile_of(D - 2 * half)
    held = (block + (rest // 2 if 2 * half < D else 0)) * itemsize  # bytes of half a row
    rows = 1 << max(0, (tiling.tile // held).bit_length() - 1)
    block_h = 1 if tokens_first else min(rows, tiling.heads, heads & -heads or 1)
    block_t = min(rows // block_h, tile_of(T))
    warps = tile_of(-(-block_t * block_h * held // (tiling.access * lanes)))
    return {
        "BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK": block, "REST": rest, "num_warps": min(8, warps),
    }  # fmt: skip
