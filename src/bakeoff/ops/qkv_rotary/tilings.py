"""How the kernels of `qkv_rotary` are cut into programs: the forward as `rotary` is, and the backward."""

from collections.abc import Sequence
from typing import Any

import torch

from bakeoff.kernels.layout import alignment, tile_of
from bakeoff.ops.rotary import kernels
from bakeoff.ops.rotary.kernels import Tiling, blocks
from bakeoff.ops.rotary.normed import tilings as normed
from bakeoff.ops.rotary.normed.tilings import BackwardTiling

__all__ = ["backward_tilings", "forward_tilings", "normed_launch", "plain_launch"]

_LANES = 64 if torch.version.hip else 32  # threads of a warp

_PLAIN = BackwardTiling(4096, 64, 16, 0, 1)
_NORMED = BackwardTiling(1024, 64, 16, 7, 1)
"""Of the backward with weights: on an H100, with it both directions take 0.91 to 0.93 of the time that they
take with that of `rotary`."""


def forward_tilings(case: Any) -> list[Tiling]:
    """Those of `rotary`."""
    return kernels.tilings(case) if case.q_weight is None else normed.forward_tilings(case)


def backward_tilings(case: Any) -> list[BackwardTiling]:
    """With weights those of `rotary`, another first. Without, a program has one tile, whatever the number of
    programs."""
    if case.q_weight is not None:
        found = normed.backward_tilings(case)
        return sorted(found, key=lambda tiling: tiling != _NORMED)
    return [
        _PLAIN,
        *(_PLAIN._replace(tile=tile) for tile in (2048, 8192, 1024)),
        _PLAIN._replace(access=8),
        _PLAIN._replace(tile=8192, access=32),
        _PLAIN._replace(heads=4),
        _PLAIN._replace(heads=1),
        _PLAIN._replace(tile=8192, heads=4),
        _PLAIN._replace(tile=512),
    ]


def plain_launch(
    shape: Sequence[int], kv_heads: int, arriving: dict[str, Any], itemsize: int, table_shape: Sequence[int],
    row: int, *, position_ids: int, interleaved: bool, tiling: BackwardTiling | None = None,
    lanes: int = _LANES,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid, and the kernel's numbers and constants by name, where nothing is normalised.

    `shape` is that of q, [B, T, H, D]; `arriving` are gq, gk and gv, None where nothing arrives: anything
    that has shape and stride(). Table rows lie `row` apart; `position_ids` is how many dimensions they have,
    or 0.
    """
    B, T, H, D = shape
    rows, half = table_shape
    steps, heads_outside = strides(arriving)
    cut = tiling or _PLAIN
    block_t, block_h, block, warps = blocks(
        T, H, kv_heads, D, half, itemsize, heads_outside, Tiling(cut.tile, cut.heads, cut.access), lanes
    )
    numbers = {
        **steps, "T": T, "S": rows, "row": row, "H": H, "HK": kv_heads, "D": D, "HALF": half,
        "INTERLEAVED": interleaved, "IDS": position_ids, "VECTOR": alignment(*steps.values()),
        "TABLE_VECTOR": alignment(row), "BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK": block,
        "REST": tile_of(D - 2 * half), "WIDTH": tile_of(D), "num_warps": warps,
    }  # fmt: skip
    return (B * -(-T // block_t) * ((H + 2 * kv_heads) // block_h),), numbers


def normed_launch(
    q: Any, k: Any, arriving: dict[str, Any], table_shape: Sequence[int], row: int, *, position_ids: int,
    interleaved: bool, sums: bool, sms: int, tiling: BackwardTiling | None = None, lanes: int = _LANES,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """As `plain_launch` with weights, of the parts q and k of qkv; `sums`: with the gradient of a weight,
    on a device of `sms` multiprocessors."""
    steps, _ = strides(arriving)
    cut = tiling or (_NORMED if sums else None)
    grid, numbers = normed.backward_launch(
        q, k, q, k, table_shape, row, position_ids=position_ids, interleaved=interleaved, sums=sums, sms=sms,
        tiling=cut, lanes=lanes,
    )  # fmt: skip
    vector = alignment(numbers["VECTOR"], *steps.values())
    return grid, numbers | steps | {"VECTOR": vector, "WIDTH": tile_of(q.shape[3])}


def strides(arriving: dict[str, Any]) -> tuple[dict[str, int], bool]:
    """The strides of items, tokens and heads of what arrives, 0 where a dimension has one element and where
    nothing arrives; and whether heads stand outside of tokens in what arrives for queries or keys."""
    steps = {
        f"{name}_{axis}": 0 if x is None or x.shape[place] == 1 else x.stride()[place]
        for name, x in arriving.items()
        for place, axis in enumerate("bth")
    }
    turned = [x for name, x in arriving.items() if x is not None and name != "gv"]
    return steps, any(x.stride()[1] < x.stride()[2] for x in turned)
