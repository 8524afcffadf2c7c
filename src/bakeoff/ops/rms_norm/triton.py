"""The ``triton`` candidate of rms_norm: what its kernels are launched on.

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
from bakeoff.ops.rms_norm import kernels

__all__ = ["RMSNorm", "add_normalize", "normalize", "rms_norm"]

_forward_kernel = TritonKernel(kernels._forward)
_forward_long_kernel = TritonKernel(kernels._forward_long)
_backward_kernel = TritonKernel(kernels._backward)
_row_sums_kernel = TritonKernel(kernels._row_sums)
_backward_long_kernel = TritonKernel(kernels._backward_long)


def results(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Room for y, contiguous."""
    del weight, eps, offset
    return empty_like(x)


def forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    y: Tensor,
    tiling: ForwardTiling | None,
) -> None:
    """y = x * r * (offset + weight), r = 1 / sqrt(mean(x^2) + eps)."""
    _forward(plan, x, None, weight, eps, offset, y, None, tiling)


def backward(
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    dx: Tensor | None,
    dweight: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for."""
    _backward(plan, dy, None, x, weight, eps, offset, dx, None, dweight, tiling)


def added_results(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Room for y and s, contiguous."""
    del weight, eps, offset
    y = empty_like(x)
    if residual.dtype == x.dtype:
        return y, torch.empty_like(y)
    return y, torch.empty_like(y, dtype=torch.promote_types(x.dtype, residual.dtype))


def added_forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor,
    offset: float,
    y: Tensor,
    s: Tensor,
    tiling: ForwardTiling | None,
) -> None:
    """s = x + residual, y = s * r * (offset + weight)."""
    _forward(plan, x, residual, weight, eps, offset, y, s, tiling)


def added_backward(
    plan: Plan,
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for."""
    if dy is not None:
        if dx is None:  # the kernels fill dresidual beside dx
            dx, dresidual = dresidual, None
        _backward(plan, dy, ds, s, weight, eps, offset, dx, dresidual, dweight, tiling)
        return
    for gradient in (dx, dresidual):  # of s alone, which is a sum
        if gradient is not None:
            plan.run(Tensor.copy_, gradient, ds)


def _forward(
    plan: Plan,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    y: Tensor,
    s: Tensor | None,
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
    if weight is not None:
        weight = plan.contiguous(weight)
    passes, grid, numbers = forward_launch(N, D, itemsizes, strides, multiprocessors(x.get_device()), tiling)
    kernel = _forward_kernel if passes == 1 else _forward_long_kernel
    plan.launch(
        kernel, grid, x=x, residual=residual, weight=weight, y=y, s=s, eps=eps, offset=offset, **numbers
    )


def _backward(
    plan: Plan,
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    if s.numel() == 0:
        if dweight is not None:
            plan.run(Tensor.zero_, dweight)
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
    sums = int(dweight is not None)
    passes, grid, numbers = backward_launch(
        N, D, itemsizes, strides, sums, multiprocessors(s.get_device()), tiling
    )
    (partial,) = room_for_sums(plan, [dweight], grid[0])
    tensors = {"dy": dy, "ds": ds, "s": s, "weight": weight, "dx": dx, "dresidual": dresidual}
    numbers |= {"N": N, "offset": offset}
    if passes == 1:
        # Rows behind the last one are zeros: only a finite r adds nothing to the weight's sum.
        eps = max(eps, torch.finfo(torch.float32).tiny)
        plan.launch(_backward_kernel, grid, **tensors, partial=partial, eps=eps, **numbers)
    else:
        row_sums = plan.empty((N, 2), torch.float32)
        shared = {name: numbers[name] for name in ("dy_units", "s_units", "D", "BLOCK", "ALIGN", "num_warps")}
        plan.launch(
            _row_sums_kernel, (N,), dy=dy, s=s, weight=weight, sums=row_sums, eps=eps, offset=offset, **shared
        )
        plan.launch(_backward_long_kernel, grid, **tensors, sums=row_sums, partial=partial, **numbers)
    add_up(plan, [partial], [dweight])


_TILINGS = {
    "forward": Tilings(ForwardTiling, forward_tilings),
    "backward": Tilings(BackwardTiling, backward_tilings),
}

normalize = kernel_op("rms_norm", results=results, forward=forward, backward=backward, tilings=_TILINGS)
"""(x, weight, eps, offset) -> y."""

add_normalize = kernel_op(
    "rms_norm.residual",
    results=added_results,
    forward=added_forward,
    backward=added_backward,
    names=("y", "s"),
    shares={"residual": "x"},
    depends={"s": ("x", "residual")},
    materialize=False,
    tilings=_TILINGS,
)
"""(x, weight, eps, residual, offset) -> (y, s)."""


class RMSNorm(KernelPair):
    """The candidate: the one of two ops that a call's residual asks for."""

    def __call__(
        self, x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, offset: float
    ) -> Any:
        """y, or (y, s) with a residual, for float16, bfloat16 and float32."""
        if residual is None:
            return self.plain(x, weight, eps, offset)
        return self.added(x, weight, eps, residual, offset)


rms_norm = RMSNorm(normalize, add_normalize)
