"""Attention to rows of other ranks, which they send: own rows meanwhile, then each peer's, in a fixed order.

All blocks go into one softmax of float32 accumulators. Backward returns the gradients of the exchanged rows
to their owners, in float32.
"""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakeoff.parallel import blocks
from bakeoff.parallel.blocks import Rows, Slopes
from bakeoff.parallel.exchange import PAD, Block, Layout, needs, own_blocks
from bakeoff.parallel.peers import Arrival, Peers

__all__ = ["by_exchange"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is fixed in a call."""

    layout: Layout
    peers: Peers
    scale: float
    detached: bool
    once: bool
    """Whether all peers' rows are asked for at once, and kept for backward."""


def by_exchange(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, peers: Peers, scale: float, detached: bool, once: bool
) -> tuple[Tensor, Tensor]:
    """(y, lse) of this rank's tokens; `once`: all rows are asked for at once, and kept for backward."""
    return _Exchanged.apply(_Call(layout, peers, scale, detached, once), q, k, v)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """All branches over all ranks, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
        L, me = q.shape[1], call.peers.rank
        spare = _spare(call.layout, me, call.peers.size, q.device)
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)), spare)
        state = blocks.started(grouped, len(call.layout.pattern.rates) if call.detached else 1)
        arriving = _Arriving(call, k, v)
        for rows in _own(call.layout, me, q.device):
            blocks.take(state, rows, grouped, *_local(rows, k, v), call.scale)
        kept = []
        for arrival in arriving:
            for rows in _remote(call.layout, me, arrival.source, q.device):
                blocks.take(state, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
            kept += [arrival] if call.once else []
        outputs, y, lse = blocks.finished(state, q.dtype)
        y, lse = y[:, :L].flatten(2, 3), lse[:, :L].flatten(2, 3)
        ctx.call, ctx.kept = call, kept
        ctx.save_for_backward(q, k, v, lse, y, outputs[:, :, :L] if call.detached else None)
        ctx.set_materialize_grads(False)
        return y, lse.mT.contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> Any:
        call: _Call = ctx.call
        q, k, v, lse, y, outputs = ctx.saved_tensors
        L, me, layout = q.shape[1], call.peers.rank, call.layout
        spare = _spare(layout, me, call.peers.size, q.device)
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)), spare)
        if outputs is None:
            outputs = y.unflatten(2, (k.shape[2], -1))[None]
        slopes = _slopes(grouped, lse, outputs, dy, dlse, spare)
        wide = slopes.dq.dtype
        room = k.shape[0], L + spare, *k.shape[2:]
        dk, dv = k.new_zeros(room, dtype=wide), k.new_zeros(room, dtype=wide)
        returns: list[Arrival] = []
        for arrival in ctx.kept if call.once else _Arriving(call, k, v):
            shape = len(arrival.rows) + 1, *arrival.rows.shape[1:]  # the last stands for missing rows
            gradients = arrival.rows.new_zeros(shape, dtype=wide)
            for rows in _remote(layout, me, arrival.source, q.device):
                one, two = blocks.take_back(slopes, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
                gradients[rows.keys, 0] += one
                gradients[rows.keys, 1] += two
            returns.append(call.peers.give_back(layout, arrival.step, gradients[:-1]))
            if not call.once and len(returns) > 1:
                call.peers.add_returned(layout, returns.pop(0), dk, dv)
        for rows in _own(layout, me, q.device):
            one, two = blocks.take_back(slopes, rows, grouped, *_local(rows, k, v), call.scale)
            blocks.add_own(dk, rows, one)
            blocks.add_own(dv, rows, two)
        for arrival in returns:
            call.peers.add_returned(layout, arrival, dk, dv)
        dq = slopes.dq[:, :L].flatten(2, 3).to(q.dtype)
        return None, dq, dk[:, :L].to(k.dtype), dv[:, :L].to(v.dtype)


class _Arriving:
    """What peers send, step by step: posted when made, all at once or one ahead of what is worked on."""

    def __init__(self, call: _Call, k: Tensor, v: Tensor) -> None:
        self.call, self.k, self.v = call, k, v
        steps = list(range(1, call.peers.size))
        self.later = [] if call.once else steps[1:]
        self.posted = self._post(steps if call.once else steps[:1])

    def _post(self, steps: list[int]) -> list[Arrival]:
        return self.call.peers.send_rows(self.call.layout, self.k, self.v, steps) if steps else []

    def __iter__(self) -> Iterator[Arrival]:
        while self.posted:
            arrival = self.posted.pop(0)
            arrival.wait()
            self.posted += self._post([self.later.pop(0)] if self.later else [])
            yield arrival


def _slopes(
    q: Tensor, lse: Tensor, outputs: Tensor, dy: Tensor | None, dlse: Tensor | None, spare: int
) -> Slopes:
    """What backward of every block needs. Rows that see nothing get lse = inf, and so weights of 0."""
    shape, wide = (q.shape[0], q.shape[1] - spare, *q.shape[2:]), lse.dtype
    dy = q.new_zeros(shape) if dy is None else dy.to(q.dtype).view(shape)
    delta = blocks.dotted(dy, outputs, wide)
    if dlse is not None:
        delta = delta - dlse.mT.reshape(shape[:-1])
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).view(shape[:-1])
    told = _padded(outputs, spare, 2) if dlse is None and blocks.kernel(q) is not None else None
    return Slopes(
        _padded(dy, spare), told, _padded(lse, spare, fill=torch.inf), _padded(delta, spare, 2),
        torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format),
    )  # fmt: skip


def _padded(x: Tensor, spare: int, dim: int = 1, fill: float = 0.0) -> Tensor:
    """`x` with `spare` more rows along `dim`, which stand for missing ones."""
    if not spare:
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, spare], value=fill)


@lru_cache(maxsize=256)
def _spare(layout: Layout, rank: int, size: int, device: torch.device) -> int:
    """1 where a block of this rank lacks rows, which then are read and written behind the last token."""
    found = [_own(layout, rank, device)]
    found += [_remote(layout, rank, source, device) for source in range(size) if source != rank]
    return int(not all(rows.whole for part in found for rows in part))


def _local(rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A block's own keys and values, [segments, kv heads, rows, B, D]."""
    if rows.span:
        first, end = rows.span
        cut = (x[:, first:end].unflatten(1, rows.keys.shape[::2]) for x in (k, v))
        one, two = (x.permute(1, 3, 2, 0, 4) for x in cut)
        return one, two
    t = rows.keys.clamp(max=k.shape[1] - 1)
    heads = torch.arange(k.shape[2], device=k.device)[:, None]
    return k[:, t, heads].permute(1, 2, 3, 0, 4), v[:, t, heads].permute(1, 2, 3, 0, 4)


def _of_peer(rows: Rows, held: Tensor) -> tuple[Tensor, Tensor]:
    """A block's keys and values among a peer's rows."""
    at = rows.keys.clamp(max=len(held) - 1)
    return held[at, 0], held[at, 1]


@lru_cache(maxsize=256)
def _own(layout: Layout, rank: int, device: torch.device) -> tuple[Rows, ...]:
    first, end = layout.part(rank)

    def at(block: Block) -> NDArray[np.int64]:
        return np.where(block.keys == PAD, end - first, block.keys - first)

    return tuple(_rows(layout, rank, block, at(block), device) for block in own_blocks(layout, rank))


@lru_cache(maxsize=256)
def _remote(layout: Layout, rank: int, source: int, device: torch.device) -> tuple[Rows, ...]:
    rows, found = needs(layout, rank, source)
    heads = np.arange(layout.heads)[:, None]

    def at(block: Block) -> NDArray[np.int64]:
        places = np.searchsorted(rows, (block.keys - layout.borders[source]) * layout.heads + heads)
        return np.where(block.keys == PAD, len(rows), places)

    return tuple(_rows(layout, rank, block, at(block), device) for block in found)


def _rows(layout: Layout, rank: int, block: Block, keys: NDArray[np.int64], device: torch.device) -> Rows:
    first, end = layout.part(rank)
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
