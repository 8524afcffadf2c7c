"""The blocks of `exchange` on a device, as places of local tokens or of rows that peers sent."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakeoff.modes import kept_tensors
from bakeoff.parallel.blocks import Rows
from bakeoff.parallel.exchange import PAD, Block, Layout, handed, needs, own_blocks

__all__ = ["handed_rows", "own_rows", "remote_rows", "spare_row"]


@kept_tensors(maxsize=256)
def own_rows(layout: Layout, rank: int, device: torch.device) -> tuple[Rows, ...]:
    """The blocks of a rank with its own keys."""
    first, end = layout.part(rank)

    def at(block: Block) -> NDArray[np.int64]:
        return np.where(block.keys == PAD, end - first, block.keys - first)

    return tuple(
        _rows(layout, layout.part(rank), block, at(block), device) for block in own_blocks(layout, rank)
    )


@kept_tensors(maxsize=256)
def remote_rows(layout: Layout, rank: int, source: int, device: torch.device) -> tuple[Rows, ...]:
    """The blocks of a rank with keys of `source`, as places among the rows that come from there."""
    rows, found = needs(layout, rank, source)
    heads = np.arange(layout.heads)[:, None]

    def at(block: Block) -> NDArray[np.int64]:
        places = np.searchsorted(rows, (block.keys - layout.borders[source]) * layout.heads + heads)
        return np.where(block.keys == PAD, len(rows), places)

    return tuple(_rows(layout, layout.part(rank), block, at(block), device) for block in found)


@kept_tensors(maxsize=256)
def handed_rows(layout: Layout, user: int, rank: int, device: torch.device) -> tuple[Rows, ...]:
    """The blocks that `rank` works on for `user`: queries counted from the first of `Layout.handed_part`, and
    own keys."""
    part, (first, end) = layout.handed_part(user, rank), layout.part(rank)

    def at(block: Block) -> NDArray[np.int64]:
        return np.where(block.keys == PAD, end - first, block.keys - first)

    return tuple(_rows(layout, part, block, at(block), device) for block in handed(layout, user, rank).blocks)


@lru_cache(maxsize=256)
def spare_row(layout: Layout, rank: int, device: torch.device) -> int:
    """1 where a block of this rank lacks rows, which then are read and written behind the last token."""
    others = [other for other in range(len(layout.borders) - 1) if other != rank]
    found = [own_rows(layout, rank, device)]
    found += [remote_rows(layout, rank, source, device) for source in others]
    found += [handed_rows(layout, user, rank, device) for user in others]
    return int(not all(rows.whole for part in found for rows in part))


def _rows(
    layout: Layout, part: tuple[int, int], block: Block, keys: NDArray[np.int64], device: torch.device
) -> Rows:
    """`block` with queries counted from the first of `part`, and these places of its keys."""
    first, end = part
    queries = np.where(block.queries == PAD, end - first, block.queries - first)
    last = block.queries if layout.causal else np.full_like(block.queries, layout.tokens)
    tokens = np.where(block.keys == PAD, layout.tokens + 1, block.keys)
    masked = bool(tokens.max(initial=0) > last.min(initial=layout.tokens))
    whole = bool((block.queries != PAD).all() and (block.keys != PAD).all())
    diagonal = np.array_equal(block.queries, block.keys)
    on = [_on(part, device) for part in (queries, keys, last, tokens)]
    return Rows(
        block.branch, on[0], on[1], on[2], on[3], masked, whole, diagonal, _span(queries) if whole else None
    )


def _span(rows: NDArray[np.int64]) -> tuple[int, int] | None:
    """The first row and one past the last, where all heads have all rows between them in order."""
    alike = rows[:, :1].ravel()
    if not (rows == rows[:, :1]).all() or (np.diff(alike) != 1).any():
        return None
    return int(alike[0]), int(alike[-1]) + 1


def _on(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Rows of all heads on the device; those of one head, where all select the same."""
    same = rows.shape[1] > 1 and bool((rows == rows[:, :1]).all())
    narrow = np.int32 if rows.max(initial=0) < 2**31 else np.int64
    return torch.from_numpy((rows[:, :1] if same else rows).astype(narrow)).to(device)
