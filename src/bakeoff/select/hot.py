"""The two pieces of the hot path: the fingerprint of a call and the memo it is looked up in."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["Memo", "fingerprint", "memo", "process_memo"]

Memo = dict[tuple[Any, ...], Callable[..., Any]]

memo: ContextVar[Memo | None] = ContextVar("bakeoff_memo", default=None)
"""Decisions made under the settings this context entered; None where it entered none of its own."""

process_memo: Memo = {}
"""Decisions for such contexts: they follow the settings the process entered last. Autograd's threads are
such contexts, so recomputation in backward selects as forward did."""


def fingerprint(args: Sequence[Any]) -> tuple[Any, ...]:
    """Everything selection may depend on, exactly, as a hashable tuple; reads metadata only.

    Two calls with one fingerprint get one decision. The class is part of it, so that a tensor subclass
    never inherits a plain tensor's decision.
    """
    return tuple(
        [
            (
                a.__class__,
                a.shape,
                a.dtype,
                a.get_device(),
                a.requires_grad,
                a.is_contiguous() or a.stride(),
            )
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        ]
    )
