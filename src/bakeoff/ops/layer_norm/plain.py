"""PyTorch's own layer_norm: the ``eager`` and ``compiled`` candidates."""

from typing import Any

import torch
import torch.nn.functional as F

from bakeoff.ops.layer_norm.reference import layer_norm as reference
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(x: Any, weight: Any, bias: Any, eps: float, residual: Any) -> Any:
    """PyTorch's fused F.layer_norm: as it is where all dtypes agree, else on float32 copies."""
    s = x if residual is None else x + residual
    features = s.shape[-1:]
    if all(t is None or t.dtype == s.dtype for t in (x, weight, bias)):
        y = F.layer_norm(s, features, weight, bias, eps)
    else:
        wide = torch.promote_types(s.dtype, torch.float32)
        scale, shift = (None if t is None else t.to(wide) for t in (weight, bias))
        y = F.layer_norm(s.to(wide), features, scale, shift, eps)
    y = y.to(x.dtype)  # autocast may have widened it
    return y if residual is None else (y, s)


compiled = compile_formula(reference)
