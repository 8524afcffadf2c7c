"""Normalisation layers."""

import torch
from torch import Tensor, nn

from bakeoff.ops.rms_norm import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """y = s / sqrt(mean(s^2) + eps) * weight with s = x + residual, over the last dimension.

    Shapes: x and residual [..., dim], any floating dtype; weight [dim], float32, starts at 1.
    `forward(x)` returns y; `forward(x, residual)` returns (y, s), so that a pre-norm block adds and
    normalises in one pass. Errors: those of `bakeoff.ops.rms_norm`. Source: Zhang & Sennrich 2019.

    >>> RMSNorm(4)(torch.full((1, 4), 3.0))
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        out: Tensor | tuple[Tensor, Tensor] = rms_norm(x, self.weight, self.eps, residual=residual)
        return out

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
