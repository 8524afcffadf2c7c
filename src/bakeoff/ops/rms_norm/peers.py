"""Third-party rms_norm kernels behind this op's signature. Each library is imported on the first call."""

from typing import Any

import torch

from bakeoff.alignment import aligned, aligned_gradient
from bakeoff.select import Case

__all__ = ["fla", "fla_supports", "liger", "liger_supports", "quack", "quack_supports"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def liger(x: Any, weight: Any, eps: float, residual: Any, offset: float) -> Any:
    """Liger-Kernel, everything in float32 ("gemma" casting) and not writing its gradient over dy."""
    if residual is None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, "gemma", False)


def liger_supports(case: Case) -> str | None:
    """Why Liger-Kernel can't take `case`, or None."""
    if case.residual is not None and case.weight is None:
        return "liger's fused residual form needs a weight"
    if case.residual is not None and case.residual.dtype != case.x.dtype:
        return f"liger keeps the sum in x's dtype, which loses the {case.residual.dtype} residual"
    if case.x.shape[-1] > 65536:
        return f"liger takes rows of up to 65536 elements, not {case.x.shape[-1]}"
    return _common(case)


def quack(x: Any, weight: Any, eps: float, residual: Any, offset: float) -> Any:
    """quack-kernels (CuTe DSL)."""
    from quack.rmsnorm import rmsnorm

    x, weight, residual = map(aligned, (x, weight, residual))
    given = rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=float(offset)
    )
    return aligned_gradient(given) if residual is None else tuple(map(aligned_gradient, given))


def quack_supports(case: Case) -> str | None:
    """Why quack can't take `case`, or None."""
    if case.residual is not None and case.residual.dtype != torch.promote_types(
        case.x.dtype, case.residual.dtype
    ):
        return f"quack keeps the sum in the residual's dtype, {case.residual.dtype}, which loses x's"
    return _common(case)


def fla(x: Any, weight: Any, eps: float, residual: Any, _offset: float) -> Any:
    """flash-linear-attention."""
    from fla.modules.layernorm import rms_norm

    return rms_norm(x, weight, None, residual=residual, eps=eps, prenorm=residual is not None)


def fla_supports(case: Case) -> str | None:
    """Why flash-linear-attention can't take `case`, or None."""
    if case.offset:
        return f"fla has no weight offset (asked for {case.offset})"
    if case.x.shape[-1] * case.x.dtype.itemsize > 65536:
        return f"fla takes rows of up to 64 KiB, not {case.x.shape[-1]} elements of {case.x.dtype}"
    if case.residual is not None and case.residual.dtype != torch.promote_types(
        case.x.dtype, case.residual.dtype
    ):
        return f"fla keeps the sum in the residual's dtype, {case.residual.dtype}, which loses x's"
    return _common(case)


def _common(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    for name, meta in case.tensors.items():
        if meta.dtype not in _KERNEL_DTYPES:
            return f"takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return "does not take empty tensors" if case.x.numel == 0 else None
