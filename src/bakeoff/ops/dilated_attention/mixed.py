"""dilated_attention by the kernels for Hopper, and backward by other attention kernels, a call a branch.

A branch's exact gradients need only y and the log-sum-exp over all branches, whoever made them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.derivatives import once_differentiable
from bakeoff.kernels.op import KernelOp
from bakeoff.ops.dilated_attention import branches, hopper
from bakeoff.ops.dilated_attention.reference import pattern_of
from bakeoff.ops.dilated_attention.triton import Fused

__all__ = ["hopper_cudnn", "hopper_flash_attn_4"]


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Any, backend: str, segments: str, rates: str, phase: str, causal: bool,
        scale: float, q: Tensor, k: Tensor, v: Tensor,
    ) -> Any:  # fmt: skip
        y, lse = attend(q, k, v, None, segments, rates, phase, causal, False, scale)
        ctx.fixed = (backend, pattern_of(segments, rates, phase, k.shape[2]), causal, scale)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.mark_non_differentiable(lse)
        return y, lse

    @staticmethod
    @once_differentiable("dilated_attention", "its definition can, bakeoff.ops.dilated_attention.reference")
    def backward(ctx: Any, dy: Tensor, dlse: Any) -> Any:
        del dlse
        (backend, pattern, causal, scale), (q, k, v, y, lse) = ctx.fixed, ctx.saved_tensors
        found = branches.gradients(backend, pattern, causal, scale, q, k, v, y, lse, [], dy)
        return *[None] * 7, *found


class _Candidate(Fused):
    """The candidate, with the op's arguments in their order."""

    def __init__(self, attend: KernelOp, backend: str) -> None:
        super().__init__(attend)
        self.backend = backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
        combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        """y, or (y, lse). Inside torch.compile the backward is Hopper's too."""
        if is_compiling():
            return super().__call__(
                q, k, v, segments, rates, causal, phase, combine_grad, cu_seqlens, scale, return_lse
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        fixed = (self.attend, self.backend, segments, rates, phase, causal, scale)
        y, lse = _Mixed.apply(*fixed, q, k, v)  # type: ignore[no-untyped-call]
        return (y, lse) if return_lse else y

    def variants(self, case: Any) -> Any:
        """The tilings that the forward may be launched with, the default first."""
        return {"forward": super().variants(case)["forward"]}

    def _with(self, attend: KernelOp) -> Fused:
        return _Candidate(attend, self.backend)


hopper_cudnn = _Candidate(hopper.attend, "cudnn")
hopper_flash_attn_4 = _Candidate(hopper.attend, "flash_attn_4")
