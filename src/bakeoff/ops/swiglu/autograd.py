"""The ``triton`` candidate of swiglu: its kernels under autograd, and as ops for torch.compile."""

from typing import Any

import torch

from bakeoff.ops.swiglu.run import run_backward, run_forward

__all__ = ["swiglu"]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        ctx.save_for_backward(gate, up)
        return run_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _Recorded.apply(dy, gate, up, ctx.needs_input_grad)  # type: ignore[no-untyped-call]
        return run_backward(dy, gate, up, *ctx.needs_input_grad)


# Past Function.apply's Python half, which serves functorch transforms and setup_context: microseconds a call.
_apply = super(torch.autograd.Function, _SwiGLU).apply


class _Recorded(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(_: Any, dy: Any, gate: Any, up: Any, wanted: tuple[bool, bool]) -> Any:
        return run_backward(dy, gate, up, *wanted)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(
            "swiglu's triton candidate can't be differentiated twice; "
            "pass impl='eager' or use bakeoff.using(swiglu='eager')"
        )


@torch.library.custom_op("bakeoff::swiglu_forward", mutates_args=())
def _forward_op(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return run_forward(gate, up)


@_forward_op.register_fake
def _(gate: Any, up: Any) -> Any:
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2) if up is None else gate.shape)


@torch.library.custom_op("bakeoff::swiglu_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, want_gate: bool, want_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = run_backward(dy, gate, up, want_gate, want_up)
    return gate.new_empty(0) if dgate is None else dgate, gate.new_empty(0) if dup is None else dup


@_backward_op.register_fake
def _(_dy: Any, gate: Any, up: Any, want_gate: bool, want_up: bool) -> Any:
    return (
        gate.new_empty(gate.shape if want_gate or up is None else 0),
        gate.new_empty(up.shape if want_up and up is not None else 0),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _gradients_op(ctx: Any, dy: Any) -> Any:
    want_gate, want_up = ctx.needs_input_grad
    dgate, dup = _backward_op(dy, *ctx.saved_tensors, want_gate, want_up)
    return dgate if want_gate else None, dup if want_up else None


_forward_op.register_autograd(_gradients_op, setup_context=_save)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """The ``triton`` candidate, for float16, bfloat16 and float32."""
    y: torch.Tensor
    if torch.compiler.is_compiling():
        y = _forward_op(gate, up)
    elif torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        apply = _SwiGLU.apply if torch._C._are_functorch_transforms_active() else _apply
        y = apply(gate, up)  # type: ignore[no-untyped-call]
    else:
        y = run_forward(gate, up)
    return y
