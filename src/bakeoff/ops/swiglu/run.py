"""From tensors to launches: strides, allocations, one launch each way."""

from functools import lru_cache

import torch

from bakeoff.launch import Launcher
from bakeoff.layout import rows_of
from bakeoff.ops.swiglu import kernels

__all__ = ["run_backward", "run_forward"]

_forward = Launcher(kernels._forward)
_backward = Launcher(kernels._backward)
_plan = lru_cache(maxsize=4096)(kernels.plan)


def run_forward(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """y, contiguous."""
    y = _like(gate) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    size = y.numel()
    if size == 0:
        return y
    F = y.shape[-1]
    gate, stride = rows_of(gate)
    strides = (stride, stride)
    if up is not None:
        up, up_stride = rows_of(up)
        strides = (stride, up_stride)
    grid, numbers, constants = _plan(
        size // F, F, y.element_size(), strides, up is None, kernels.FORWARD_ACCESSES
    )
    _forward(grid, gate, up, y, *numbers, **constants)
    return y


def run_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, want_gate: bool, want_up: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of gate and up that are wanted, contiguous; without `up` one, of both halves."""
    dgate = _like(gate) if want_gate or up is None else None
    dup = _like(up) if want_up and up is not None else None
    size = dy.numel()
    if size == 0:
        return dgate, dup
    F = dy.shape[-1]
    dy, dy_stride = rows_of(dy)
    gate, stride = rows_of(gate)
    strides = (dy_stride, stride, stride)
    if up is not None:
        up, up_stride = rows_of(up)
        strides = (dy_stride, stride, up_stride)
    grid, numbers, constants = _plan(
        size // F, F, dy.element_size(), strides, up is None, kernels.BACKWARD_ACCESSES
    )
    _backward(grid, dy, gate, up, dgate, dup, *numbers, **constants)
    return dgate, dup


def _like(t: torch.Tensor) -> torch.Tensor:
    """An uninitialised contiguous tensor like t (empty_like takes half of new_empty's time)."""
    return torch.empty_like(t) if t.is_contiguous() else t.new_empty(t.shape)
