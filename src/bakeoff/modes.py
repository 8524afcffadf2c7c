"""Dispatch modes: which of them look at calls, and a kind that torch.compile stays out of."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # a version of PyTorch that has no such functions
    set_code_exec_strategy = None  # type: ignore[assignment]

__all__ = ["UntracedMode", "watched"]


def watched() -> bool:
    """Whether a dispatch mode looks at calls, so that none may go through compiled code or kernels unseen.

    Modes that ignore what happens inside compiled code don't count: that of selective activation
    checkpointing, and verification's, which looks at memory alone and judges what runs without it.
    """
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        mode.is_infra_mode() or not mode.ignore_compile_internals()
        for mode in _get_current_dispatch_mode_stack()
    )


class UntracedMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__`, and what it calls, is never traced, which PyTorch sees to for all.

    PyTorch wraps the method in what imports all of the compiler at the first operation: a second of every
    process that uses a mode, such as one that holds contests. Here its code is marked instead, where that can
    be done.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch wraps the method."""
        return set_code_exec_strategy is None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)  # type: ignore[no-untyped-call]
        method = cls.__dict__.get("__torch_dispatch__")
        if method is not None and set_code_exec_strategy is not None:
            skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
            set_code_exec_strategy(method.__code__, skipped)
