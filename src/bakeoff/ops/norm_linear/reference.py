"""The definition of norm_linear, in plain PyTorch."""

import torch
from torch import Tensor

__all__ = ["norm_linear"]


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    kind: str = "layer",
) -> Tensor:
    """y = (n * gamma + beta) weight' + bias with n = (x - mean) / sqrt(var + eps), or where kind is "rms"
    n = x / sqrt(mean(x^2) + eps).

    Computes in float32, or in float64 where an argument is, and casts once at the end. Differentiable by
    autograd, twice if wanted.
    """
    given = [t.dtype for t in (x, weight, bias, gamma, beta) if t is not None]
    wide = torch.float64 if torch.float64 in given else torch.float32
    s = x.to(wide)
    if kind == "layer":
        s = s - s.mean(-1, keepdim=True)
    h = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        h = h * gamma.to(wide)
    if beta is not None:
        h = h + beta.to(wide)
    y = h @ weight.to(wide).mT
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
