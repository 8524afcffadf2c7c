"""Normalisation layers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bakeoff.ops.layer_norm import layer_norm
from bakeoff.ops.rms_norm import rms_norm

__all__ = ["LayerNorm", "RMSNorm"]


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
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        out: Tensor | tuple[Tensor, Tensor] = rms_norm(x, self.weight, self.eps, residual=residual)
        return out

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm, with the same arguments and names of parameters, by `bakeoff.ops.layer_norm`.

    y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias with s = x + residual, over the last dimensions.
    Shapes: x and residual [..., *normalized_shape], any floating dtype; weight and bias [*normalized_shape].
    `forward(x)` returns y in x's dtype; `forward(x, residual)` returns (y, s). Raises ValueError for x of
    another shape, and what the op raises. Source: Ba et al. 2016.

    >>> LayerNorm(2, bias=False)(torch.tensor([[1.0, 3.0]])).round()
    tensor([[-1.,  1.]], grad_fn=<RoundBackward0>)
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        features: Sequence[int] = self.normalized_shape
        if tuple(x.shape[x.dim() - len(features) :]) != tuple(features):
            raise ValueError(f"LayerNorm: x has shape {tuple(x.shape)}, expected [..., {[*features]}]")
        weight, bias = self.weight, self.bias
        if len(features) == 1:
            return layer_norm(x, weight, bias, self.eps, residual=residual)
        rows = (*x.shape[: x.dim() - len(features)], math.prod(features))
        scale, shift = (None if t is None else t.reshape(-1) for t in (weight, bias))
        other = None if residual is None else residual.reshape(rows)
        out = layer_norm(x.reshape(rows), scale, shift, self.eps, residual=other)
        if isinstance(out, tuple):
            return out[0].view(x.shape), out[1].view(x.shape)
        return out.view(x.shape)
