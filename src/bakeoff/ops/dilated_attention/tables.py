"""The tables that kernels read: where time is cut, and what each branch selects."""

from functools import lru_cache

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.ops.dilated_attention import kernels
from bakeoff.ops.dilated_attention.reference import Pattern

__all__ = ["planned_tables"]


def planned_tables(plan: Plan, pattern: Pattern, T: int, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """int32 tables of intervals [n, 4], branches [branches, 2] (segment, rate) and phases [branches, kv
    heads]."""
    branches, phases, found = (plan.constant(x) for x in _tables(pattern, T, plan.device))
    if cu_seqlens is not None:
        found = plan.derive(kernels.document_intervals, cu_seqlens, pattern.segments, T)
    return {"intervals": found, "branches": branches, "phases": phases}


@lru_cache(maxsize=64)
def _tables(pattern: Pattern, T: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    branches = torch.tensor([*zip(pattern.segments, pattern.rates, strict=True)], dtype=torch.int32)
    phases = torch.tensor(pattern.phases, dtype=torch.int32)
    found = kernels.intervals(pattern.segments, T)
    return branches.to(device), phases.to(device), found.to(device)
