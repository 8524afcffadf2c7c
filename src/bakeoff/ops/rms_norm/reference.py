"""The definition of rms_norm, in plain PyTorch."""

import torch

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return s / sqrt(mean(s^2) + eps) * (offset + weight) over the last dimension, s = x + residual.

    Computes in float32, or in float64 when an input is float64, and casts once at the end. The result is
    y in x's dtype, or (y, s) with a residual. Differentiable by autograd, twice if wanted.
    """
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (offset + weight.to(torch.promote_types(weight.dtype, torch.float32)))
    y = y.to(x.dtype)
    return y if residual is None else (y, s)
