"""The kernel in a DSL that PyTorch 2.13 and newer may route its fused rms_norm to, as a candidate of its own.

``eager`` is whatever PyTorch routes to now, which is part of a table's stamp; this is the kernel in any case.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.derivatives import once_differentiable
from bakeoff.select import Case
from bakeoff.select.declare.installed import missing

__all__ = ["REQUIRES", "native", "native_supports"]

REQUIRES = ("cutlass",)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_GENERATIONS = (9, 10)  # of GPUs, as PyTorch's own condition has it


def native(x: Any, weight: Any, eps: float, residual: Any, _offset: float) -> Any:
    """PyTorch's vendored kernel, on the sum where there is a residual."""
    s = x if residual is None else x + residual
    y = _Native.apply(s, weight, eps)  # type: ignore[no-untyped-call]
    return y if residual is None else (y, s)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        from torch._native.ops.norm import rmsnorm_impl  # here, as it is private and may be gone

        y, scaling = rmsnorm_impl._fused_rms_norm_impl(s, [s.shape[-1]], weight, eps)
        ctx.save_for_backward(s, weight, scaling)
        return y

    @staticmethod
    @once_differentiable("rms_norm's 'native'", "pass impl='eager'")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from torch._native.ops.norm import rmsnorm_impl

        s, weight, scaling = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2]]
        ds, dweight = rmsnorm_impl._fused_rms_norm_backward_impl(
            dy, s, [s.shape[-1]], scaling, weight, wanted
        )
        return ds, dweight if wanted[1] else None, None


def native_supports(case: Case) -> str | None:
    """Why PyTorch's condition for its kernel doesn't hold for `case`, or None."""
    if absent := missing("torch._native.ops.norm"):
        return f"needs PyTorch 2.13 or newer ({absent})"
    if not case.device.startswith("cuda") or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, not on {case.device}"
    if hardware.generation(hardware.index(case.device)) not in _GENERATIONS:
        return "runs on GPUs of compute capability 9.x and 10.x"
    kinds = {meta.dtype for meta in case.tensors.values()}
    if len(kinds) > 1 or not kinds <= {*_DTYPES}:
        return "takes tensors of one dtype: float16, bfloat16 or float32"
    if case.offset:
        return f"has no weight offset (asked for {case.offset})"
    bits = 8 * case.x.dtype.itemsize
    if math.gcd(case.x.shape[-1], 128 // bits) * bits < 32:
        return f"needs rows of whole 4 bytes, not of {case.x.shape[-1]} elements of {bits} bits"
    return "does not take empty tensors" if case.x.numel == 0 else None
