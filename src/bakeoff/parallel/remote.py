"""Attention to rows of other ranks, which they send: own rows meanwhile, then each peer's, in a fixed order.

Own rows go through the op's chosen kernels where a part, taken by itself, has the segments that it has in the
whole. All other blocks go into one float32 softmax, and the two are mixed by their log-sum-exp. Backward
returns the gradients of the exchanged rows to their owners, in float32.
"""

import dataclasses
from collections.abc import Iterator, Sequence
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
from bakeoff.parallel.ulysses import attended

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
    own: bool = True
    """Whether blocks of this rank's own rows are computed beside those of its peers."""


def by_exchange(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, peers: Peers, scale: float, detached: bool, once: bool
) -> tuple[Tensor, Tensor]:
    """(y, lse) of this rank's tokens; `once`: all rows are asked for at once, and kept for backward."""
    phases = None if detached or not q.shape[1] else layout.phases_from(peers.rank)
    if phases is not None and k.requires_grad == v.requires_grad:
        return _beside_kernels(_Call(layout, peers, scale, False, once, own=False), q, k, v, phases)
    return _Exchanged.apply(_Call(layout, peers, scale, detached, once), None, q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def _beside_kernels(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, phases: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """(y, lse): own rows by the op's chosen kernels while those of the peers are on their way."""
    lent = _Lent()
    k, v = _Lend.apply(call, lent, k, v)  # type: ignore[no-untyped-call]
    part = call.layout.part(call.peers.rank)
    own, level = attended(q, k, v, call.layout, part, phases, call.scale, "exact", return_lse=True)
    assert level is not None
    others, other_level = _Exchanged.apply(call, lent, q, k, v)  # type: ignore[no-untyped-call]
    top = torch.maximum(level, other_level).detach()
    top = torch.where(top > -torch.inf, top, 0.0)
    one, two = torch.exp(level - top), torch.exp(other_level - top)
    total = one + two
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    y = ((one / total).mT[..., None] * own + (two / total).mT[..., None] * others).to(q.dtype)
    return y, (top + total.log()).masked_fill(~seen, -torch.inf)


class _Lent:
    """Own rows of a call that are with peers: what these send in forward, and gradients on their way back."""

    arriving: "_Arriving"

    def __init__(self) -> None:
        self.returns: list[Arrival] = []
        self.slopes: tuple[Tensor, Tensor] | None = None


class _Lend(torch.autograd.Function):
    """Keys and values as they are: posts the exchange; backward, which runs last, takes in gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, lent: _Lent, k: Tensor, v: Tensor) -> Any:
        lent.arriving = _Arriving(call, k, v)
        ctx.call, ctx.lent = call, lent
        return k.view_as(k), v.view_as(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> Any:
        lent: _Lent = ctx.lent
        if lent.slopes is None:  # nothing depends on what peers computed with these rows
            return None, None, dk, dv
        for arrival in lent.returns:
            ctx.call.peers.add_returned(ctx.call.layout, arrival, *lent.slopes)
        slopes = (x[:, : dk.shape[1]] + own for x, own in zip(lent.slopes, (dk, dv), strict=True))
        lent.returns, lent.slopes = [], None
        return None, None, *(x.to(dk.dtype) for x in slopes)


class _Exchanged(torch.autograd.Function):
    """All branches over all ranks, or, of rows that are `lent`, over the other ranks, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, lent: _Lent | None, q: Tensor, k: Tensor, v: Tensor) -> Any:
        L, me = q.shape[1], call.peers.rank
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)))
        state = blocks.started(grouped, len(call.layout.pattern.rates) if call.detached else 1)
        arriving = _Arriving(call, k, v) if lent is None else lent.arriving
        for rows in _own(call.layout, me, q.device) if call.own else ():
            blocks.take(state, rows, grouped, *_local(rows, k, v), call.scale)
        kept = []
        for arrival in arriving:
            for rows in _remote(call.layout, me, arrival.source, q.device):
                blocks.take(state, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
            kept += [arrival] if call.once else []
        outputs, y, lse = (x[:, :, :L] if x.dim() == 6 else x[:, :L] for x in blocks.finished(state))
        lse = lse.flatten(2, 3)
        ctx.call, ctx.lent, ctx.kept = call, lent, kept
        ctx.save_for_backward(q, k, v, lse, outputs)
        ctx.set_materialize_grads(False)
        y = y.flatten(2, 3)
        return y.to(q.dtype) if lent is None else y, lse.mT.contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> Any:
        call: _Call = ctx.call
        q, k, v, lse, outputs = ctx.saved_tensors
        L, me, layout = q.shape[1], call.peers.rank, call.layout
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)))
        slopes = _slopes(grouped, lse, outputs, dy, dlse)
        wide = slopes.dq.dtype
        dk, dv = (_padded(torch.zeros_like(x, dtype=wide)) for x in (k, v))
        returns: list[Arrival] = []
        for arrival in ctx.kept if call.once else _Arriving(call, k, v):
            gradients = _padded(torch.zeros_like(arrival.rows, dtype=wide), 0)
            for rows in _remote(layout, me, arrival.source, q.device):
                one, two = blocks.take_back(slopes, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
                gradients[rows.keys, 0] += one
                gradients[rows.keys, 1] += two
            returns.append(call.peers.give_back(layout, arrival.step, gradients[:-1]))
            if not call.once and len(returns) > 1:
                call.peers.add_returned(layout, returns.pop(0), dk, dv)
        dq = slopes.dq[:, :L].flatten(2, 3).to(q.dtype)
        lent: _Lent | None = ctx.lent
        if lent is not None:
            lent.returns, lent.slopes = returns, (dk, dv)
            return None, None, dq, None, None
        heads = torch.arange(k.shape[2], device=k.device)[:, None]
        for rows in _own(layout, me, q.device):
            one, two = blocks.take_back(slopes, rows, grouped, *_local(rows, k, v), call.scale)
            dk[:, rows.keys, heads] += one.permute(3, 0, 1, 2, 4)
            dv[:, rows.keys, heads] += two.permute(3, 0, 1, 2, 4)
        for arrival in returns:
            call.peers.add_returned(layout, arrival, dk, dv)
        dq = slopes.dq[:, :L].flatten(2, 3).to(q.dtype)
        return None, None, dq, dk[:, :L].to(k.dtype), dv[:, :L].to(v.dtype)


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


def _slopes(q: Tensor, lse: Tensor, outputs: Tensor, dy: Tensor | None, dlse: Tensor | None) -> Slopes:
    """What backward of every block needs. Rows that see nothing get lse = inf, and so weights of 0."""
    shape, wide = q[:, :-1].shape, lse.dtype
    dy = torch.zeros(shape, dtype=wide, device=q.device) if dy is None else dy.to(wide).view(shape)
    delta = (dy * outputs).sum(-1)
    if dlse is not None:
        delta = delta - dlse.mT.reshape(shape[:-1])
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).view(shape[:-1])
    lse = torch.nn.functional.pad(lse, (0, 0, 0, 0, 0, 1), value=torch.inf)
    return Slopes(_padded(dy), lse, _padded(delta, 2), torch.zeros_like(q, dtype=wide))


def _padded(x: Tensor, dim: int = 1) -> Tensor:
    """`x` with one more row along `dim`, which stands for missing ones."""
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, 1])


def _local(rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A block's own keys and values, [segments, kv heads, rows, B, D]."""
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
    on = [_on(part, device) for part in (queries, keys, last, tokens)]
    return Rows(block.branch, on[0], on[1], on[2], on[3], masked)


def _on(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Rows of all heads on the device; those of one head, where all select the same."""
    same = rows.shape[1] > 1 and bool((rows == rows[:, :1]).all())
    narrow = np.int32 if rows.max(initial=0) < 2**31 else np.int64
    return torch.from_numpy((rows[:, :1] if same else rows).astype(narrow)).to(device)
