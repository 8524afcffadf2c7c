"""The ``triton`` candidate of fp8_linear: rows quantised by one kernel, multiplied by torch._scaled_mm."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from bakeoff.kernels.layout import alignment
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.fp8_linear import kernels
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2, LARGEST
from bakeoff.ops.fp8_linear.scaled import own_bias

__all__ = ["fp8_linear", "launch", "quantize"]

_quantize_kernel = TritonKernel(kernels._quantize)
_quantize_long_kernel = TritonKernel(kernels._quantize_long)
_ONE_PASS = 16384  # elements of a row that fits in registers


def results(x: Tensor, weight: Tensor, bias: Tensor | None, grad: str) -> Tensor:
    """Room for y, contiguous."""
    del bias, grad
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def forward(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = (qx qw') * sx * sw' + bias."""
    if y.numel():
        _product(plan, x, weight, bias, y, E4M3)


def backward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    grad: str,
    dy: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """The gradients that there is room for: dx = dy weight, dweight = dy' x."""
    if dy.numel() == 0:
        for gradient in (dx, dweight, dbias):
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    if dx is not None and grad == "e5m2":
        _product(plan, dy, plan.derive(_turned, weight), None, dx, E5M2)
    elif dx is not None:
        plan.run(_multiply_back, dy, weight, dx)
    if dweight is not None:
        plan.run(_multiply_across, dy, x, dweight)
    if dbias is not None:
        plan.run(_sum_rows, dy, dbias)


def _product(plan: Plan, a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, kind: torch.dtype) -> None:
    """y [..., M] = a b' + bias of a [..., K] in `kind` and b [M, K] in e4m3."""
    M = b.shape[0]
    rows = -M % kernels.PAD
    qa, sa = quantize(plan, a, kind)
    qb, sb = quantize(plan, b, E4M3, rows)
    whole = plan.empty((qa.shape[0], M + rows), y.dtype) if rows else y
    plan.run(_multiply, qa, qb, sa, sb, bias, whole)
    if rows:
        plan.run(_copy_columns, y, whole)


def quantize(plan: Plan, x: Tensor, kind: torch.dtype, more: int = 0) -> tuple[Tensor, Tensor]:
    """(q [N, K], scale [N, 1]) of x [..., K] in `kind`; K is padded by zeros to a multiple of 16, and there
    are `more` rows of them behind."""
    K = x.shape[-1]
    N, padded = x.numel() // K, K + -K % kernels.PAD
    x, stride = plan.rows(x)
    new = plan.zeros if more else plan.empty
    q, scale = new((N + more, padded), kind), new((N + more, 1), torch.float32)
    kernel, grid, numbers = launch(N, K, stride, x.element_size())
    rounding = {"LARGEST": LARGEST[kind], "ROUND": bool(knobs.runtime.interpret)}
    plan.launch(kernel, grid, x=x, q=q, scale=scale, **numbers, **rounding)
    return q, scale


def launch(N: int, K: int, stride: int, itemsize: int) -> tuple[TritonKernel, tuple[int], dict[str, Any]]:
    """The kernel for N rows of K elements, `stride` apart, its grid, and its numbers and constants by name.
    Long rows are pieces of one 16-byte load a thread."""
    align = alignment(stride)
    numbers = {"x_units": stride // align, "K": K, "ALIGN": align}
    whole = max(kernels.PAD, triton.next_power_of_2(K))
    if K > _ONE_PASS:
        return _quantize_long_kernel, (N,), {**numbers, "BLOCK": 4096, "num_warps": 8}
    if whole <= 1024:
        rows = max(1, 1024 // whole)
        numbers |= {"BLOCK": whole, "ROWS": rows, "num_warps": 4}
        return _quantize_kernel, (-(-N // rows),), {**numbers, "N": N}
    warps = 4 if whole <= 4096 else 8
    block = min(whole, warps * 32 * 16 // itemsize)
    numbers |= {"BLOCK": block, "ROWS": 1, "num_warps": warps}
    return _quantize_kernel, (N,), {**numbers, "N": N}


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _multiply(qa: Tensor, qb: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, y: Tensor) -> None:
    M = qb.shape[0]
    if bias is not None and (bias.shape[0] != M or not bias.is_contiguous() or bias.data_ptr() % 16):
        bias = own_bias(bias, M)
    flat = y.view(-1, y.shape[-1])
    torch._scaled_mm(qa, qb.t(), sa, sb.t(), bias, out_dtype=y.dtype, use_fast_accum=False, out=flat)


def _copy_columns(y: Tensor, whole: Tensor) -> None:
    flat = y.view(-1, y.shape[-1])
    flat.copy_(whole[:, : flat.shape[1]])


def _multiply_back(dy: Tensor, weight: Tensor, dx: Tensor) -> None:
    torch.mm(dy.reshape(-1, dy.shape[-1]), weight, out=dx.view(-1, dx.shape[-1]))


def _multiply_across(dy: Tensor, x: Tensor, dweight: Tensor) -> None:
    torch.mm(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]), out=dweight)


def _sum_rows(dy: Tensor, dbias: Tensor) -> None:
    torch.sum(dy.reshape(-1, dy.shape[-1]), 0, out=dbias)


fp8_linear = kernel_op("fp8_linear", results=results, forward=forward, backward=backward)
"""For bfloat16 on a GPU."""
