"""Attention to rows of other ranks, which they send: own rows meanwhile, then each peer's, in a fixed order.

All blocks go into one softmax of float32 accumulators. Backward returns the gradients of the exchanged rows
to their owners, in float32. Of a layout that is `balanced`, some queries go to the keys instead.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.derivatives import once_differentiable
from bakeoff.parallel import blocks, handover
from bakeoff.parallel.blocks import Rows, Slopes
from bakeoff.parallel.exchange import Layout
from bakeoff.parallel.peers import Arrival, Kind, Peers
from bakeoff.parallel.rows import own_rows, remote_rows, spare_row

__all__ = ["by_exchange"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is fixed in a call."""

    layout: Layout
    peers: Peers
    scale: float
    detached: bool
    once: bool
    """Whether all peers' rows are asked for at once, and kept for backward; never of a balanced layout."""
    return_lse: bool

    @property
    def softmaxes(self) -> int:
        """How many a query has: one, or one for each branch."""
        return len(self.layout.pattern.rates) if self.detached else 1


def by_exchange(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, peers: Peers, scale: float, *, detached: bool,
    once: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, lse) of this rank's tokens; `once`: all rows are asked for at once, and kept for backward. Without
    `return_lse`, which is the same on all ranks, nobody takes a gradient through lse."""
    call = _Call(layout, peers, scale, detached, once, return_lse)
    return _Exchanged.apply(call, q, k, v)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """All branches over all ranks, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
        L, me, layout = q.shape[1], call.peers.rank, call.layout
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)), spare_row(layout, me, q.device))
        state = blocks.started(grouped, call.softmaxes)
        arriving = _Arriving(call, k, v, {Kind.QUERIES: (grouped,)})
        for rows in own_rows(layout, me, q.device):
            blocks.take(state, rows, grouped, *_local(rows, k, v), call.scale)
        kept, results = [], list[Arrival]()
        for arrival in arriving:
            for rows in remote_rows(layout, me, arrival.source, q.device):
                blocks.take(state, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
            kept += [arrival] if call.once else []
            if arrival.asked:
                (asked,) = arrival.asked
                made = handover.answered(
                    layout, asked.source, me, asked.wait(), k, v, call.scale, call.softmaxes
                )
                results.append(call.peers.answer(layout, arrival.step, made))
            if len(results) > 1:
                handover.add_results(state, layout, me, results.pop(0))
        for result in results:
            handover.add_results(state, layout, me, result)
        outputs, y, lse = blocks.finished(state, q.dtype)
        y, lse = y[:, :L].flatten(2, 3), lse[:, :L].flatten(2, 3)
        ctx.call, ctx.kept = call, kept
        ctx.save_for_backward(q, k, v, lse, y, outputs[:, :, :L] if call.detached else None)
        ctx.set_materialize_grads(False)
        return y, lse.mT.contiguous()

    @staticmethod
    @once_differentiable("attention over several ranks", "take one rank")
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> Any:
        call: _Call = ctx.call
        q, k, v, lse, y, outputs = ctx.saved_tensors
        L, me, layout = q.shape[1], call.peers.rank, call.layout
        spare = spare_row(layout, me, q.device)
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)), spare)
        if outputs is None:
            outputs = y.unflatten(2, (k.shape[2], -1))[None]
        slopes = _slopes(grouped, lse, outputs, dy, dlse, spare)
        wide = slopes.dq.dtype
        room = k.shape[0], L + spare, *k.shape[2:]
        dk, dv = k.new_zeros(room, dtype=wide), k.new_zeros(room, dtype=wide)
        by_kernels = blocks.narrow(q.dtype) and not call.detached and not call.return_lse
        lent = handover.told(grouped, slopes, outputs[0] if by_kernels else None)
        returns, results = list[Arrival](), list[Arrival]()
        for arrival in ctx.kept if call.once else _Arriving(call, k, v, lent):
            shape = len(arrival.rows) + 1, *arrival.rows.shape[1:]  # the last stands for missing rows
            gradients = arrival.rows.new_zeros(shape, dtype=wide)
            for rows in remote_rows(layout, me, arrival.source, q.device):
                one, two = blocks.take_back(slopes, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
                gradients[rows.keys, 0] += one
                gradients[rows.keys, 1] += two
            returns.append(call.peers.give_back(layout, arrival.step, gradients[:-1]))
            if arrival.asked:
                sent, statistics = arrival.asked
                made = handover.answered_back(
                    layout, sent.source, me, sent.wait(), statistics.wait(), k, v, call.scale, dk, dv
                )
                results.append(call.peers.answer(layout, arrival.step, made))
            if not call.once and len(returns) > 1:
                call.peers.add_returned(layout, returns.pop(0), dk, dv)
            if len(results) > 1:
                handover.add_gradients(slopes.dq, layout, me, results.pop(0))
        for rows in own_rows(layout, me, q.device):
            one, two = blocks.take_back(slopes, rows, grouped, *_local(rows, k, v), call.scale)
            blocks.add_own(dk, rows, one)
            blocks.add_own(dv, rows, two)
        for arrival in returns:
            call.peers.add_returned(layout, arrival, dk, dv)
        for result in results:
            handover.add_gradients(slopes.dq, layout, me, result)
        dq = slopes.dq[:, :L].flatten(2, 3).to(q.dtype)
        return None, dq, dk[:, :L].to(k.dtype), dv[:, :L].to(v.dtype)


class _Arriving:
    """What peers send, step by step: posted when made, all at once or one ahead of what is worked on. With
    each step's keys and values come the queries that their ranks hand over, if they do."""

    def __init__(self, call: _Call, k: Tensor, v: Tensor, lent: dict[Kind, Sequence[Tensor]]) -> None:
        self.call, self.k, self.v, self.lent = call, k, v, lent
        steps = list(range(1, call.peers.size))
        self.later = [] if call.once else steps[1:]
        self.posted = self._post(steps if call.once else steps[:1])

    def _post(self, steps: list[int]) -> list[Arrival]:
        if not steps:
            return []
        layout, peers = self.call.layout, self.call.peers
        arrivals = peers.send_rows(layout, self.k, self.v, steps)
        if layout.handed_from:
            for arrival in arrivals:
                arrival.asked = [
                    peers.hand_over(layout, arrival.step, tensors, kind)
                    for kind, tensors in self.lent.items()
                ]
        return arrivals

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
    shown = _padded(outputs, spare, 2) if dlse is None and blocks.kernel(q) is not None else None
    return Slopes(
        _padded(dy, spare), shown, _padded(lse, spare, fill=torch.inf), _padded(delta, spare, 2),
        torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format),
    )  # fmt: skip


def _padded(x: Tensor, spare: int, dim: int = 1, fill: float = 0.0) -> Tensor:
    """`x` with `spare` more rows along `dim`, which stand for missing ones."""
    if not spare:
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, spare], value=fill)


def _local(rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A block's own keys and values, [segments, kv heads, rows, B, D]."""
    if rows.span:
        first, end = rows.span
        cut = (x[:, first:end].unflatten(1, rows.keys.shape[::2]) for x in (k, v))
        one, two = (x.permute(1, 3, 2, 0, 4) for x in cut)
        return one, two
    return handover.own_keys(rows, k, v)


def _of_peer(rows: Rows, held: Tensor) -> tuple[Tensor, Tensor]:
    """A block's keys and values among a peer's rows."""
    at = rows.keys.clamp(max=len(held) - 1)
    return held[at, 0], held[at, 1]
