"""PyTorch's own fp8_linear: the ``eager`` candidate."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.autocast import without_autocast
from bakeoff.derivatives import once_differentiable
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2, quantize

__all__ = ["eager"]


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, grad: str) -> Tensor:
    """Values rounded to FP8 and multiplied in float32, where each product of two is exact: the arithmetic of
    the definition on any device, at no gain in time."""
    function = _Linear if is_compiling() else _WithTangents
    y: Tensor = function.apply(x, weight, bias, grad)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, grad: str) -> Tensor:
        with without_autocast(x):  # which would round the float32 product
            y = _product(x, weight, E4M3)
            return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.grad = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    @once_differentiable("fp8_linear", "take torch.nn.functional.linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if ctx.grad == "bf16" else _product(dy, weight.t(), E5M2).to(x.dtype)
            rows = dy.reshape(-1, dy.shape[-1])
            if ctx.needs_input_grad[1]:
                dweight = rows.t() @ x.reshape(-1, x.shape[-1])
            if ctx.needs_input_grad[2]:
                dbias = rows.sum(0)
        return dx, dweight, dbias, None


class _WithTangents(_Linear):
    """For forward-mode derivatives, which torch.compile refuses to trace."""

    @staticmethod
    def jvp(
        ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, bias_tangent: Tensor | None, _: Any
    ) -> Tensor:
        x, weight = ctx.saved_tensors
        with without_autocast(x):
            y_tangent: Tensor = x_tangent @ weight.t() + x @ weight_tangent.t()
            return y_tangent if bias_tangent is None else y_tangent + bias_tangent


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """a b' of a [..., K] in `kind` and b [M, K] in e4m3; in float32, or float64 where a is."""
    wide = torch.promote_types(a.dtype, torch.float32)
    (qa, sa), (qb, sb) = quantize(a, kind), quantize(b)
    return (qa.to(wide) @ qb.to(wide).t()) * sa.to(wide) * sb.to(wide).squeeze(-1)
