"""The ``triton`` candidate of short_conv: what its kernels are launched on."""

from typing import Any

import torch
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.short_conv import kernels
from bakeoff.ops.short_conv.tilings import (
    Tiling,
    backward_launch,
    backward_tilings,
    forward_launch,
    forward_tilings,
    state_launch,
    sum_launch,
)

__all__ = ["short_conv"]

_forward_kernel = TritonKernel(kernels._forward)
_backward_kernel = TritonKernel(kernels._backward)
_backward_state_kernel = TritonKernel(kernels._backward_state)
_look_up_kernel = TritonKernel(kernels._look_up)
_add_up_kernel = TritonKernel(kernels._add_up)

_LOOK_UP = {"BLOCK": 256, "num_warps": 4}


def results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Room for y and for the last inputs, contiguous."""
    del bias, activation, state
    items = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((items, weight.shape[1] - 1, x.shape[2]))


def forward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    end: Tensor,
    tiling: Tiling | None,
) -> None:
    """y, and the last inputs."""
    if x.numel() == 0:
        _replace(plan, end, state)
        return
    x = _channels_adjacent(plan, x)
    B, T, C = x.shape
    strides = {"x_b": x.stride(0) if B > 1 else 0, "x_t": x.stride(1) if T > 1 else 0}
    grid, numbers = forward_launch(
        (B, T, C), weight.shape[1], x.element_size(), end.shape[0], strides,
        multiprocessors(x.get_device()), tiling,
    )  # fmt: skip
    cu_seqlens, table = _sequences(plan, cu_seqlens, T)
    plan.launch(
        _forward_kernel, grid, x=x, **_dense(plan, weight=weight, bias=bias, state=state),
        cu_seqlens=cu_seqlens, table=table, y=y, end=end, SILU=activation == "silu", **numbers,
    )  # fmt: skip


def backward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor | None,
    dend: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dstate: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """The gradients that there is room for."""
    if x.numel() == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        if dstate is not None:
            _replace(plan, dstate, dend)
        return
    (B, T, C), W = x.shape, weight.shape[1]
    items = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x = _channels_adjacent(plan, x)
    if dy is None:
        dy, steps = plan.zeros((C,), x.dtype), (0, 0)
    else:
        dy = _channels_adjacent(plan, dy)
        steps = dy.stride(0) if B > 1 else 0, dy.stride(1) if T > 1 else 0
    strides = {"x_b": x.stride(0) if B > 1 else 0, "x_t": x.stride(1) if T > 1 else 0}
    strides |= {"dy_b": steps[0], "dy_t": steps[1]}
    cu_seqlens, table = _sequences(plan, cu_seqlens, T)
    given: dict[str, Any] = {"x": x, "dy": dy, "SILU": activation == "silu"}
    given |= _dense(plan, weight=weight, bias=bias, state=state, dend=dend)
    if dx is not None or dweight is not None or dbias is not None:
        grid, programs, numbers = backward_launch(
            (B, T, C), W, x.element_size(), strides, multiprocessors(x.get_device()), tiling
        )
        partial = None
        if dweight is not None or dbias is not None:
            partial = plan.empty((programs, W + 1, C), torch.float32)
        plan.launch(_backward_kernel, grid, **given, table=table, dx=dx, partial=partial, **numbers)
        if partial is not None:
            grid, numbers = sum_launch(C, W, programs)
            plan.launch(_add_up_kernel, grid, partial=partial, dweight=dweight, dbias=dbias, **numbers)
    if dstate is not None and W > 1:
        grid, numbers = state_launch(T, C, W, items, strides)
        plan.launch(_backward_state_kernel, grid, **given, cu_seqlens=cu_seqlens, dstate=dstate, **numbers)


def _sequences(plan: Plan, cu_seqlens: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None]:
    """Packed sequences' boundaries, and for each position its sequence, where that begins and ends."""
    if cu_seqlens is None:
        return None, None
    cu_seqlens = plan.contiguous(cu_seqlens)
    table = plan.empty((3, T), torch.int32)
    items = cu_seqlens.shape[0] - 1
    plan.launch(
        _look_up_kernel, (-(-T // _LOOK_UP["BLOCK"]),), cu_seqlens=cu_seqlens, table=table,
        T=T, N=items, bits=(items - 1).bit_length(), **_LOOK_UP,
    )  # fmt: skip
    return cu_seqlens, table


def _channels_adjacent(plan: Plan, x: Tensor) -> Tensor:
    """`x` [B, T, C] with neighbouring channels side by side; a copy if need be."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else plan.contiguous(x)


def _dense(plan: Plan, **tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: None if t is None else plan.contiguous(t) for name, t in tensors.items()}


def _replace(plan: Plan, target: Tensor, source: Tensor | None) -> None:
    """Copies `source`, or zeros if there is none, into `target`."""
    if source is None:
        plan.run(Tensor.zero_, target)
    else:
        plan.run(Tensor.copy_, target, source)


short_conv = kernel_op(
    "short_conv",
    results=results,
    names=("y", "end"),
    forward=forward,
    backward=backward,
    depends={"end": ("x", "state")},
    materialize=False,
    tilings={
        "forward": Tilings(Tiling, forward_tilings),
        "backward": Tilings(Tiling, backward_tilings),
    },
)
"""For float16, bfloat16 and float32."""
