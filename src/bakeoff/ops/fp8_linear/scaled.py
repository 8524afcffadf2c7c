"""The ``scaled_mm`` and ``compiled`` candidates of fp8_linear: PyTorch's matrix product of FP8 rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.derivatives import once_differentiable
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2, quantize
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "own_bias", "scaled_mm"]

_UNIT = 16  # torch._scaled_mm takes rows and numbers of columns that are multiples of this


def scaled_mm(x: Tensor, weight: Tensor, bias: Tensor | None, grad: str) -> Tensor:
    """Quantised by plain PyTorch, multiplied by torch._scaled_mm, padded to multiples of 16 where need be."""
    y: Tensor = _Linear.apply(x, weight, bias, grad)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grad = grad
        y = _product(x.reshape(-1, x.shape[-1]), weight, bias, E4M3)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable("fp8_linear", "take torch.nn.functional.linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = rows @ weight if ctx.grad == "bf16" else _product(rows, weight.t(), None, E5M2)
            dx = dx.to(x.dtype).view(x.shape)  # autocast may have chosen another
        if ctx.needs_input_grad[1]:
            dweight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(x.dtype)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias, None


def _product(a: Tensor, b: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
    """a b' + bias of a [N, K] in `kind` and b [M, K] in e4m3, in a's dtype."""
    M, K = b.shape
    (qa, sa), (qb, sb) = quantize(a, kind), quantize(b)
    # What is made of transposed memory lies as it did. Hopper multiplies rows by rows.
    qa, qb = qa.reshape(-1).view(a.shape), qb.reshape(-1).view(M, K)
    rows, columns = -M % _UNIT, -K % _UNIT
    if columns:
        qa = _padded(qa, 0, columns)
    if rows or columns:
        qb, sb = _padded(qb, rows, columns), F.pad(sb, (0, 0, 0, rows))
    bias = None if bias is None else own_bias(bias, M + rows)
    y = torch._scaled_mm(qa, qb.t(), sa, sb.t(), bias, out_dtype=a.dtype, use_fast_accum=False)
    return y[:, :M].contiguous() if rows else y


def _padded(q: Tensor, rows: int, columns: int) -> Tensor:
    """q with so many rows and columns of zeros more."""
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)


def own_bias(bias: Tensor, length: int) -> Tensor:
    """bias with zeros up to `length`, in memory of its own: cuBLASLt refuses FP8 products whose bias is not
    aligned to 16 bytes, and torch._scaled_mm reads any bias as if it had no gaps."""
    # A part of something longer, as torch.compile would leave out a mere copy.
    return F.pad(bias, (0, length - bias.shape[0] + _UNIT))[:length]


compiled = compile_formula(scaled_mm)
