"""The ``triton`` candidate of pole_scan: its kernels under autograd, and as ops for torch.compile."""

from typing import Any

import torch

from bakeoff.ops.pole_scan.kernels import CHUNK, padded
from bakeoff.ops.pole_scan.kernels.poles import TABLE_ROWS
from bakeoff.ops.pole_scan.run import run_backward, run_forward, run_step

__all__ = ["pole_scan"]

_TWICE = (
    "pole_scan's triton candidate can't be differentiated twice; "
    "pass impl='eager' or use bakeoff.using(pole_scan='eager')"
)


class _PoleScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Any, log_radius: Any, theta: Any, coef: Any, state: Any) -> Any:
        done = run_forward(u, log_radius, theta, coef, state)
        ctx.save_for_backward(u, coef, state, done.table, done.powers, done.edges)
        ctx.set_materialize_grads(False)
        return done.y, done.end

    @staticmethod
    def backward(ctx: Any, dy: Any, dend: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _Recorded.apply(ctx, dy, dend, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return _gradients(ctx, dy, dend)


class _Recorded(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(_: Any, node: Any, dy: Any, dend: Any, *_saved: Any) -> Any:
        return _gradients(node, dy, dend)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(_TWICE)


def _gradients(ctx: Any, dy: Any, dend: Any) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    u, coef, state, table, powers, edges = ctx.saved_tensors
    found = run_backward(
        dy, dend, u, coef, state, table, powers, edges, wanted[0] or wanted[4], any(wanted[1:4])
    )
    return tuple(gradient if want else None for gradient, want in zip(found, wanted, strict=True))


@torch.library.custom_op("bakeoff::pole_scan_forward", mutates_args=())
def _forward_op(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, end, table, powers, edges = run_forward(u, log_radius, theta, coef, state)
    return y, end, table, powers, edges


@_forward_op.register_fake
def _(u: Any, _log_radius: Any, _theta: Any, coef: Any, _state: Any) -> Any:
    B, T, C = u.shape
    poles = padded(coef.shape[1])
    return (
        u.new_empty((B, T, C)),
        u.new_empty((B, *coef.shape), dtype=torch.complex64),
        u.new_empty((TABLE_ROWS, poles, C), dtype=torch.float32),
        u.new_empty((4, poles, C), dtype=torch.float64),
        u.new_empty((B, (T + CHUNK - 1) // CHUNK, 2, poles, C), dtype=torch.float32),
    )


@torch.library.custom_op("bakeoff::pole_scan_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor | None,
    dend: torch.Tensor | None,
    u: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
    table: torch.Tensor,
    powers: torch.Tensor,
    edges: torch.Tensor,
    want_input: bool,
    want_poles: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = run_backward(dy, dend, u, coef, state, table, powers, edges, want_input, want_poles)
    du, dlog_radius, dtheta, dcoef, dstate = (table.new_empty(0) if g is None else g for g in found)
    return du, dlog_radius, dtheta, dcoef, dstate


@_backward_op.register_fake
def _(
    _dy: Any, _dend: Any, u: Any, coef: Any, state: Any, table: Any, _powers: Any, _edges: Any,
    want_input: bool, want_poles: bool,
) -> Any:  # fmt: skip
    none = table.new_empty(0)
    poles = table.new_empty(coef.shape) if want_poles else none
    return (
        u.new_empty(u.shape) if want_input else none,
        poles,
        torch.empty_like(poles),
        table.new_empty(coef.shape, dtype=torch.complex64) if want_poles else none.clone(),
        table.new_empty(state.shape, dtype=torch.complex64)
        if want_input and state is not None
        else none.clone(),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    u, _, _, coef, state = inputs
    ctx.save_for_backward(u, coef, state, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients_op(ctx: Any, dy: Any, dend: Any, *_: Any) -> Any:
    wanted = ctx.needs_input_grad
    found = _backward_op(dy, dend, *ctx.saved_tensors, wanted[0] or wanted[4], any(wanted[1:4]))
    return tuple(gradient if want else None for gradient, want in zip(found, wanted, strict=True))


_forward_op.register_autograd(_gradients_op, setup_context=_save)


def pole_scan(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``triton`` candidate: y and the last state."""
    if torch.compiler.is_compiling():
        y, end, *_ = _forward_op(u, log_radius, theta, coef, state)
        return y, end
    if torch.is_grad_enabled() and (
        u.requires_grad
        or log_radius.requires_grad
        or theta.requires_grad
        or coef.requires_grad
        or (state is not None and state.requires_grad)
    ):
        return _PoleScan.apply(u, log_radius, theta, coef, state)  # type: ignore[no-any-return, no-untyped-call]
    if u.shape[1] == 1:
        return run_step(u, log_radius, theta, coef, state)
    done = run_forward(u, log_radius, theta, coef, state)
    return done.y, done.end
