"""QK-norm and rotation as one op of kernels: from tensors to launches."""

import torch
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.rotary.kernels import Tiling, dense_strides
from bakeoff.ops.rotary.normed import kernels
from bakeoff.ops.rotary.normed.tilings import (
    SUM_TILING,
    BackwardTiling,
    backward_launch,
    backward_tilings,
    forward_launch,
    forward_tilings,
)

__all__ = ["add_up", "dense_heads", "normalize_rotate", "partials", "tables"]

_forward_kernel = TritonKernel(kernels._forward)
_backward_kernel = TritonKernel(kernels._backward)
_sum_partials_kernel = TritonKernel(kernels._sum_partials)


def results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, position_ids: Tensor | None,
    q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, q_head_major: bool, k_head_major: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Room for q' and k', dense: [B, H, T, D] seen as [B, T, H, D] where `..._head_major`."""
    del cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset
    turned_q, turned_k = (
        x.new_empty_strided(x.shape, dense_strides(x.shape, True)) if head_major else empty_like(x)
        for x, head_major in ((q, q_head_major), (k, k_head_major))
    )
    return turned_q, turned_k


def forward(
    plan: Plan, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
    position_ids: Tensor | None, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float,
    q_head_major: bool, k_head_major: bool, turned_q: Tensor, turned_k: Tensor, tiling: Tiling | None,
) -> None:  # fmt: skip
    """q and k normalised, scaled and turned: one launch."""
    if turned_q.numel() + turned_k.numel() == 0:
        return
    q, k = dense_heads(plan, q), dense_heads(plan, k)
    cos, sin, position_ids = tables(plan, cos, sin, position_ids)
    grid, numbers = forward_launch(
        q, k, cos.shape, cos.stride(0), position_ids=0 if position_ids is None else position_ids.dim(),
        interleaved=interleaved, head_major=(q_head_major, k_head_major), tiling=tiling,
    )  # fmt: skip
    plan.launch(
        _forward_kernel, grid, q=q, k=k, cos=cos, sin=sin, position_ids=position_ids,
        q_weight=plan.contiguous(q_weight), k_weight=plan.contiguous(k_weight), q_out=turned_q,
        k_out=turned_k, eps=eps, offset=offset, **numbers,
    )  # fmt: skip


def backward(
    plan: Plan, dturned_q: Tensor | None, dturned_k: Tensor | None, q: Tensor, k: Tensor, cos: Tensor,
    sin: Tensor, interleaved: bool, position_ids: Tensor | None, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, dq: Tensor | None, dk: Tensor | None, dq_weight: Tensor | None,
    dk_weight: Tensor | None, tiling: BackwardTiling | None,
) -> None:  # fmt: skip
    """The gradients that there is room for: one launch, and one that adds up those of the weights."""
    gq, dq, dq_weight = _to_fill(plan, dturned_q, dq, dq_weight)
    gk, dk, dk_weight = _to_fill(plan, dturned_k, dk, dk_weight)
    if gq is None and gk is None:
        return
    sums = dq_weight is not None or dk_weight is not None
    q, k = dense_heads(plan, q), dense_heads(plan, k)
    cos, sin, position_ids = tables(plan, cos, sin, position_ids)
    grid, numbers = backward_launch(
        gq, gk, q, k, cos.shape, cos.stride(0), interleaved=interleaved, sums=sums,
        position_ids=0 if position_ids is None else position_ids.dim(),
        sms=multiprocessors(q.get_device()), tiling=tiling,
    )  # fmt: skip
    q_partial, k_partial = partials(plan, grid[0], dq_weight, dk_weight)
    plan.launch(
        _backward_kernel, grid, gq=gq, gk=gk, q=q, k=k, cos=cos, sin=sin, position_ids=position_ids,
        q_weight=plan.contiguous(q_weight), k_weight=plan.contiguous(k_weight), dq=dq, dk=dk,
        q_partial=q_partial, k_partial=k_partial, eps=eps, offset=offset, **numbers,
    )  # fmt: skip
    add_up(plan, grid[0], q_partial, k_partial, dq_weight, dk_weight)


def partials(
    plan: Plan, programs: int, dq_weight: Tensor | None, dk_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What each program leaves of the weights' gradients, [programs, D]; a program that has every row needs
    nobody to add up after it."""
    q_partial, k_partial = (
        weight if weight is None or programs == 1 else plan.empty((programs, *weight.shape), torch.float32)
        for weight in (dq_weight, dk_weight)
    )
    return q_partial, k_partial


def add_up(
    plan: Plan, programs: int, q_partial: Tensor | None, k_partial: Tensor | None, dq_weight: Tensor | None,
    dk_weight: Tensor | None,
) -> None:  # fmt: skip
    """The weights' gradients from `partials`, where there are several: one launch."""
    weight = dk_weight if dq_weight is None else dq_weight
    if weight is None or programs == 1:
        return
    D, (block_p, block_d, warps) = weight.shape[0], SUM_TILING
    plan.launch(
        _sum_partials_kernel, (-(-D // block_d), 2), q_partial=q_partial, k_partial=k_partial,
        dq_weight=dq_weight, dk_weight=dk_weight, P=programs, D=D, BLOCK_P=block_p, BLOCK_D=block_d,
        num_warps=warps,
    )  # fmt: skip


def _to_fill(
    plan: Plan, dy: Tensor | None, dx: Tensor | None, dweight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What arrives for a result, and what the kernel fills from it; all None where there is nothing to do, or
    nothing to read, which leaves the weight a gradient of 0."""
    if dy is None or (dx is None and dweight is None):
        return None, None, None
    if dy.numel() == 0:
        if dweight is not None:
            plan.run(Tensor.zero_, dweight)
        return None, None, None
    return dense_heads(plan, dy), dx, dweight


def dense_heads(plan: Plan, x: Tensor) -> Tensor:
    """`x` [B, T, H, D] with a dense last dimension, a copy if need be."""
    return x if x.stride(3) == 1 else plan.contiguous(x)


def tables(
    plan: Plan, cos: Tensor, sin: Tensor, position_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tables with dense rows that lie equally far apart in both, and contiguous positions."""
    if cos.stride(1) != 1 or sin.stride() != cos.stride():
        cos, sin = plan.contiguous(cos), plan.contiguous(sin)
    return cos, sin, None if position_ids is None else plan.contiguous(position_ids)


normalize_rotate = kernel_op(
    "rotary.normed",
    results=results,
    forward=forward,
    backward=backward,
    names=("turned_q", "turned_k"),
    depends={"turned_q": ("q", "q_weight"), "turned_k": ("k", "k_weight")},
    materialize=False,
    tilings={
        "forward": Tilings(Tiling, forward_tilings),
        "backward": Tilings(BackwardTiling, backward_tilings),
    },
)
"""(q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset, q_head_major, k_head_major) ->
(q', k'), where `..._head_major` says whether a result's memory is [B, H, T, D]."""
