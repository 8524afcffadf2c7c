"""The Triton candidate of `rotary`: the kernel with its gradient, in eager mode and inside torch.compile."""

from typing import Any

import torch

from bakeoff.ops.rotary.kernels import dense, is_head_major, rotate

__all__ = ["Rotary", "rotary"]

Grads = tuple[torch.Tensor | None, ...]


class Rotary(torch.autograd.Function):
    """`rotate` with its gradient; differentiable any number of times, being linear in q and k."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        position_ids: torch.Tensor | None,
        conjugate: bool,
        head_major: tuple[bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.how = (interleaved, conjugate, head_major)
        return rotate(q, k, cos, sin, interleaved, position_ids, conjugate, head_major)

    @staticmethod
    def backward(ctx: Any, dq: Any, dk: Any) -> Grads:
        cos, sin, position_ids = ctx.saved_tensors
        interleaved, conjugate, head_major = ctx.how
        wants_q, wants_k = ctx.needs_input_grad[:2]
        has_q, has_k = wants_q and dq is not None, wants_k and dk is not None
        if not (has_q or has_k):
            return (None,) * 8
        # The one that isn't wanted takes part with no heads.
        left = dq if has_q else dk[:, :, :0]
        right = dk if has_k else dq[:, :, :0]
        turn = Rotary.apply if torch.is_grad_enabled() else rotate
        gq, gk = turn(left, right, cos, sin, interleaved, position_ids, not conjugate, head_major)
        return (gq if has_q else None, gk if has_k else None, None, None, None, None, None, None)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidate: arguments as in `bakeoff.ops.rotary`."""
    if torch.compiler.is_compiling():
        turned: tuple[torch.Tensor, torch.Tensor] = _registered(
            q, k, cos, sin, interleaved, position_ids, False
        )
        return turned
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return Rotary.apply(  # type: ignore[no-any-return, no-untyped-call]
            q, k, cos, sin, interleaved, position_ids, False, (is_head_major(q), is_head_major(k))
        )
    return rotate(q, k, cos, sin, interleaved, position_ids, False)


@torch.library.custom_op("bakeoff::rotary", mutates_args=())
def _registered(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    position_ids: torch.Tensor | None,
    conjugate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate` as torch.compile sees it."""
    return rotate(q, k, cos, sin, interleaved, position_ids, conjugate)


@_registered.register_fake
def _registered_shapes(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return dense(q), dense(k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, interleaved, position_ids, conjugate = inputs
    ctx.save_for_backward(cos, sin, position_ids)
    ctx.how = (interleaved, conjugate)


def _gradient(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Grads:
    cos, sin, position_ids = ctx.saved_tensors
    interleaved, conjugate = ctx.how
    gq, gk = _registered(dq, dk, cos, sin, interleaved, position_ids, not conjugate)
    return gq, gk, None, None, None, None, None


_registered.register_autograd(_gradient, setup_context=_save)
