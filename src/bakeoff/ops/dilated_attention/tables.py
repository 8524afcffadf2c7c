"""How time is cut into tiles, and the tables of it that kernels read."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.ops.dilated_attention.reference import Pattern

__all__ = ["borders", "choices", "classes_of", "document_intervals", "intervals", "planned_tables"]


def choices(rates: Sequence[int]) -> list[int]:
    """Numbers of classes that make the rows of a tile alike in the first branches, or in none."""
    found = [1]
    for rate in rates:
        found.append(math.lcm(found[-1], rate))
    return list(dict.fromkeys(found))


def classes_of(segments: Sequence[int], rates: Sequence[int], T: int, rows: int, causal: bool) -> int:
    """The number of classes with which tiles of `rows` do the least work.

    With more classes more branches are selected by a whole tile or by none of it. With fewer a tile is
    shorter in time, so that causal tiles see fewer keys in vain, and short intervals fill it.
    """
    interval = min(segments[0], T)

    def work(classes: int) -> float:
        tiles = math.ceil(math.ceil(interval / classes) / rows)
        total = 0.0
        for w, r in zip(segments, rates, strict=True):
            keys = float(min(w, T))
            if causal:
                keys = (keys + min(classes * rows, interval)) / 2
            mixed = 1.1 if classes % r else 1.0  # masked where rows differ
            total += classes / math.gcd(classes, r) * tiles * rows * keys / r * mixed
        return total

    return min((n for n in choices(rates) if n <= interval), key=work)


def borders(segments: Sequence[int]) -> tuple[int, ...]:
    """The segment lengths without those that are multiples of others: their borders are all borders."""
    kept: list[int] = []
    for w in segments:
        if all(w % other for other in kept):
            kept.append(w)
    return tuple(kept)


def intervals(segments: Sequence[int], T: int) -> torch.Tensor:
    """The stretches between borders as [n, 4] of int32: first token, end, the sequence's start and end."""
    starts = sorted({start for w in borders(segments) for start in range(0, T, w)})
    rows = [[start, end, 0, T] for start, end in zip(starts, [*starts[1:], T], strict=True)]
    return torch.tensor(rows, dtype=torch.int32)


def document_intervals(cu: torch.Tensor, segments: tuple[int, ...], T: int) -> torch.Tensor:
    """The same for packed documents, as many as there can be; what is left over is empty. Tokens outside all
    documents stand in intervals of sequences that end before they begin, where nothing is selected."""
    device = cu.device
    ends = torch.arange(2, device=device) * T
    edges = torch.cat([ends[:1], cu.to(torch.int64).clamp(0, T), ends[1:]])
    t = torch.arange(T, device=device)
    document = torch.searchsorted(edges, t, right=True) - 1
    origin, limit = edges[document], edges[document + 1]
    real = (document > 0) & (document < edges.numel() - 2)
    border, end = torch.zeros_like(real), limit
    for w in borders(segments):
        inside = (t - origin) % w
        border = border | (inside == 0)
        end = torch.minimum(end, t - inside + w)
    count = edges.numel() - 1 + sum(T // w for w in borders(segments))
    place = torch.where(border, border.cumsum(0) - 1, count)
    found = torch.stack([t, end, origin, torch.where(real, limit, origin)], 1).to(torch.int32)
    table = torch.zeros((count + 1, 4), dtype=torch.int32, device=device)
    return table.index_copy_(0, place, found)[:count]


def planned_tables(plan: Plan, pattern: Pattern, T: int, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """int32 tables of intervals [n, 4], branches [branches, 2] (segment, rate) and phases [branches, kv
    heads]."""
    branches, phases, found = (plan.constant(x) for x in _tables(pattern, T, plan.device))
    if cu_seqlens is not None:
        found = plan.derive(document_intervals, cu_seqlens, pattern.segments, T)
    return {"intervals": found, "branches": branches, "phases": phases}


@lru_cache(maxsize=64)
def _tables(pattern: Pattern, T: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    branches = torch.tensor([*zip(pattern.segments, pattern.rates, strict=True)], dtype=torch.int32)
    phases = torch.tensor(pattern.phases, dtype=torch.int32)
    found = intervals(pattern.segments, T)
    return branches.to(device), phases.to(device), found.to(device)
