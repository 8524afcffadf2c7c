"""PyTorch's own `qkv_rotary`: the ``eager`` and ``compiled`` candidates."""

from torch import Tensor

from bakeoff.ops.qkv_rotary.reference import parts, reference
from bakeoff.ops.rotary.plain import eager as rotary
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int | None,
    interleaved: bool,
    position_ids: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A split, whose backward joins the gradients, and plain PyTorch's `rotary`."""
    q, k, v = parts(qkv, kv_heads)
    q, k = rotary(q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset)
    return q, k, v


compiled = compile_formula(reference)
