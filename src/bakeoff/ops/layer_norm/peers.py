"""Third-party layer_norm kernels behind this op's signature. Each library is imported on the first call.

Written against liger-kernel 0.8.5, quack-kernels 0.6.5 and fla-core 0.6.0. What the adaptation costs counts
as theirs.
"""

from typing import Any

import torch

from bakeoff.alignment import aligned
from bakeoff.derivatives import once_differentiable
from bakeoff.select import Case

__all__ = ["fla", "fla_supports", "liger", "liger_supports", "quack", "quack_supports"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def liger(x: Any, weight: Any, bias: Any, eps: float, residual: Any) -> Any:
    """Liger-Kernel, which always reads a bias, here of zeros where there is none; on x + residual."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    s = x if residual is None else x + residual
    shift = torch.zeros_like(weight) if bias is None else bias
    y = LigerLayerNormFunction.apply(s, weight, shift, eps)
    return y if residual is None else (y, s)


def liger_supports(case: Case) -> str | None:
    """Why Liger-Kernel can't take `case`, or None."""
    if case.weight is None:
        return "liger needs a weight"
    if _sum_dtype(case) != case.x.dtype:
        return f"liger gives y in the dtype of the sum, {_sum_dtype(case)}, not in x's"
    if case.x.shape[-1] > 65536:
        return f"liger takes rows of up to 65536 elements, not {case.x.shape[-1]}"
    return _common(case)


def quack(x: Any, weight: Any, bias: Any, eps: float, residual: Any) -> Any:
    """quack-kernels (CuTe DSL), whose forward and backward for layer_norm are functions apart."""
    s = x if residual is None else x + residual
    y = _Quack.apply(aligned(s.reshape(-1, s.shape[-1])), aligned(weight), aligned(bias), eps)  # type: ignore[no-untyped-call]
    y = y.view(s.shape)
    return y if residual is None else (y, s)


class _Quack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Any, weight: Any, bias: Any, eps: float) -> Any:
        from quack.rmsnorm import layernorm_fwd

        y, scaling, mean = layernorm_fwd(s, weight, bias, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(s, weight, scaling, mean)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable("layer_norm's peers", "pass impl='eager'")
    def backward(ctx: Any, dy: Any) -> Any:
        from quack.rmsnorm import layernorm_bwd

        s, weight, scaling, mean = ctx.saved_tensors
        return *layernorm_bwd(s, weight, aligned(dy.contiguous()), scaling, mean, has_bias=ctx.has_bias), None


def quack_supports(case: Case) -> str | None:
    """Why quack can't take `case`, or None."""
    for name in ("weight", "bias"):
        meta = case.tensors.get(name)
        if meta is None and name == "weight":
            return "quack's layer_norm needs a weight"
        if meta is not None and meta.dtype != torch.float32:
            return f"quack's layer_norm takes a float32 {name}, not {meta.dtype}"
    if _sum_dtype(case) != case.x.dtype:
        return f"quack gives y in the dtype of the sum, {_sum_dtype(case)}, not in x's"
    return _common(case)


def fla(x: Any, weight: Any, bias: Any, eps: float, residual: Any) -> Any:
    """flash-linear-attention."""
    from fla.modules.layernorm import layer_norm

    return layer_norm(x, weight, bias, residual=residual, eps=eps, prenorm=residual is not None)


def fla_supports(case: Case) -> str | None:
    """Why flash-linear-attention can't take `case`, or None."""
    if case.x.shape[-1] * case.x.dtype.itemsize > 65536:
        return f"fla takes rows of up to 64 KiB, not {case.x.shape[-1]} elements of {case.x.dtype}"
    if case.residual is not None and case.residual.dtype != _sum_dtype(case):
        return f"fla keeps the sum in the residual's dtype, {case.residual.dtype}, which loses x's"
    return _common(case)


def _sum_dtype(case: Case) -> torch.dtype:
    """Of s."""
    return case.x.dtype if case.residual is None else torch.promote_types(case.x.dtype, case.residual.dtype)


def _common(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    for name, meta in case.tensors.items():
        if meta.dtype not in _KERNEL_DTYPES:
            return f"takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return "does not take empty tensors" if case.x.numel == 0 else None
