"""PyTorch's own norm_linear: the ``eager`` and ``compiled`` candidates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.autocast import without_autocast
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    """F.layer_norm or F.rms_norm, then F.linear; what is between them is rounded."""
    with without_autocast(x):
        return _composed(x, weight, bias, gamma, beta, eps, kind)


def _composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    features = x.shape[-1:]
    scale = gamma if gamma is not None else beta
    wide = x if scale is None else x.to(torch.promote_types(x.dtype, scale.dtype))
    if gamma is not None:
        gamma = gamma.to(wide.dtype)
    if beta is not None:
        beta = beta.to(wide.dtype)
    if kind == "layer":
        h = F.layer_norm(wide, features, gamma, beta, eps)
    else:
        h = F.rms_norm(wide, features, gamma, eps)
        h = h if beta is None else h + beta
    return F.linear(h.to(x.dtype), weight, bias)


compiled = compile_formula(eager)
