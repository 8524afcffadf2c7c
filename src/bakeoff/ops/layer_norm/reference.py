"""The definition of layer_norm, in plain PyTorch."""

import torch

__all__ = ["layer_norm"]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return (s - mean(s)) / sqrt(var(s) + eps) * weight + bias over the last dimension, s = x + residual.

    Computes in float32, or in float64 when an input is float64, and casts once at the end. The result is
    y in x's dtype, or (y, s) with a residual. Differentiable by autograd, twice if wanted.
    """
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(torch.promote_types(weight.dtype, torch.float32))
    if bias is not None:
        y = y + bias.to(torch.promote_types(bias.dtype, torch.float32))
    y = y.to(x.dtype)
    return y if residual is None else (y, s)
