"""Context parallelism: dilated attention over a sequence whose contiguous parts lie on several ranks.

Segments within one part need no communication. Of those that straddle parts, ranks exchange the selected
rows of keys and values alone, each once, posted before anything is computed; blocks of a rank's own rows run
meanwhile, then those of its peers in a fixed order, all into one float32 softmax. Backward returns the
gradients of those rows to their owners, in float32 as well.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bakeoff.ops.dilated_attention.reference import pattern_of
from bakeoff.parallel import blocks
from bakeoff.parallel.blocks import Rows, Slopes
from bakeoff.parallel.exchange import PAD, Block, Layout, needs, own_blocks
from bakeoff.parallel.exchange import borders as even
from bakeoff.parallel.peers import Arrival, Peers
from bakeoff.parallel.plan import ContextPlan, planned
from bakeoff.parallel.ulysses import attended, by_heads

__all__ = ["attention", "context_plan", "dilated_attention"]

_log = logging.getLogger("bakeoff")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    causal: bool = False,
    phase: str | Sequence[Sequence[int]] = "mod",
    combine_grad: str = "exact",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    borders: Sequence[int] | None = None,
    method: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`bakeoff.ops.dilated_attention` of a sequence that ranks hold in contiguous parts, in their order.

    Args:
        q: [B, L, H, D], this rank's part; positions (rotary) are applied before, with the whole's numbers.
        k, v: [B, L, Hk, D], H a multiple of Hk.
        segments, rates, causal, phase, combine_grad, scale: as for the op.
        mesh: one dimension of a DeviceMesh, or a process group; all its ranks call this together.
        cu_seqlens: the borders of documents in the whole sequence (B = 1), equal on all ranks; best as
            numbers or on the CPU, since the exchange is planned on the host.
        return_lse: whether to return the log-sum-exp of this rank's tokens, too. It carries a gradient.
        borders: where the parts begin, and the end, ranks + 1 numbers, such as
            `bakeoff.parallel.borders(tokens, ranks)`. By default all parts are as long as this one.
        method: "exchange", all rows at once; "ring", from one peer at a time; "ulysses", all tokens of some
            heads by all-to-all; "auto", what `context_plan` says.

    Returns:
        y [B, L, H, D] in q's dtype, or (y, lse) with lse [B, H, L] in float32 (float64 for float64).

    Raises:
        ValueError: shapes, branches, borders or a method that don't fit.
        RankError: a rank was lost in the exchange; the message names it, or the watch of
            `bakeoff.parallel.joined` does.

    Source: Ding et al. 2023, LongNet, section 3.3; Liu et al. 2023, Ring Attention; Jacobs et al. 2023,
    DeepSpeed Ulysses.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,))                                       # doctest: +SKIP
        >>> y = dilated_attention(q, k, v, (2048, 8192), (1, 4), mesh=mesh, causal=True)  # doctest: +SKIP
    """
    peers = Peers(mesh)
    layout = _layout(q, k, v, segments, rates, peers, causal, phase, cu_seqlens, borders)
    if combine_grad not in ("exact", "detached"):
        raise ValueError(f"combine_grad is {combine_grad!r}; it is 'exact' or 'detached'")
    plan = planned(layout, q.shape[0], q.shape[2], q.shape[3], q.element_size(), method)
    if peers.rank == 0:
        _announce(plan)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if layout.local and q.shape[1] and method == "auto":
        part, phases = layout.part(peers.rank), layout.pattern.phases
        y, lse = attended(q, k, v, layout, part, phases, scale, combine_grad)
    elif plan.method == "ulysses":
        y, lse = by_heads(q, k, v, layout, peers, scale, combine_grad)
    else:
        once = plan.method == "exchange"
        call = _Call(layout, peers, scale, combine_grad == "detached", once)
        y, lse = _Exchanged.apply(call, q, k, v)  # type: ignore[no-untyped-call]
    return (y, lse) if return_lse else y


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    causal: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense attention over all ranks' tokens: `dilated_attention` with one branch, the whole sequence.

    Where keys and values of the others exceed a part they come from one rank at a time: ring attention.
    """
    ends = options.get("borders")
    tokens = ends[-1] if ends else q.shape[1] * Peers(mesh).size
    return dilated_attention(  # type: ignore[no-any-return]
        q, k, v, (max(1, tokens),), (1,), mesh=mesh, causal=causal, **options
    )


def context_plan(
    tokens: int | Sequence[int],
    ranks: int,
    heads: int,
    head_dim: int,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    phase: str | Sequence[Sequence[int]] = "mod",
    cu_seqlens: Sequence[int] | None = None,
    batch: int = 1,
    itemsize: int = 2,
    method: str = "auto",
) -> ContextPlan:
    """How `dilated_attention` would run over `ranks` ranks, and how many bytes it would move; runs anywhere.

    Args:
        tokens: of the whole sequence, cut evenly; or the borders of the parts.
        itemsize: bytes of an element; 2 for bfloat16.

    Example:
        >>> print(context_plan(1 << 17, 8, heads=16, head_dim=128, segments=(2048, 32768), rates=(1, 12)))
        received by the busiest rank
        > exchange: 11.2 MB forward, 22.4 MB backward
          ring: 11.2 MB forward, 33.6 MB backward
          ulysses: 234.9 MB forward, 234.9 MB backward
          dense ring attention: 939.5 MB forward, 2,818.6 MB backward
    """
    ends = even(tokens, ranks) if isinstance(tokens, int) else tuple(tokens)
    kv_heads = heads if kv_heads is None else kv_heads
    documents = (0, ends[-1]) if cu_seqlens is None else tuple(cu_seqlens)
    layout = Layout(_pattern(segments, rates, phase, kv_heads), ends, documents, causal)
    return planned(layout, batch, heads, head_dim, itemsize, method)


@lru_cache(maxsize=256)
def _announce(plan: ContextPlan) -> None:
    """Logs each plan once, before anything of it runs."""
    _log.info("context parallelism, %s", plan)


def _pattern(
    segments: Sequence[int], rates: Sequence[int], phase: str | Sequence[Sequence[int]], kv_heads: int
) -> Any:
    pattern = pattern_of(segments, rates, phase, kv_heads)
    if not pattern.segments or len(pattern.segments) != len(pattern.rates):
        raise ValueError(f"{len(segments)} segments and {len(rates)} rates; each branch has one of both")
    for w, r in zip(pattern.segments, pattern.rates, strict=True):
        if not 1 <= r <= w:
            raise ValueError(f"segment {w} with rate {r}; a rate is at least 1 and at most its segment")
    if [len(row) for row in pattern.phases] != [kv_heads] * len(pattern.rates):
        raise ValueError(f"phase has rows of other lengths than the {kv_heads} kv heads, or not one a branch")
    return pattern


def _layout(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[int], rates: Sequence[int], peers: Peers,
    causal: bool, phase: str | Sequence[Sequence[int]], cu_seqlens: Tensor | Sequence[int] | None,
    borders: Sequence[int] | None,
) -> Layout:  # fmt: skip
    if (
        q.dim() != 4
        or k.shape != v.shape
        or k.dim() != 4
        or q.shape[:2] != k.shape[:2]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(
            f"q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; expected [B, L, H, D] and twice "
            "[B, L, Hk, D], of this rank's tokens"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads of q are no multiple of {k.shape[2]} kv heads")
    ends = tuple(q.shape[1] * rank for rank in range(peers.size + 1)) if borders is None else tuple(borders)
    if len(ends) != peers.size + 1 or ends[0] != 0 or list(ends) != sorted(ends):
        raise ValueError(
            f"borders are {ends}; expected {peers.size + 1} numbers from 0 to all tokens, not decreasing"
        )
    length = ends[peers.rank + 1] - ends[peers.rank]
    if length != q.shape[1]:
        raise ValueError(
            f"rank {peers.rank} has {q.shape[1]} tokens, and {length} by borders {ends}; pass "
            "borders=bakeoff.parallel.borders(tokens, ranks) and cut the sequence there"
        )
    if cu_seqlens is None:
        documents: tuple[int, ...] = (0, ends[-1])
    else:
        documents = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
        if (
            q.shape[0] != 1
            or list(documents) != sorted(documents)
            or not 0 <= documents[0] <= documents[-1] <= ends[-1]
        ):
            raise ValueError(
                f"cu_seqlens are {documents} and B is {q.shape[0]}; packed documents are one row, their "
                f"borders not decreasing and within 0 to {ends[-1]}"
            )
    return Layout(_pattern(segments, rates, phase, k.shape[2]), ends, documents, causal)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is fixed in a call."""

    layout: Layout
    peers: Peers
    scale: float
    detached: bool
    once: bool
    """Whether all peers' rows are asked for at once, and kept for backward."""


class _Exchanged(torch.autograd.Function):
    """All branches over all ranks, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
        L, me = q.shape[1], call.peers.rank
        grouped = _padded(q.unflatten(2, (k.shape[2], -1)))
        state = blocks.started(grouped, len(call.layout.pattern.rates) if call.detached else 1)
        arriving = _Arriving(call, k, v)
        for rows in _own(call.layout, me, q.device):
            blocks.take(state, rows, grouped, *_local(rows, k, v), call.scale)
        kept = []
        for arrival in arriving:
            for rows in _remote(call.layout, me, arrival.source, q.device):
                blocks.take(state, rows, grouped, *_of_peer(rows, arrival.rows), call.scale)
            kept += [arrival] if call.once else []
        outputs, y, lse = (x[:, :, :L] if x.dim() == 6 else x[:, :L] for x in blocks.finished(state))
        lse = lse.flatten(2, 3)
        ctx.call, ctx.kept = call, kept
        ctx.save_for_backward(q, k, v, lse, outputs)
        ctx.set_materialize_grads(False)
        return y.flatten(2, 3).to(q.dtype), lse.mT.contiguous()

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
        heads = torch.arange(k.shape[2], device=k.device)[:, None]
        for rows in _own(layout, me, q.device):
            one, two = blocks.take_back(slopes, rows, grouped, *_local(rows, k, v), call.scale)
            dk[:, rows.keys, heads] += one.permute(3, 0, 1, 2, 4)
            dv[:, rows.keys, heads] += two.permute(3, 0, 1, 2, 4)
        for arrival in returns:
            call.peers.add_returned(layout, arrival, dk, dv)
        dq = slopes.dq[:, :L].flatten(2, 3)
        return None, dq.to(q.dtype), dk[:, :L].to(k.dtype), dv[:, :L].to(v.dtype)


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
