"""The ``triton`` candidate of layer_norm: what its kernels are launched on.

It is two ops: without a residual, of which y is the only result, and with one.
"""

from typing import Any

import torch
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.pair import KernelPair
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.row_tilings import (
    BackwardTiling,
    ForwardTiling,
    backward_launch,
    backward_tilings,
    forward_launch,
    forward_tilings,
)
from bakeoff.kernels.rows import add_up, room_for_sums
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.layer_norm import kernels

__all__ = ["LayerNorm", "add_normalize", "layer_norm", "normalize"]

_forward_kernel = TritonKernel(kernels._forward)
_forward_long_kernel = TritonKernel(kernels._forward_long)
_backward_kernel = TritonKernel(kernels._backward)
_row_means_kernel = TritonKernel(kernels._row_means)
_backward_long_kernel = TritonKernel(kernels._backward_long)


def results(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Room for y, contiguous."""
    del weight, bias, eps
    return empty_like(x)


def keeps(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor]:
    """Room for what the backward reads of every row."""
    del weight, bias, eps
    return (x.new_empty((*x.shape[:-1], 3), dtype=torch.float32),)


def forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    stats: Tensor | None,
    tiling: ForwardTiling | None,
) -> None:
    """y = (x - mean(x)) * r * weight + bias, r = 1 / sqrt(var(x) + eps)."""
    _forward(plan, x, None, weight, bias, eps, y, None, stats, tiling)


def backward(
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for."""
    _backward(plan, dy, None, x, stats, weight, dx, None, dweight, dbias, tiling)


def added_results(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Room for y and s, contiguous."""
    del weight, bias, eps
    y = empty_like(x)
    if residual.dtype == x.dtype:
        return y, torch.empty_like(y)
    return y, torch.empty_like(y, dtype=torch.promote_types(x.dtype, residual.dtype))


def added_keeps(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor
) -> tuple[Tensor]:
    """Room for what the backward reads of every row."""
    del residual
    return keeps(x, weight, bias, eps)


def added_forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor,
    y: Tensor,
    s: Tensor,
    stats: Tensor | None,
    tiling: ForwardTiling | None,
) -> None:
    """s = x + residual, y = (s - mean(s)) * r * weight + bias."""
    _forward(plan, x, residual, weight, bias, eps, y, s, stats, tiling)


def added_backward(
    plan: Plan,
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for."""
    if dy is not None:
        if dx is None:  # the kernels fill dresidual beside dx
            dx, dresidual = dresidual, None
        _backward(plan, dy, ds, s, stats, weight, dx, dresidual, dweight, dbias, tiling)
        return
    for gradient in (dx, dresidual):  # of s alone, which is a sum
        if gradient is not None:
            plan.run(Tensor.copy_, gradient, ds)


def _forward(
    plan: Plan,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    s: Tensor | None,
    stats: Tensor | None,
    tiling: ForwardTiling | None,
) -> None:
    if y.numel() == 0:
        return
    D = y.shape[-1]
    N = y.numel() // D
    itemsizes = {"x": x.element_size()}
    x, x_stride = plan.rows(x)
    strides = {"x": x_stride, "residual": D}
    if residual is not None:
        itemsizes["residual"] = residual.element_size()
        residual, strides["residual"] = plan.rows(residual)
    weight, bias = (None if t is None else plan.contiguous(t) for t in (weight, bias))
    passes, grid, numbers = forward_launch(N, D, itemsizes, strides, multiprocessors(x.get_device()), tiling)
    kernel = _forward_kernel if passes == 1 else _forward_long_kernel
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias, "y": y, "s": s, "stats": stats}
    plan.launch(kernel, grid, **tensors, eps=eps, **numbers)


def _backward(
    plan: Plan,
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    totals = [dweight, dbias]
    if s.numel() == 0:
        for total in totals:
            if total is not None:
                plan.run(Tensor.zero_, total)
        return
    D = s.shape[-1]
    N = s.numel() // D
    itemsizes = {"dy": dy.element_size(), "s": s.element_size()}
    dy, dy_stride = plan.rows(dy)
    s, s_stride = plan.rows(s)
    strides = {"dy": dy_stride, "ds": D, "s": s_stride}
    if ds is not None:
        itemsizes["ds"] = ds.element_size()
        ds, strides["ds"] = plan.rows(ds)
    if weight is not None:
        weight = plan.contiguous(weight)
    sums = sum(total is not None for total in totals)
    passes, grid, numbers = backward_launch(
        N, D, itemsizes, strides, sums, multiprocessors(s.get_device()), tiling
    )
    partials = room_for_sums(plan, totals, grid[0])
    given = {"dy": dy, "s": s, "stats": stats, "weight": weight}
    tensors = {
        **given, "ds": ds, "dx": dx, "dresidual": dresidual, "dweight": partials[0], "dbias": partials[1],
    }  # fmt: skip
    numbers["N"] = N
    if passes == 1:
        plan.launch(_backward_kernel, grid, **tensors, **numbers)
    else:
        means = None
        if dx is not None:
            means = plan.empty((N, 2), torch.float32)
            shared = ("dy_units", "s_units", "D", "BLOCK", "ALIGN", "num_warps")
            plan.launch(
                _row_means_kernel, (N,), **given, means=means, **{name: numbers[name] for name in shared}
            )
        plan.launch(_backward_long_kernel, grid, **tensors, means=means, **numbers)
    add_up(plan, partials, totals)


_TILINGS = {
    "forward": Tilings(ForwardTiling, forward_tilings),
    "backward": Tilings(BackwardTiling, backward_tilings),
}

normalize = kernel_op(
    "layer_norm",
    results=results,
    keeps=keeps,
    kept=("stats",),
    forward=forward,
    backward=backward,
    tilings=_TILINGS,
)
"""(x, weight, bias, eps) -> y."""

add_normalize = kernel_op(
    "layer_norm.residual",
    results=added_results,
    keeps=added_keeps,
    kept=("stats",),
    forward=added_forward,
    backward=added_backward,
    names=("y", "s"),
    shares={"residual": "x"},
    depends={"s": ("x", "residual")},
    materialize=False,
    tilings=_TILINGS,
)
"""(x, weight, bias, eps, residual) -> (y, s)."""


class LayerNorm(KernelPair):
    """The candidate: the one of two ops that a call's residual asks for."""

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
    ) -> Any:
        """y, or (y, s) with a residual, for float16, bfloat16 and float32."""
        if residual is None:
            return self.plain(x, weight, bias, eps)
        return self.added(x, weight, bias, eps, residual)


layer_norm = LayerNorm(normalize, add_normalize)
