"""The ``decode`` candidate of attention: what its kernels are launched on."""

import torch
from torch import Tensor

from bakeoff.kernels.layout import laid_out
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.attention import kernels
from bakeoff.ops.attention.kernels import Tiling

__all__ = ["decode"]

_parts = TritonKernel(kernels._parts)
_join = TritonKernel(kernels._join)
_UNBOUNDED = 1 << 30


def results(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    cu_seqlens: Tensor | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Room for y, [B, T, H, D]."""
    del k, v, causal, window, scale, cu_seqlens, lengths
    return q.new_empty(q.shape)


class _Shapes:
    """What tilings look at, of tensors as of a case."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, self.device = q, k, str(q.device)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    lengths: Tensor | None, y: Tensor, tiling: Tiling | None,
) -> None:  # fmt: skip
    """y in one launch, or in two where keys are cut into parts. The grid follows from S, not from what
    `lengths` holds, so that it may stand in a CUDA graph."""
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    if y.numel() == 0:
        return
    if S == 0:
        plan.run(Tensor.zero_, y)
        return
    tiling = tiling or kernels.tilings(_Shapes(q, k))[0]
    lengths = None if lengths is None else plan.contiguous(lengths)
    laid, strides = laid_out(plan, "bth", q=q, k=k, v=v)
    rows, parts = kernels.grid(B, T, H, K, S, tiling)
    exact = q.dtype == torch.float32
    shape = {
        "T": T, "S": S, "H": H, "KEYS": tiling.keys * tiling.tiles, "PARTS": parts,
        "window": _UNBOUNDED if window is None else min(window, _UNBOUNDED), "CAUSAL": causal, "D": D,
        "WIDTH": kernels.width_of(D),
    }  # fmt: skip
    sums = levels = None
    if parts > 1:
        sums = plan.empty((B * H * T, parts, D), torch.float32)
        levels = plan.empty((B * H * T, parts, 2), torch.float32)
    plan.launch(
        _parts, (rows, parts), **laid, lengths=lengths, y=y, sums=sums, levels=levels, **shape, **strides,
        scale=D**-0.5 if scale is None else scale, G=H // K, SPLIT=parts > 1,
        ROWS=kernels.rows_of(T, H // K), BLOCK=tiling.keys, STAGES=tiling.stages,
        PRECISION="ieee" if exact else "tf32", num_warps=tiling.warps,
    )  # fmt: skip
    if parts > 1:
        plan.launch(
            _join, (B * H * T,), lengths=lengths, sums=sums, levels=levels, y=y, **shape,
            JOINED=kernels._JOINED, num_warps=4 if shape["WIDTH"] > 64 else 2,
        )  # fmt: skip


decode = kernel_op(
    "attention", results=results, forward=forward, tilings={"forward": Tilings(Tiling, kernels.tilings)}
)
"""For up to 16 queries a row, in float16, bfloat16 and float32, without gradients."""
