"""PyTorch's own swiglu: the ``eager`` and ``compiled`` candidates."""

import torch
import torch.nn.functional as F

from bakeoff.ops.swiglu.reference import swiglu as reference
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Two kernels forward, and one rounding more than the definition has: that of silu(gate)."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


compiled = compile_formula(reference)
