"""dilated_attention in Triton: how time is cut into tiles, and with what the kernels are launched."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bakeoff.ops.dilated_attention.reference import pattern_of

__all__ = [
    "BackwardTiling",
    "ForwardTiling",
    "backward_tilings",
    "borders",
    "classes_of",
    "document_intervals",
    "forward_tilings",
    "intervals",
    "width_of",
]


class ForwardTiling(NamedTuple):
    """How the forward is cut into programs."""

    rows: int
    """Queries of a tile."""
    keys: int
    """Keys of a step."""
    warps: int
    stages: int
    classes: int = 0
    """Residue classes of tokens, each with tiles of its own; 0 for the number with the least work."""
    split: int = 0
    """1: a launch for each branch, over its own rows. Causal tiles are then as short in time as can be; what
    the branches before have found is read and written again."""


class BackwardTiling(NamedTuple):
    """How the backward is cut into programs: of queries for dq (q_), of keys for dk and dv (k_)."""

    q_rows: int
    q_keys: int
    q_warps: int
    q_stages: int
    k_rows: int
    k_keys: int
    k_warps: int
    k_stages: int
    classes: int = 0
    split: int = 0
    """As in `ForwardTiling`."""


def width_of(D: int) -> int:
    """The power of two that a head takes on the chip."""
    return max(16, 1 << (D - 1).bit_length())


def forward_tilings(case: Any) -> list[ForwardTiling]:
    """What the forward may be launched with: the default, then others."""
    width, half = width_of(case.q.shape[-1]), case.q.dtype.itemsize == 2
    if not half:
        small = 16 if width > 128 else 32
        return [ForwardTiling(32, small, 4, 1), ForwardTiling(64, small, 4, 1)]
    if width > 128:
        return [ForwardTiling(64, 32, 4, 2), ForwardTiling(128, 64, 8, 2), ForwardTiling(64, 64, 4, 2)]
    if width > 64:
        found = [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)]
    else:
        found = [(128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 4, 2)]
    if case.causal:  # shorter tiles see fewer keys in vain
        found.sort(key=lambda numbers: numbers[0] != 64)
    plain = [ForwardTiling(*numbers) for numbers in found]
    return plain + _other_classes(case, plain[:3])


def backward_tilings(case: Any) -> list[BackwardTiling]:
    """What the backward may be launched with: the default, then others."""
    width, half = width_of(case.q.shape[-1]), case.q.dtype.itemsize == 2
    if not half:
        small = 16 if width > 64 else 32
        return [BackwardTiling(32, small, 4, 1, 32, small, 4, 1)]
    if width > 128:
        return [BackwardTiling(64, 32, 8, 1, 64, 32, 8, 1), BackwardTiling(64, 32, 4, 1, 64, 32, 4, 1)]
    if width > 64:
        q = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 4, 3)]
        k = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 4, 3)]
    else:
        q = [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 32, 4, 4)]
        k = [(64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 3)]
    plain = [BackwardTiling(*a, *b) for a, b in zip(q, k, strict=True)]
    plain += [BackwardTiling(*q[0], *b) for b in k[1:]]
    return plain + _other_classes(case, plain[:2])


def _other_classes(case: Any, plain: Sequence[Any]) -> list[Any]:
    """Some tilings with a launch for each branch or none, and with other numbers of classes: what is least
    work is an estimate."""
    pattern = pattern_of(case.segments, case.rates, case.phase, case.k.shape[2])
    other = [tiling._replace(split=1 - tiling.split) for tiling in plain]
    together = [tiling._replace(split=0) for tiling in plain]
    return other + [tiling._replace(classes=n) for tiling in together for n in _choices(pattern.rates)]


def _choices(rates: Sequence[int]) -> list[int]:
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
            keys = min(w, T)
            if causal:
                keys = (keys + min(classes * rows, interval)) / 2
            mixed = 1.1 if classes % r else 1.0  # masked where rows differ
            total += classes / math.gcd(classes, r) * tiles * rows * keys / r * mixed
        return total

    return min((n for n in _choices(rates) if n <= interval), key=work)


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
