"""The ``triton`` candidate of byte_spectral: its kernels under autograd, and as ops for torch.compile."""

from typing import Any

import torch

from bakeoff.ops.byte_spectral.run import out_like, run_backward, run_forward

__all__ = ["byte_spectral"]


class _ByteSpectral(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any
    ) -> Any:
        ctx.save_for_backward(ids, table, window, omega, weight, bias)
        ctx.features = features
        return run_forward(ids, table, window, omega, features, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            found = _Recorded.apply(ctx, dout, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        else:
            found = _gradients(ctx, dout)
        dtable, dwindow, domega, dweight, dbias = found
        return None, dtable, dwindow, domega, None, dweight, dbias


class _Recorded(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(_: Any, node: Any, dout: Any, *_saved: Any) -> Any:
        return _gradients(node, dout)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(
            "byte_spectral's triton candidate can't be differentiated twice; "
            "pass impl='eager' or use bakeoff.using(byte_spectral='eager')"
        )


def _gradients(ctx: Any, dout: torch.Tensor) -> Any:
    ids, table, window, omega, weight, bias = ctx.saved_tensors
    want = ctx.needs_input_grad
    wanted = (want[1], want[2], want[3], want[5], want[6])
    return run_backward(dout, ids, table, window, omega, ctx.features, weight, bias, wanted)


@torch.library.custom_op("bakeoff::byte_spectral_forward", mutates_args=())
def _forward_op(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return run_forward(ids, table, window, omega, features, weight, bias)


@_forward_op.register_fake
def _(ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, _bias: Any) -> Any:
    return out_like(ids, table, window, omega, features, weight)


@torch.library.custom_op("bakeoff::byte_spectral_backward", mutates_args=())
def _backward_op(
    dout: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wants = (wanted[0], wanted[1], wanted[2], wanted[3], wanted[4])
    found = run_backward(dout, ids, table, window, omega, features, weight, bias, wants)
    a, b, c, d, e = (dout.new_empty(0) if gradient is None else gradient for gradient in found)
    return a, b, c, d, e


@_backward_op.register_fake
def _(
    dout: Any, _ids: Any, table: Any, window: Any, omega: Any, _features: str, weight: Any, bias: Any,
    wanted: list[bool],
) -> Any:  # fmt: skip
    arguments = (table, window, omega, weight, bias)
    return tuple(
        argument.new_empty(argument.shape) if want and argument is not None else dout.new_empty(0)
        for argument, want in zip(arguments, wanted, strict=True)
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ids, table, window, omega, ctx.features, weight, bias = inputs
    ctx.save_for_backward(ids, table, window, omega, weight, bias)


def _gradients_op(ctx: Any, dout: Any) -> Any:
    ids, table, window, omega, weight, bias = ctx.saved_tensors
    want = ctx.needs_input_grad
    wanted = [want[1], want[2], want[3], want[5], want[6]]
    found = _backward_op(dout, ids, table, window, omega, ctx.features, weight, bias, wanted)
    a, b, c, d, e = (gradient if yes else None for gradient, yes in zip(found, wanted, strict=True))
    return None, a, b, c, None, d, e


_forward_op.register_autograd(_gradients_op, setup_context=_save)


def byte_spectral(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor,
    omega: torch.Tensor | None,
    features: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
) -> Any:
    """The ``triton`` candidate: the windowed form, for float16, bfloat16 and float32."""
    if torch.compiler.is_compiling():
        return _forward_op(ids, table, window, omega, features, weight, bias)
    if torch.is_grad_enabled() and any(
        argument is not None and argument.requires_grad for argument in (table, window, omega, weight, bias)
    ):
        return _ByteSpectral.apply(ids, table, window, omega, features, weight, bias)  # type: ignore[no-untyped-call]
    return run_forward(ids, table, window, omega, features, weight, bias)
