"""Attention block by block: float32 accumulators, maxima and sums that no step rounds.

A block has queries and keys of one branch, and every block of every branch goes into one softmax: the
mixture of branches by their log-sum-exp is just that. With `detached` mixing weights each branch has its own.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "Slopes", "State", "finished", "started", "take", "take_back"]

_SCORES = 1 << 26  # that exist at a time


class Rows(NamedTuple):
    """A block on a device: [segments, kv heads, rows]. For a missing row, `queries` and `keys` are one past
    the last."""

    branch: int
    queries: Tensor
    """Local tokens."""
    keys: Tensor
    """Local tokens, or places in the rows of a peer."""
    last: Tensor
    """The last token that each query may see."""
    tokens: Tensor
    """Which token each key is; beyond all queries' last where it is missing."""
    masked: bool
    """Whether any query may not see any key."""


class State(NamedTuple):
    """Running softmaxes, [branches or 1, B, tokens + 1, kv heads, queries a kv head(, D)]; the last token
    takes what is written for missing rows."""

    acc: Tensor
    top: Tensor
    total: Tensor


class Slopes(NamedTuple):
    """Backward: what all blocks share, and the gradient of q that they add to; shapes as in `State`."""

    dy: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor


def started(q: Tensor, branches: int) -> State:
    """Softmaxes of nothing yet for q [B, tokens + 1, kv heads, queries a kv head, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    acc = q.new_zeros((branches, *q.shape), dtype=wide)
    top = q.new_full(acc.shape[:-1], -torch.inf, dtype=wide)
    return State(acc, top, torch.zeros_like(top))


def finished(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs of each softmax, their mixture, its log-sum-exp); queries that saw nothing give 0 and -inf."""
    seen = state.total > 0
    outputs = state.acc / torch.where(seen, state.total, 1.0)[..., None]
    each = torch.where(seen, state.top + state.total.log(), -torch.inf)
    best = each.amax(0)
    lse = each.sub(torch.where(best > -torch.inf, best, 0.0)).exp().sum(0).log() + best
    weights = torch.exp(each - torch.where(best > -torch.inf, lse, 0.0))
    return outputs, (weights[..., None] * outputs).sum(0), lse


def take(state: State, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Adds a block to `state`; k and v [segments, kv heads, rows, B, D]."""
    acc, top, total = (part[rows.branch % len(state.acc)] for part in state)
    heads = torch.arange(q.shape[2], device=q.device)[:, None]
    for n, part in _chunks(rows, q):
        t, key, value = rows.queries[n, :, part], k[n].to(acc.dtype), v[n].to(acc.dtype)
        scores = _scores(rows, n, part, q[:, t, heads].to(acc.dtype), key, scale)
        old = top[:, t, heads]
        new = torch.maximum(old, scores.amax(-1))
        base = torch.where(new > -torch.inf, new, 0.0)
        weights, kept = torch.exp(scores - base[..., None]), torch.exp(old - base)
        top[:, t, heads] = new
        total[:, t, heads] = total[:, t, heads] * kept + weights.sum(-1)
        acc[:, t, heads] = acc[:, t, heads] * kept[..., None] + torch.einsum(
            "bnhqgk,nhkbd->bnhqgd", weights, value
        )


def take_back(
    slopes: Slopes, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Adds a block's share to the gradient of q; returns those of its k and v."""
    wide = slopes.dq.dtype
    delta = slopes.delta[rows.branch % len(slopes.delta)]
    heads = torch.arange(q.shape[2], device=q.device)[:, None]
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for n, part in _chunks(rows, q):
        t, key, value = rows.queries[n, :, part], k[n].to(wide), v[n].to(wide)
        query, dy = q[:, t, heads].to(wide), slopes.dy[:, t, heads]
        scores = _scores(rows, n, part, query, key, scale)
        weights = torch.exp(scores - slopes.lse[:, t, heads][..., None])
        dv[n] += torch.einsum("bnhqgk,bnhqgd->nhkbd", weights, dy)
        slope = torch.einsum("bnhqgd,nhkbd->bnhqgk", dy, value) - delta[:, t, heads][..., None]
        slope *= weights * scale
        dk[n] += torch.einsum("bnhqgk,bnhqgd->nhkbd", slope, query)
        slopes.dq[:, t, heads] += torch.einsum("bnhqgk,nhkbd->bnhqgd", slope, key)
    return dk, dv


def _scores(rows: Rows, n: slice, part: slice, q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bnhqgd,nhkbd->bnhqgk", q, k) * scale
    if rows.masked:
        unseen = rows.tokens[n, :, None, :] > rows.last[n, :, part, None]
        scores.masked_fill_(unseen[None, :, :, :, None], -torch.inf)
    return scores


def _chunks(rows: Rows, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Segments and query rows whose scores fit."""
    segments, _, count = rows.queries.shape
    width = q.shape[0] * q.shape[2] * q.shape[3] * rows.keys.shape[2]  # scores a query row of all heads
    step = max(1, min(count, _SCORES // max(1, width)))
    items = max(1, _SCORES // max(1, width * step))
    for n in range(0, segments, items):
        for row in range(0, count, step):
            yield slice(n, n + items), slice(row, row + step)
