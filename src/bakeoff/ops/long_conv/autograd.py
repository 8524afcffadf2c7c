"""Convolutions by our own kernels, of any method, under autograd and as ops for torch.compile."""

from typing import Any

import torch

from bakeoff.ops.long_conv.rows import room_like
from bakeoff.ops.long_conv.run import Arguments, Method

__all__ = ["METHODS", "convolved"]

METHODS: dict[str, Method] = {}
"""By "op.candidate", as graphs of torch.compile name them; the modules of the candidates put them here."""


class _LongConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, method: str) -> Any:
        keep = gate_out is not None and ctx.needs_input_grad[4]
        out, y = METHODS[method].forward(Arguments(u, h, skip, gate_in, gate_out), keep)
        ctx.method = method
        ctx.save_for_backward(u, h, skip, gate_in, gate_out, y)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _Recorded.apply(ctx, dout, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return _gradients(ctx, dout)


class _Recorded(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, node: Any, dout: Any, *_saved: Any) -> Any:
        ctx.op = node.method.split(".")[0]
        return _gradients(node, dout)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"this candidate of {ctx.op} can't be differentiated twice; "
            f"pass impl='eager' or use bakeoff.using({ctx.op}='eager')"
        )


def _gradients(ctx: Any, dout: Any) -> tuple[torch.Tensor | None, ...]:
    *given, y = ctx.saved_tensors
    return (*METHODS[ctx.method].backward(dout, Arguments(*given), y, ctx.needs_input_grad), None)


@torch.library.custom_op("bakeoff::long_conv_forward", mutates_args=())
def _forward_op(
    u: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None,
    gate_in: torch.Tensor | None,
    gate_out: torch.Tensor | None,
    keep: bool,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, y = METHODS[method].forward(Arguments(u, h, skip, gate_in, gate_out), keep)
    return out, u.new_empty(0) if y is None else y


@_forward_op.register_fake
def _(u: Any, _h: Any, _skip: Any, _gate_in: Any, _gate_out: Any, keep: bool, _method: str) -> Any:
    return room_like(u), room_like(u) if keep else u.new_empty(0)


@torch.library.custom_op("bakeoff::long_conv_backward", mutates_args=())
def _backward_op(
    dout: torch.Tensor,
    u: torch.Tensor,
    h: torch.Tensor,
    skip: torch.Tensor | None,
    gate_in: torch.Tensor | None,
    gate_out: torch.Tensor | None,
    y: torch.Tensor,
    wanted: list[bool],
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = y if wanted[4] else None  # empty where the forward kept nothing
    found = METHODS[method].backward(dout, Arguments(u, h, skip, gate_in, gate_out), kept, wanted)
    du, dh, dskip, din, dgate = (u.new_empty(0) if g is None else g for g in found)
    return du, dh, dskip, din, dgate


@_backward_op.register_fake
def _(
    _dout: Any, u: Any, h: Any, skip: Any, _gate_in: Any, _gate_out: Any, _y: Any,
    wanted: list[bool], _method: str,
) -> Any:  # fmt: skip
    none, tunes = u.new_empty(0), wanted[1] or wanted[2]
    return (
        room_like(u) if wanted[0] else none,
        h.new_empty(h.shape) if tunes else none.clone(),
        skip.new_empty(skip.shape) if tunes and skip is not None else none.clone(),
        room_like(u) if wanted[3] else none.clone(),
        room_like(u) if wanted[4] else none.clone(),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.method = inputs[6]
    ctx.mark_non_differentiable(output[1])


def _gradients_op(ctx: Any, dout: Any, _: Any) -> Any:
    wanted = ctx.needs_input_grad[:5]
    found = _backward_op(dout, *ctx.saved_tensors, list(wanted), ctx.method)
    return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None, None)


_forward_op.register_autograd(_gradients_op, setup_context=_save)


def convolved(method: str, given: Arguments) -> torch.Tensor:
    """`given` convolved by one of `METHODS`."""
    gate = given.gate_out
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in given if x is not None)
    if torch.compiler.is_compiling():
        keep = grad and gate is not None and gate.requires_grad
        out: torch.Tensor = _forward_op(*given, keep, method)[0]
        return out
    if grad:
        return _LongConv.apply(*given, method)  # type: ignore[no-any-return, no-untyped-call]
    return METHODS[method].forward(given, False)[0]
