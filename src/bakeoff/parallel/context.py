"""Context parallelism: dilated attention over a sequence whose contiguous parts lie on several ranks.

Segments within one part need no communication. Of those that straddle parts, ranks exchange the selected
rows of keys and values alone, each once, posted before anything is computed (see `remote`); or also rows of
queries, where that evens out their work (see `balance`); or all tokens of some heads (see `ulysses`).
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which imports the compiler at once
from torch.distributed.device_mesh import DeviceMesh

from bakeoff.attention_backends.scale import check_scale
from bakeoff.ops.dilated_attention import phase_text, sizes_text
from bakeoff.ops.dilated_attention.op import checked_pattern, warn_of_unreachable
from bakeoff.ops.dilated_attention.reference import Pattern
from bakeoff.parallel.balance import balanced
from bakeoff.parallel.exchange import Layout
from bakeoff.parallel.exchange import borders as even
from bakeoff.parallel.peers import Peers
from bakeoff.parallel.plan import ContextPlan, planned
from bakeoff.parallel.remote import by_exchange
from bakeoff.parallel.ulysses import attended, by_heads

__all__ = ["attention", "context_plan", "dilated_attention"]

_log = logging.getLogger("bakeoff")


@_disable_dynamo
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
        return_lse: whether to return the log-sum-exp of this rank's tokens, too; the same on all ranks. It
            carries a gradient.
        borders: where the parts begin, and the end, ranks + 1 numbers, such as
            `bakeoff.parallel.borders(tokens, ranks)`. By default all parts are as long as this one.
        method: "exchange", all rows at once; "ring", from one peer at a time; "balanced", a ring in which
            ranks with more work than others hand over queries (never taken by itself, as it was slower
            wherever GPUs timed it); "ulysses", all tokens of some heads by all-to-all; "auto", what
            `context_plan` says.

    Returns:
        y [B, L, H, D] in q's dtype, or (y, lse) with lse [B, H, L] in float32 (float64 for float64).

    Raises:
        ValueError: shapes, branches, borders or a method that don't fit; arguments that differ from another
            rank's, found before anything else is sent.
        TypeError: segments or rates that are no whole numbers.
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
    if isinstance(phase, str):  # a table is the caller's own choice
        warn_of_unreachable(layout.pattern, k.shape[2])
    softmaxes = _softmaxes(layout, combine_grad)
    plan = planned(layout, q.shape[0], q.shape[2], q.shape[3], q.element_size(), method, softmaxes)
    if peers.rank == 0:
        _announce(plan)
    check_scale("dilated_attention", scale)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    peers.agree(
        q.device, borders=layout.borders, dtype=q.dtype, batch=q.shape[0], heads=(q.shape[2], k.shape[2]),
        head_dim=q.shape[3], segments=layout.pattern.segments, rates=layout.pattern.rates,
        phase=layout.pattern.phases, causal=bool(causal), cu_seqlens=layout.documents,
        combine_grad=combine_grad, scale=float(scale), return_lse=bool(return_lse), method=plan.method,
    )  # fmt: skip
    if layout.local and q.shape[1] and method == "auto":
        part, phases = layout.part(peers.rank), layout.pattern.phases
        y, lse = attended(q, k, v, layout, part, phases, scale, combine_grad, return_lse=return_lse)
        return (y, lse) if return_lse and lse is not None else y
    if plan.method == "ulysses":
        y, lse = by_heads(q, k, v, layout, peers, scale, combine_grad, return_lse)
    else:
        y, lse = by_exchange(
            q, k, v, balanced(layout) if plan.method == "balanced" else layout, peers, scale,
            detached=combine_grad == "detached", once=plan.method == "exchange", return_lse=return_lse,
        )  # fmt: skip
    return (y, lse) if return_lse and lse is not None else y


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

    Where keys and values of the others exceed a part they come from one rank at a time: ring attention. With
    a causal mask and ``method="balanced"`` early ranks work on queries of late ones, too.
    """
    ends = options.get("borders")
    tokens = ends[-1] if ends else q.shape[1] * Peers(mesh).size
    return dilated_attention(q, k, v, (max(1, tokens),), (1,), mesh=mesh, causal=causal, **options)


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
    combine_grad: str = "exact",
    cu_seqlens: Sequence[int] | None = None,
    batch: int = 1,
    itemsize: int = 2,
    method: str = "auto",
) -> ContextPlan:
    """How `dilated_attention` would run over `ranks` ranks, how many bytes it would move, and how evenly the
    ranks would work; runs anywhere.

    Args:
        tokens: of the whole sequence, cut evenly; or the borders of the parts.
        itemsize: bytes of an element; 2 for bfloat16.

    Raises:
        ValueError, TypeError: as of `dilated_attention`.

    Example:
        >>> print(context_plan(1 << 17, 8, heads=16, head_dim=128, segments=(2048, 32768), rates=(1, 12)))
        received by the busiest rank; the most work of a rank by the mean
        > exchange: 11.2 MB forward, 22.4 MB backward; 1.00
          ring: 11.2 MB forward, 33.6 MB backward; 1.00
          ulysses: 234.9 MB forward, 234.9 MB backward; 1.00
          dense ring attention: 939.5 MB forward, 2,818.6 MB backward
    """
    ends = even(tokens, ranks) if isinstance(tokens, int | float) else _ends(tokens, ranks)
    kv_heads = heads if kv_heads is None else kv_heads
    _check_heads(heads, kv_heads)
    documents = _documents(cu_seqlens, ends[-1], batch)
    layout = Layout(_pattern(segments, rates, phase, kv_heads), ends, documents, causal)
    return planned(layout, batch, heads, head_dim, itemsize, method, _softmaxes(layout, combine_grad))


@lru_cache(maxsize=256)
def _announce(plan: ContextPlan) -> None:
    """Logs each plan once, before anything of it runs."""
    _log.info("context parallelism, %s", plan)


def _pattern(
    segments: Sequence[int], rates: Sequence[int], phase: str | Sequence[Sequence[int]], kv_heads: int
) -> Pattern:
    return checked_pattern(sizes_text(segments), sizes_text(rates), phase_text(phase), kv_heads)


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
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one floating dtype for all")
    _check_heads(q.shape[2], k.shape[2])
    if borders is None:
        borders = [q.shape[1] * rank for rank in range(peers.size + 1)]
    ends = _ends(borders, peers.size)
    length = ends[peers.rank + 1] - ends[peers.rank]
    if length != q.shape[1]:
        raise ValueError(
            f"rank {peers.rank} has {q.shape[1]} tokens, and {length} by borders {ends}; pass "
            "borders=bakeoff.parallel.borders(tokens, ranks) and cut the sequence there"
        )
    documents = _documents(cu_seqlens, ends[-1], q.shape[0])
    return Layout(_pattern(segments, rates, phase, k.shape[2]), ends, documents, causal)


def _check_heads(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads of q are no multiple of {kv_heads} kv heads")


def _ends(borders: Sequence[int], ranks: int) -> tuple[int, ...]:
    ends = tuple(map(int, borders))
    if len(ends) != ranks + 1 or ends != tuple(borders) or ends[0] != 0 or list(ends) != sorted(ends):
        raise ValueError(
            f"borders are {tuple(borders)}; expected {ranks + 1} numbers from 0 to all tokens, not decreasing"
        )
    return ends


def _documents(cu_seqlens: Tensor | Sequence[int] | None, tokens: int, batch: int) -> tuple[int, ...]:
    if cu_seqlens is None:
        return 0, tokens
    numbers = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    documents = tuple(map(int, numbers))
    fit = documents == numbers and list(documents) == sorted(documents)
    if batch != 1 or not fit or not documents or not 0 <= documents[0] <= documents[-1] <= tokens:
        raise ValueError(
            f"cu_seqlens are {numbers} and B is {batch}; packed documents are one row, their borders whole "
            f"numbers, not decreasing and within 0 to {tokens}"
        )
    return documents


def _softmaxes(layout: Layout, combine_grad: str) -> int:
    """Of a query: one, or one for each branch where the weights of the mixture are constants."""
    if combine_grad not in ("exact", "detached"):
        raise ValueError(f"combine_grad is {combine_grad!r}; it is 'exact' or 'detached'")
    return len(layout.pattern.rates) if combine_grad == "detached" else 1
