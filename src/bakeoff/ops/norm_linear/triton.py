"""The ``separate`` candidate of norm_linear: what its kernels are launched on.

It normalises and leaves the product to PyTorch. In backward, one kernel takes the normalisation's gradients
and makes its result again for the weight's.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import alignment
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.norm_linear import kernels

__all__ = ["separate"]

_normalize = TritonKernel(kernels._normalize)
_backward_kernel = TritonKernel(kernels._backward)
_add_up = TritonKernel(kernels._add_up)


def results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    """Room for y, contiguous."""
    del bias, gamma, beta, eps, kind
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
    y: Tensor,
) -> None:
    """y = norm(x) weight' + bias."""
    if y.numel() == 0:
        return
    x, numbers = _rows(plan, x, kind)
    gamma, beta = (None if t is None else plan.contiguous(t) for t in (gamma, beta))
    h = plan.empty((numbers["N"], numbers["K"]), x.dtype)
    tiles = -(-numbers["N"] // numbers["ROWS"])
    plan.launch(_normalize, (tiles,), x=x, gamma=gamma, beta=beta, h=h, eps=eps, **numbers)
    plan.run(_multiply, h, weight, bias, y)


def backward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
    dy: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> None:
    """The gradients that there is room for: dh = dy weight, dweight = dy' h."""
    if dy.numel() == 0 or x.numel() == 0:
        for gradient in (dx, dweight, dbias, dgamma, dbeta):
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    x, numbers = _rows(plan, x, kind)
    N, K = numbers["N"], numbers["K"]
    gamma, beta = (None if t is None else plan.contiguous(t) for t in (gamma, beta))
    dh = h = partial = None
    if dx is not None or dgamma is not None or dbeta is not None:
        dh = plan.empty((N, K), x.dtype)
        plan.run(_multiply_back, dy, weight, dh)
    if dweight is not None:
        h = plan.empty((N, K), x.dtype)
    if dh is not None or h is not None:
        tiles = -(-N // numbers["ROWS"])
        programs = min(tiles, 4 * multiprocessors(x.get_device()))
        if dgamma is not None or dbeta is not None:
            partial = plan.empty((programs, 2, K), torch.float32)
        plan.launch(
            _backward_kernel, (programs,), x=x, gamma=gamma, beta=beta, dh=dh, dx=dx, h=h, partial=partial,
            eps=eps, **numbers,
        )  # fmt: skip
        if partial is not None:
            plan.launch(
                _add_up, (-(-K // 64), 2), partial=partial, dgamma=dgamma, dbeta=dbeta, P=programs, K=K,
                ROWS=32, BLOCK=64, num_warps=4,
            )  # fmt: skip
    if dweight is not None:
        plan.run(_multiply_across, dy, h, dweight)
    if dbias is not None:
        plan.run(_sum_rows, dy, dbias)


def _multiply(h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    flat = y.view(-1, y.shape[-1])
    if bias is None:
        torch.mm(h, weight.t(), out=flat)
    else:
        torch.addmm(bias, h, weight.t(), out=flat)


def _multiply_back(dy: Tensor, weight: Tensor, dh: Tensor) -> None:
    torch.mm(dy.reshape(-1, dy.shape[-1]), weight, out=dh)


def _multiply_across(dy: Tensor, h: Tensor, dweight: Tensor) -> None:
    torch.mm(dy.reshape(-1, dy.shape[-1]).t(), h, out=dweight)


def _sum_rows(dy: Tensor, dbias: Tensor) -> None:
    torch.sum(dy.reshape(-1, dy.shape[-1]), 0, out=dbias)


def _rows(plan: Plan, x: Tensor, kind: str) -> tuple[Tensor, dict[str, Any]]:
    """x as rows one stride apart, and what kernels over whole rows need."""
    K = x.shape[-1]
    x, stride = plan.rows(x)
    align = alignment(K, stride)
    N = x.numel() // K
    return x, {
        "N": N, "x_units": stride // align, "K": K, "LAYER": kind == "layer", "ALIGN": align,
        **_whole_rows(N, K),
    }  # fmt: skip


def _whole_rows(N: int, K: int) -> dict[str, int]:
    """Tiles of some 2,048 elements, of fewer rows where the device would not be filled."""
    cols = triton.next_power_of_2(K)
    rows = max(1, min(2048 // cols, triton.next_power_of_2(-(-N // 512))))
    return {"COLS": cols, "ROWS": rows, "num_warps": max(1, min(16, rows * cols // 512))}


separate = kernel_op("norm_linear.separate", results=results, forward=forward, backward=backward)
"""For float16, bfloat16 and float32."""
