"""The definition of fp8_linear, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["E4M3", "E5M2", "LARGEST", "fp8_linear", "quantize"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""The largest finite number of each format."""


def quantize(t: Tensor, kind: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """(q, scale) of t [..., K]: q = kind(t / scale) [..., K], scale = max|t| / LARGEST[kind] [..., 1], row by
    row; 1 for a row whose scale is 0.

    This is computed in float32 whatever t's dtype is, each operation rounded to nearest, so that q and scale
    are the same bits wherever they are computed, and also in the float64 reference.
    """
    t = t.to(torch.float32)
    largest = LARGEST[kind]
    peak = t.abs().amax(-1, keepdim=True) if t.shape[-1] else t.new_zeros((*t.shape[:-1], 1))
    # A tensor, as a division by a number may be done as a product with its rounded reciprocal.
    scale = peak / torch.full_like(peak, largest)
    scale = torch.where(scale == 0, 1.0, scale)
    # Beyond the largest number is only what a denormal scale, of few digits, was rounded for.
    return (t / scale).clamp(-largest, largest).to(kind), scale


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, grad: str = "bf16") -> Tensor:
    """y = (qx qw') * sx * sw' + bias; accumulated in float32, or float64 where x is, and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y: Tensor = _Product.apply(x.to(wide), weight.to(wide), grad)  # type: ignore[no-untyped-call]
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


class _Product(torch.autograd.Function):
    """Of the quantised x and weight, with the gradients of the product of what they were made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grad: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grad = grad
        return _product(x, weight, E4M3)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.grad == "bf16" else _product(dy, weight.mT, E5M2)
        return dx, torch.einsum("...m,...k->mk", dy, x), None


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """a b' of a [..., K] in `kind` and b [M, K] in e4m3."""
    (qa, sa), (qb, sb) = quantize(a, kind), quantize(b)
    return (qa.to(a.dtype) @ qb.to(a.dtype).mT) * sa.to(a.dtype) * sb.to(a.dtype).squeeze(-1)
