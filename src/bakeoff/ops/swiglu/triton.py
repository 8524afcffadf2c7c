"""The ``triton`` candidate of swiglu: what its kernels are launched on."""

from torch import Tensor

from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.swiglu import kernels
from bakeoff.ops.swiglu.kernels import Tiling, launch, tilings

__all__ = ["swiglu"]

_forward_kernel = TritonKernel(kernels._forward)
_backward_kernel = TritonKernel(kernels._backward)


def results(gate: Tensor, up: Tensor | None) -> Tensor:
    """Room for y, contiguous."""
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2)) if up is None else empty_like(gate)


def forward(plan: Plan, gate: Tensor, up: Tensor | None, y: Tensor, tiling: Tiling | None) -> None:
    """y = silu(gate) * up."""
    if y.numel() == 0:
        return
    gate, gate_stride = plan.rows(gate)
    up, up_stride = (None, gate_stride) if up is None else plan.rows(up)
    strides = {"gate": gate_stride, "up": up_stride}
    features = y.shape[-1]
    grid, numbers = launch(
        y.numel() // features, features, y.element_size(), strides, packed=up is None, tiling=tiling
    )
    plan.launch(_forward_kernel, grid, gate=gate, up=up, y=y, **numbers)


def backward(
    plan: Plan,
    gate: Tensor,
    up: Tensor | None,
    dy: Tensor,
    dgate: Tensor | None,
    dup: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """The gradients that there is room for; without `up` one, of both halves."""
    if dy.numel() == 0:
        return
    features = dy.shape[-1]
    rows = dy.numel() // features
    dy, dy_stride = plan.rows(dy)
    gate, gate_stride = plan.rows(gate)
    up, up_stride = (None, gate_stride) if up is None else plan.rows(up)
    strides = {"dy": dy_stride, "gate": gate_stride, "up": up_stride}
    grid, numbers = launch(rows, features, dy.element_size(), strides, packed=up is None, tiling=tiling)
    plan.launch(_backward_kernel, grid, dy=dy, gate=gate, up=up, dgate=dgate, dup=dup, **numbers)


swiglu = kernel_op(
    "swiglu",
    results=results,
    forward=forward,
    backward=backward,
    tilings={"forward": Tilings(Tiling, tilings), "backward": Tilings(Tiling, tilings)},
)
"""For float16, bfloat16 and float32."""
