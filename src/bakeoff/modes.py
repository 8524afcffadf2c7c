"""Dispatch modes: which of them look at calls, caches that know of them, a kind without torch.compile."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # a version of PyTorch that has no such functions
    set_code_exec_strategy = None  # type: ignore[assignment]

__all__ = ["UntracedMode", "kept_tensors", "watched"]

Function = TypeVar("Function", bound=Callable[..., Any])


def watched() -> bool:
    """Whether a dispatch mode looks at calls, so that none may go through compiled code or kernels unseen.

    Modes that ignore what happens inside compiled code don't count: that of selective activation
    checkpointing, and verification's, which looks at memory alone and judges what runs without it.
    """
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        mode.is_infra_mode() or not mode.ignore_compile_internals()
        for mode in _get_current_dispatch_mode_stack()
    )


def kept_tensors(maxsize: int) -> Callable[[Function], Function]:
    """functools.lru_cache for functions that make tensors, which then serve every later call.

    What is made while a mode, a transform or a trace looks on may be of their kind, as fake tensors are, and
    is not kept. Tensors of inference mode, which autograd refuses, are never made.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def made(*args: Any) -> Any:
            with torch.inference_mode(False):
                return function(*args)

        kept = lru_cache(maxsize)(made)

        @wraps(function)
        def call(*args: Any) -> Any:
            looked_at = (
                is_compiling()
                or watched()
                or torch._C._are_functorch_transforms_active()
                or torch._C._get_tracing_state() is not None
            )
            return made(*args) if looked_at else kept(*args)

        return cast("Function", call)

    return decorate


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
