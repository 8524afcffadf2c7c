"""dilated_attention in Triton: with what the kernels are launched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bakeoff.ops.dilated_attention.reference import pattern_of
from bakeoff.ops.dilated_attention.tables import choices

__all__ = [
    "BackwardTiling",
    "ForwardTiling",
    "backward_tilings",
    "forward_tilings",
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


def forward_tilings(case: Any, most_stages: int = 2 if torch.version.hip else 4) -> list[ForwardTiling]:
    """What the forward may be launched with: the default, then others. AMD's GPUs have on-chip memory for two
    stages."""
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
    if case.causal and width > 64:  # a launch for each branch: 1.2 times as fast at 131,072 tokens on an H200
        plain.insert(0, ForwardTiling(128, 64, 8, 3, split=1))
    plain = [tiling._replace(stages=min(tiling.stages, most_stages)) for tiling in plain]
    return [*dict.fromkeys(plain + _other_classes(case, plain[:3]))]


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
    if case.causal and width > 64:
        plain.insert(0, BackwardTiling(*q[0], *k[0], split=1))
    return [*dict.fromkeys(plain + _other_classes(case, plain[:2]))]


def _other_classes(case: Any, plain: Sequence[Any]) -> list[Any]:
    """Some tilings with a launch for each branch or none, and with other numbers of classes: what is least
    work is an estimate."""
    pattern = pattern_of(case.segments, case.rates, case.phase, case.k.shape[2])
    other = [tiling._replace(split=1 - tiling.split) for tiling in plain]
    together = [tiling._replace(split=0) for tiling in plain]
    return other + [tiling._replace(classes=n) for tiling in together for n in choices(pattern.rates)]
