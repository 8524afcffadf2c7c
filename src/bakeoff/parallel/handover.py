"""Work that a rank does for another: attention of queries that come to its own keys.

Forward returns each row's accumulator, maximum and sum, backward the gradient of the query, all in float32.
The gradients of the keys and values stay here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.parallel import blocks
from bakeoff.parallel.blocks import Rows, Slopes, State
from bakeoff.parallel.exchange import Layout
from bakeoff.parallel.peers import Arrival, Kind, local_places, places_of
from bakeoff.parallel.rows import handed_rows

__all__ = ["add_gradients", "add_results", "answered", "answered_back", "own_keys", "told"]


def answered(
    layout: Layout, user: int, rank: int, sent: Tensor, k: Tensor, v: Tensor, scale: float, softmaxes: int
) -> Tensor:
    """What `rank` makes of the queries of `user`.

    Args:
        sent: [rows, 1, B, queries a kv head, D].

    Returns:
        [rows, softmaxes, B, queries a kv head, D + 2]: the accumulator, the maximum, the sum.
    """
    found = handed_rows(layout, user, rank, k.device)
    (q,) = _spread(layout, user, rank, sent, found)
    state = blocks.started(q, softmaxes)
    for rows in found:
        blocks.take(state, rows, q, *own_keys(rows, k, v), scale)
    t, h = places_of(layout, user, rank, k.device)
    acc, top, total = (part[:, :, t, h] for part in state)
    return torch.cat((acc, top[..., None], total[..., None]), -1).permute(2, 0, 1, 3, 4).contiguous()


def add_results(state: State, layout: Layout, rank: int, answer: Arrival) -> None:
    """Adds what another rank made of rows of `rank` to its softmaxes."""
    results = answer.wait().permute(1, 2, 0, 3, 4)
    t, h = local_places(layout, rank, answer.source, results.device)
    blocks.add_state(state, State(results[..., :-2], results[..., -2], results[..., -1]), t, h)


def told(q: Tensor, slopes: Slopes, outputs: Tensor | None) -> dict[Kind, Sequence[Tensor]]:
    """What `answered_back` needs of queries: some in their dtype, some in float32.

    Args:
        outputs: of the softmax, where attention kernels are to find `delta` by them.
    """
    shown = [q, slopes.dy] + ([] if outputs is None else [outputs])
    return {Kind.QUERIES: shown, Kind.STATISTICS: [slopes.lse[..., None], *slopes.delta[..., None]]}


def answered_back(
    layout: Layout, user: int, rank: int, sent: Tensor, statistics: Tensor, k: Tensor, v: Tensor,
    scale: float, dk: Tensor, dv: Tensor,
) -> Tensor:  # fmt: skip
    """The gradients of the queries of `user`, [rows, B, queries a kv head, D] in float32; adds to dk and dv.

    Args:
        sent: [rows, 2 or 3, B, queries a kv head, D]: queries, gradients of y, and outputs if kernels may
            take the blocks.
        statistics: [rows, 1 + softmaxes, B, queries a kv head, 1]: lse and deltas.
    """
    found = handed_rows(layout, user, rank, k.device)
    q, dy, *outputs = _spread(layout, user, rank, sent, found)
    lse, *deltas = (x[..., 0] for x in _spread(layout, user, rank, statistics, found))
    slopes = Slopes(
        dy, outputs[0][None] if outputs else None, lse, torch.stack(deltas),
        torch.zeros_like(q, dtype=dk.dtype),
    )  # fmt: skip
    for rows in found:
        one, two = blocks.take_back(slopes, rows, q, *own_keys(rows, k, v), scale)
        blocks.add_keys(dk, rows, one)
        blocks.add_keys(dv, rows, two)
    t, h = places_of(layout, user, rank, k.device)
    return slopes.dq[:, t, h].transpose(0, 1).contiguous()


def add_gradients(dq: Tensor, layout: Layout, rank: int, answer: Arrival) -> None:
    """Adds the gradients that another rank found of queries of `rank`."""
    results = answer.wait()
    t, h = local_places(layout, rank, answer.source, results.device)
    dq[:, t, h] += results.transpose(0, 1)


def _spread(layout: Layout, user: int, rank: int, sent: Tensor, found: Sequence[Rows]) -> list[Tensor]:
    """Each tensor of [rows, tensors, B, ...] as [B, tokens, kv heads, ...] of the tokens handed over, with
    one more for missing rows. What wasn't sent is 0, and nothing reads it."""
    first, end = layout.handed_part(user, rank)
    spare = int(not all(rows.whole for rows in found))
    t, h = places_of(layout, user, rank, sent.device)
    held = sent.new_zeros((*sent.shape[1:3], end - first + spare, layout.heads, *sent.shape[3:]))
    held[:, :, t, h] = sent.permute(1, 2, 0, *range(3, sent.dim()))
    return list(held)


def own_keys(rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A block's keys and values among own tokens, [segments, kv heads, rows, B, D]."""
    t = rows.keys.clamp(max=k.shape[1] - 1)
    heads = torch.arange(k.shape[2], device=k.device)[:, None]
    return k[:, t, heads].permute(1, 2, 3, 0, 4), v[:, t, heads].permute(1, 2, 3, 0, 4)
