"""PyTorch's own rms_norm: the ``eager`` and ``compiled`` candidates."""

from typing import Any

import torch
import torch.nn.functional as F

from bakeoff.ops.rms_norm.reference import rms_norm as reference
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(x: Any, weight: Any, eps: float, residual: Any, offset: float) -> Any:
    """PyTorch's fused F.rms_norm: as it is where all dtypes agree, else on float32 copies."""
    s = x if residual is None else x + residual
    features = s.shape[-1:]
    if s.dtype == x.dtype and (weight is None or (weight.dtype == s.dtype and not offset)):
        y = F.rms_norm(s, features, weight, eps)
    else:
        wide = torch.promote_types(s.dtype, torch.float32)
        scale = None if weight is None else weight.to(wide) + offset
        y = F.rms_norm(s.to(wide), features, scale, eps)
    y = y.to(x.dtype)  # autocast may have widened it
    return y if residual is None else (y, s)


compiled = compile_formula(reference)
