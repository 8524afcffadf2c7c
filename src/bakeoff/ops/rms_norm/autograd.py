"""The ``triton`` candidate of rms_norm: its kernels under autograd, and as ops for torch.compile."""

from typing import Any

import torch

from bakeoff.ops.rms_norm.run import run_backward, run_forward

__all__ = ["rms_norm"]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float, residual: Any, offset: float) -> Any:
        y, s = run_forward(x, weight, eps, residual, offset)
        ctx.eps = eps
        ctx.offset = offset
        if s is None:
            ctx.save_for_backward(x, weight)
            return y
        ctx.save_for_backward(s, weight)
        ctx.dtypes = x.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad
        if not (wanted[0] or wanted[3]):
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Any, ds: Any = None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _Recorded.apply(ctx, dy, ds, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return _gradients(ctx, dy, ds)


# Past Function.apply's Python half, which serves functorch transforms and setup_context: microseconds a call.
_apply = super(torch.autograd.Function, _RMSNorm).apply


class _Recorded(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(_: Any, node: Any, dy: Any, ds: Any, *_saved: Any) -> Any:
        return _gradients(node, dy, ds)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(
            "rms_norm's triton candidate can't be differentiated twice; "
            "pass impl='eager' or use bakeoff.using(rms_norm='eager')"
        )


def _gradients(ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    s, weight = ctx.saved_tensors
    if dy is not None and not hasattr(ctx, "dtypes"):
        dx, _, dw = run_backward(
            dy, None, s, weight, ctx.eps, ctx.offset, s.dtype, s.dtype, wanted[0], wanted[1]
        )
        return dx, dw, None, None, None
    want_input = wanted[0] or wanted[3]
    x_dtype, residual_dtype = ctx.dtypes
    if dy is None:  # only s was used: its gradient passes through the sum
        if ds is None or not want_input:
            return None, None, None, None, None
        return ds.to(x_dtype), None, None, ds.to(residual_dtype), None
    dx, dresidual, dw = run_backward(
        dy, ds, s, weight, ctx.eps, ctx.offset, x_dtype, residual_dtype, want_input, wanted[1]
    )
    # One tensor for both inputs, as torch's own add does: autograd copies it where it would be written to.
    return dx, dw, None, dx if dresidual is None else dresidual, None


@torch.library.custom_op("bakeoff::rms_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, s = run_forward(x, weight, eps, residual, offset)
    return y, x.new_empty(0) if s is None else s


@_forward_op.register_fake
def _(x: Any, _weight: Any, _eps: float, residual: Any, _offset: float) -> Any:
    s = x.new_empty(0)
    if residual is not None:
        s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape), s


@torch.library.custom_op("bakeoff::rms_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    want_input: bool,
    want_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = run_backward(dy, ds, s, weight, eps, offset, x_dtype, residual_dtype, want_input, want_weight)
    dx, dresidual, dw = (s.new_empty(0) if gradient is None else gradient for gradient in found)
    return dx, dresidual, dw


@_backward_op.register_fake
def _(
    _dy: Any, _ds: Any, s: Any, weight: Any, _eps: float, _offset: float, x_dtype: torch.dtype,
    residual_dtype: torch.dtype, want_input: bool, want_weight: bool,
) -> Any:  # fmt: skip
    apart = want_input and residual_dtype != x_dtype
    return (
        s.new_empty(s.shape, dtype=x_dtype) if want_input else s.new_empty(0),
        s.new_empty(s.shape, dtype=residual_dtype) if apart else s.new_empty(0),
        weight.new_empty(weight.shape) if want_weight else s.new_empty(0),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps, residual, ctx.offset = inputs
    s = output[1]
    ctx.save_for_backward(x if residual is None else s, weight)
    wanted = ctx.needs_input_grad
    if residual is None or not (wanted[0] or wanted[3]):
        ctx.mark_non_differentiable(s)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, x.dtype if residual is None else residual.dtype)


def _gradients_op(ctx: Any, dy: Any, ds: Any) -> Any:
    wanted = ctx.needs_input_grad
    want_input = wanted[0] or wanted[3]
    x_dtype, residual_dtype = ctx.dtypes
    s, weight = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(s, dtype=x_dtype)
    dx, dresidual, dw = _backward_op(
        dy, ds, s, weight, ctx.eps, ctx.offset, x_dtype, residual_dtype, want_input, wanted[1]
    )
    if not want_input:
        dx = dresidual = None
    elif residual_dtype == x_dtype:
        dresidual = dx
    return dx, dw if wanted[1] else None, None, dresidual if wanted[3] else None, None


_forward_op.register_autograd(_gradients_op, setup_context=_save)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
) -> Any:
    """The ``triton`` candidate: y, or (y, s) with a residual, for float16, bfloat16 and float32."""
    if torch.compiler.is_compiling():
        y, s = _forward_op(x, weight, eps, residual, offset)
        return y if residual is None else (y, s)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        if torch._C._are_functorch_transforms_active():
            return _RMSNorm.apply(x, weight, eps, residual, offset)  # type: ignore[no-untyped-call]
        return _apply(x, weight, eps, residual, offset)  # type: ignore[no-untyped-call]
    y, s = run_forward(x, weight, eps, residual, offset)
    return y if s is None else (y, s)
