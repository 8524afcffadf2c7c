"""Backwards that can't be differentiated: an error where PyTorch would leave a term of the gradient out."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.compiler import is_compiling

__all__ = ["once_differentiable"]

Backward = Callable[..., Any]


def once_differentiable(what: str, instead: str) -> Callable[[Backward], Backward]:
    """Decorates an autograd Function's `backward`: differentiating what it returns raises RuntimeError.

    torch.autograd.function.once_differentiable raises in ``loss.backward()`` alone. What it returns is not
    connected to the Function's inputs, so that ``torch.autograd.grad(loss + penalty, inputs)`` silently takes
    a penalty on a gradient for a constant. Here it is connected.

    Args:
        what: has no second derivative, for the message.
        instead: what a caller does who needs one.
    """
    message = f"{what} can't be differentiated twice; {instead}"

    def decorate(backward: Backward) -> Backward:
        plain = torch.autograd.function.once_differentiable(backward)

        @wraps(backward)
        def checked(ctx: Any, *arriving: Any) -> Any:
            if is_compiling():  # compiled gradients raise by themselves
                return backward(ctx, *arriving)
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return plain(ctx, *arriving)
            saved = ctx.saved_tensors
            return _Once.apply(plain, ctx, message, len(arriving), *arriving, *saved)  # type: ignore[no-untyped-call]

        return checked

    return decorate


class _Once(torch.autograd.Function):
    """A backward as a node between inputs and their gradients."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, node: Any, message: str, count: int, *tensors: Any) -> Any:
        ctx.message = message
        return backward(node, *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.message)
