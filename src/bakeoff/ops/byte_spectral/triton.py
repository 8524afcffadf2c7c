"""The ``triton`` candidate of byte_spectral: what its kernels are launched on."""

from typing import Any

from torch import Tensor, float32

from bakeoff import hardware
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.byte_spectral import kernels
from bakeoff.ops.byte_spectral.kernels import BackwardTiling, ForwardTiling
from bakeoff.ops.byte_spectral.kernels import backward as backward_kernels
from bakeoff.ops.byte_spectral.kernels import forward as forward_kernels

__all__ = ["byte_spectral"]

_forward_kernel = TritonKernel(forward_kernels._forward)
_backward_kernel = TritonKernel(backward_kernels._backward)
_sum_kernel = TritonKernel(backward_kernels._sum_partials)


def results(
    ids: Tensor,
    table: Tensor,
    window: Tensor,
    omega: Tensor | None,
    features: str,
    weight: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> Tensor:
    """Room for the features, [B, T, F] in table's dtype, or their projection, [B, T, D] in weight's."""
    del bias, causal
    if weight is not None:
        return weight.new_empty((*ids.shape, weight.shape[1]))
    bins = window.shape[0] // 2 + 1 if omega is None else omega.shape[0]
    return table.new_empty((*ids.shape, table.shape[1] * bins * (2 if features == "complex" else 1)))


def forward(
    plan: Plan,
    ids: Tensor,
    table: Tensor,
    window: Tensor,
    omega: Tensor | None,
    features: str,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiling: ForwardTiling | None,
) -> None:
    """The features, or their projection."""
    if out.numel() == 0:
        return
    B, T = ids.shape
    device = ids.get_device()
    generation = hardware.generation(device)
    sizes = _sizes(table, window, omega, features, weight, generation)
    if tiling is None:
        memory = hardware.shared_memory(device)
        tiling = kernels.forward_tiling(sizes, out.itemsize, generation, memory)
    ids, row = plan.rows(ids)
    grid, numbers = kernels.forward_launch(B, T, sizes, tiling)
    plan.launch(
        _forward_kernel, grid, ids=ids, table=plan.contiguous(table), window=plan.contiguous(window),
        omega=_dense(plan, omega), weight=_dense(plan, weight), bias=_dense(plan, bias), out=out,
        T=T, row=row, **numbers,
    )  # fmt: skip


def backward(
    plan: Plan,
    ids: Tensor,
    table: Tensor,
    window: Tensor,
    omega: Tensor | None,
    features: str,
    weight: Tensor | None,
    dout: Tensor,
    dtable: Tensor | None,
    dwindow: Tensor | None,
    domega: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:
    """The gradients that there is room for: partial sums, one row a program, and what they add up to."""
    gradients = (dweight, dbias, dtable, dwindow, domega)
    ends, columns = [], 0  # of each gradient's columns in the partial sums
    for gradient in gradients:
        columns += 0 if gradient is None else gradient.numel()
        ends.append(columns)
    if dout.numel() == 0:
        for gradient in gradients:
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    B, T = ids.shape
    device = ids.get_device()
    generation = hardware.generation(device)
    sizes = _sizes(table, window, omega, features, weight, generation)
    tiling = tiling or kernels.backward_tiling(sizes, generation)
    grid, numbers = kernels.backward_launch(B, T, sizes, tiling, hardware.multiprocessors(device))
    ids, row = plan.rows(ids)
    partial = plan.empty((grid[0], columns), float32)
    bias_at, table_at, window_at, omega_at, _ = ends
    plan.launch(
        _backward_kernel, grid, ids=ids, table=plan.contiguous(table), window=plan.contiguous(window),
        omega=_dense(plan, omega), weight=_dense(plan, weight), dout=plan.contiguous(dout), partial=partial,
        T=T, row=row, columns=columns, bias_at=bias_at, signal_at=table_at,
        WEIGHT=dweight is not None, BIAS=dbias is not None,
        TABLE=dtable is not None, WINDOW=dwindow is not None, OMEGA=domega is not None, **numbers,
    )  # fmt: skip
    sum_grid, sum_numbers = kernels.sum_launch(columns)
    plan.launch(
        _sum_kernel, sum_grid, partial=partial, dweight=dweight, dbias=dbias, dtable=dtable, dwindow=dwindow,
        domega=domega, columns=columns, rows=grid[0], bias_at=bias_at, table_at=table_at, window_at=window_at,
        omega_at=omega_at, **sum_numbers,
    )  # fmt: skip


def _sizes(
    table: Any, window: Any, omega: Any | None, features: str, weight: Any | None, generation: int
) -> dict[str, Any]:
    """The kernels' constants for tensors, or for what a `Case` has in their place."""
    W = window.shape[0]
    K = W // 2 + 1 if omega is None else omega.shape[0]
    D, dtype = (1, table.dtype) if weight is None else (weight.shape[1], weight.dtype)
    return kernels.constants(table.shape[1], W, K, D, features, dtype, tensor_cores=generation >= 8)


def _dense(plan: Plan, t: Tensor | None) -> Tensor | None:
    return None if t is None else plan.contiguous(t)


def _forward_tilings(case: Any) -> list[ForwardTiling]:
    device = hardware.index(case.device)
    generation = hardware.generation(device)
    sizes = _sizes(case.table, case.window, case.omega, case.features, case.weight, generation)
    itemsize = (case.weight or case.table).dtype.itemsize
    return kernels.forward_tilings(sizes, itemsize, generation, hardware.shared_memory(device))


def _backward_tilings(case: Any) -> list[BackwardTiling]:
    generation = hardware.generation(hardware.index(case.device))
    sizes = _sizes(case.table, case.window, case.omega, case.features, case.weight, generation)
    return kernels.backward_tilings(sizes, generation)


byte_spectral = kernel_op(
    "byte_spectral",
    results=results,
    names=("out",),
    forward=forward,
    backward=backward,
    tilings={
        "forward": Tilings(ForwardTiling, _forward_tilings),
        "backward": Tilings(BackwardTiling, _backward_tilings),
    },
)
"""The windowed form, for float16, bfloat16 and float32."""
