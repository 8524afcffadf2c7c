"""The candidates of norm_linear with kernels: what these are launched on.

``separate`` normalises and leaves the product to PyTorch; ``prologue`` normalises inside the product;
``epilogue`` corrects the product of x and weight * gamma. They share one backward, with PyTorch's products
and one kernel that takes the normalisation's gradients and makes its result again for the weight's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import alignment
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.norm_linear import kernels

__all__ = ["Product", "epilogue", "prologue", "separate"]

_normalize = TritonKernel(kernels._normalize)
_statistics = TritonKernel(kernels._statistics)
_backward_kernel = TritonKernel(kernels._backward)
_add_up = TritonKernel(kernels._add_up)
_scale_weight = TritonKernel(kernels._scale_weight)
_prologue = TritonKernel(kernels._prologue)
_epilogue = TritonKernel(kernels._epilogue)


class Product(NamedTuple):
    """How a matrix product is cut into tiles of y."""

    rows: int
    cols: int
    block: int
    """Of K, at a time."""
    stages: int
    warps: int


_GROUP = 8  # tiles of rows whose programs run together, so that L2 holds what they share
_PRODUCTS = (
    Product(128, 256, 64, 3, 8), Product(128, 128, 64, 3, 8), Product(128, 128, 64, 4, 4),
    Product(64, 128, 64, 4, 4), Product(128, 64, 64, 4, 4), Product(64, 64, 64, 4, 4),
    Product(64, 256, 64, 3, 8), Product(256, 128, 64, 3, 8), Product(128, 128, 32, 5, 4),
    Product(32, 64, 64, 4, 4),
)  # fmt: skip


def products(N: int, M: int, sms: int) -> list[Product]:
    """The default: the least time if a multiprocessor's rate were that of its tile's shape; then others."""

    def time(tile: Product) -> float:
        waves = -(-(-(-N // tile.rows) * -(-M // tile.cols)) // sms)
        return waves * (tile.rows * tile.cols + 24.0 * (tile.rows + tile.cols))

    return sorted(_PRODUCTS, key=time)


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


def _separate(
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
    if y.numel() == 0:
        return
    x, numbers = _rows(plan, x, kind)
    gamma, beta = (None if t is None else plan.contiguous(t) for t in (gamma, beta))
    h = plan.empty((numbers["N"], numbers["K"]), x.dtype)
    plan.launch(
        _normalize,
        (-(-numbers["N"] // numbers["ROWS"]),),
        x=x,
        gamma=gamma,
        beta=beta,
        h=h,
        eps=eps,
        **numbers,
    )
    plan.run(_multiply, h, weight, bias, y)


def _in_prologue(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
    y: Tensor,
    tiling: Product | None,
) -> None:
    if y.numel() == 0:
        return
    x, x_stride = plan.rows(x)
    weight, weight_stride = plan.rows(weight)
    grid, numbers = _product(y, x.shape[-1], kind, {"x": x_stride, "weight": weight_stride}, tiling)
    bias, gamma, beta = (None if t is None else plan.contiguous(t) for t in (bias, gamma, beta))
    plan.launch(
        _prologue, grid, x=x, weight=weight, bias=bias, gamma=gamma, beta=beta, y=y, eps=eps, **numbers
    )


def _in_epilogue(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    kind: str,
    y: Tensor,
    tiling: Product | None,
) -> None:
    if y.numel() == 0:
        return
    M, K = weight.shape
    weight, weight_stride = plan.rows(weight)
    x, numbers = _rows(plan, x, kind)
    bias, gamma, beta = (None if t is None else plan.contiguous(t) for t in (bias, gamma, beta))
    scaled, sums = plan.empty((M, K), x.dtype), plan.empty((2, M), torch.float32)
    stats = plan.empty((2, numbers["N"]), torch.float32)
    align = alignment(K, weight_stride)
    whole = _whole_rows(M, K)
    plan.launch(
        _scale_weight, (-(-M // whole["ROWS"]),), weight=weight, bias=bias, gamma=gamma, beta=beta,
        scaled=scaled, sums=sums, M=M, weight_units=weight_stride // align, K=K, ALIGN=align, **whole,
    )  # fmt: skip
    plan.launch(_statistics, (-(-numbers["N"] // numbers["ROWS"]),), x=x, stats=stats, eps=eps, **numbers)
    strides = {"x": numbers["x_units"] * numbers["ALIGN"]}
    grid, cut = _product(y, K, kind, strides, tiling)
    plan.launch(_epilogue, grid, x=x, scaled=scaled, stats=stats, sums=sums, y=y, **cut)


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


def _product(
    y: Tensor, K: int, kind: str, strides: dict[str, int], tiling: Product | None
) -> tuple[tuple[int], dict[str, Any]]:
    M = y.shape[-1]
    N = y.numel() // M
    tile = tiling or products(N, M, multiprocessors(y.get_device()))[0]
    align = alignment(K, *strides.values())
    numbers: dict[str, Any] = {f"{name}_units": stride // align for name, stride in strides.items()}
    numbers |= {
        "N": N, "M": M, "K": K, "ROWS": tile.rows, "COLS": tile.cols, "BLOCK": tile.block, "GROUP": _GROUP,
        "LAYER": kind == "layer", "ALIGN": align, "num_stages": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
    return (-(-N // tile.rows) * -(-M // tile.cols),), numbers


def _tilings(case: Any) -> list[Product]:
    M, K = case.weight.shape
    return products(case.x.numel // max(K, 1), M, multiprocessors(case.device))


def _declared(method: str, forward: Callable[..., None], tilings: Sequence[str] = ()) -> KernelOp:
    return kernel_op(
        f"norm_linear.{method}",
        results=results,
        forward=forward,
        backward=backward,
        tilings={axis: Tilings(Product, _tilings) for axis in tilings},
    )


separate = _declared("separate", _separate)
"""For float16, bfloat16 and float32."""
prologue = _declared("prologue", _in_prologue, ("forward",))
"""For float16 and bfloat16."""
epilogue = _declared("epilogue", _in_epilogue, ("forward",))
"""For bfloat16."""
