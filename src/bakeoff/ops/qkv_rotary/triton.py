"""The ``triton`` candidate of qkv_rotary: from tensors to launches."""

from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.qkv_rotary import kernels
from bakeoff.ops.qkv_rotary.reference import counts
from bakeoff.ops.qkv_rotary.tilings import backward_tilings, forward_tilings, normed_launch, plain_launch
from bakeoff.ops.rotary.kernels import Tiling
from bakeoff.ops.rotary.normed.tilings import BackwardTiling
from bakeoff.ops.rotary.normed.triton import add_up, dense_heads, partials, tables
from bakeoff.ops.rotary.normed.triton import forward as normalize_rotate
from bakeoff.ops.rotary.triton import forward as rotate

__all__ = ["qkv_rotary"]

_rotate_back = TritonKernel(kernels._rotate_back)
_normed_back = TritonKernel(kernels._normed_back)


def results(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int | None, interleaved: bool,
    position_ids: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None,
    offset: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Room for q' and k', dense."""
    del cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset
    B, T, heads, D = qkv.shape
    H, K = counts(heads, kv_heads)
    return qkv.new_empty((B, T, H, D)), qkv.new_empty((B, T, K, D))


def values(qkv: Tensor, kv_heads: int | None) -> Tensor:
    """v [B, T, Hk, D] where it stands in qkv."""
    H, K = counts(qkv.shape[2], kv_heads)
    return qkv.narrow(2, H + K, K)


def forward(
    plan: Plan, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int | None, interleaved: bool,
    position_ids: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None,
    offset: float | None, turned_q: Tensor, turned_k: Tensor, tiling: Tiling | None,
) -> None:  # fmt: skip
    """q' and k': one launch, that of `rotary`."""
    if qkv.numel() == 0:
        return
    q, k = _turned_parts(plan, qkv, kv_heads)
    if q_weight is None or k_weight is None:
        rotate(
            plan, q, k, cos, sin, interleaved, position_ids, False, False, False, turned_q, turned_k, tiling
        )
    else:
        assert eps is not None and offset is not None
        normalize_rotate(
            plan, q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset, False, False,
            turned_q, turned_k, tiling,
        )  # fmt: skip


def backward(
    plan: Plan, dturned_q: Tensor | None, dturned_k: Tensor | None, dv: Tensor | None, qkv: Tensor,
    cos: Tensor, sin: Tensor, kv_heads: int | None, interleaved: bool, position_ids: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None, offset: float | None,
    dqkv: Tensor | None, dq_weight: Tensor | None, dk_weight: Tensor | None, tiling: BackwardTiling | None,
) -> None:  # fmt: skip
    """The gradients that there is room for: one launch, and one that adds up those of the weights."""
    if qkv.numel() == 0:
        for weight in (dq_weight, dk_weight):
            if weight is not None:
                plan.run(Tensor.zero_, weight)
        return
    arriving = {
        name: dy if dy is None else dense_heads(plan, dy)
        for name, dy in {"gq": dturned_q, "gk": dturned_k, "gv": dv}.items()
    }
    cos, sin, position_ids = tables(plan, cos, sin, position_ids)
    given = {**arriving, "cos": cos, "sin": sin, "position_ids": position_ids, "dqkv": dqkv}
    ids = 0 if position_ids is None else position_ids.dim()
    B, T, heads, D = qkv.shape
    H, K = counts(heads, kv_heads)
    if q_weight is None or k_weight is None:
        grid, numbers = plain_launch(
            (B, T, H, D), K, arriving, qkv.element_size(), cos.shape, cos.stride(0),
            position_ids=ids, interleaved=interleaved, tiling=tiling,
        )  # fmt: skip
        plan.launch(_rotate_back, grid, **given, **numbers)
        return
    q, k = _turned_parts(plan, qkv, kv_heads)
    sums = dq_weight is not None or dk_weight is not None
    grid, numbers = normed_launch(
        q, k, arriving, cos.shape, cos.stride(0), position_ids=ids, interleaved=interleaved, sums=sums,
        sms=multiprocessors(qkv.get_device()), tiling=tiling,
    )  # fmt: skip
    q_partial, k_partial = partials(plan, grid[0], dq_weight, dk_weight)
    plan.launch(
        _normed_back, grid, **given, q=q, k=k, q_weight=plan.contiguous(q_weight),
        k_weight=plan.contiguous(k_weight), q_partial=q_partial, k_partial=k_partial, eps=eps, offset=offset,
        **numbers,
    )  # fmt: skip
    add_up(plan, grid[0], q_partial, k_partial, dq_weight, dk_weight)


def _turned_parts(plan: Plan, qkv: Tensor, kv_heads: int | None) -> tuple[Tensor, Tensor]:
    """q and k where they stand in qkv, or in a copy with a dense last dimension."""
    qkv, (H, K) = dense_heads(plan, qkv), counts(qkv.shape[2], kv_heads)
    return plan.narrow(qkv, 2, 0, H), plan.narrow(qkv, 2, H, K)


qkv_rotary = kernel_op(
    "qkv_rotary",
    results=results,
    forward=forward,
    backward=backward,
    names=("turned_q", "turned_k"),
    views={"v": values},
    depends={"turned_q": ("qkv", "q_weight"), "turned_k": ("qkv", "k_weight"), "v": ("qkv",)},
    materialize=False,
    tilings={
        "forward": Tilings(Tiling, forward_tilings),
        "backward": Tilings(BackwardTiling, backward_tilings),
    },
)
"""The candidate: (q', k', v) for float16, bfloat16 and float32."""
