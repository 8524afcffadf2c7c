"""The kernels of a call, compiled side by side before the first of them runs.

A compiler takes seconds for a kernel, and a call may launch ten. Where one is missing, the call's planner is
asked once more what it will launch, and all that is missing is compiled in threads: nearly all of that time
is spent in C++, outside Python's lock.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["Missing", "a_kernel_is_missing", "rehearsable"]

Missing = Mapping[Any, Callable[[], Any]]
"""By what tells kernels apart: what starts to compile one, as Triton's `warmup` does, and returns it."""


class _Thread(threading.local):
    rehearse: Callable[[], Missing] | None = None


_thread = _Thread()


@contextlib.contextmanager
def rehearsable(rehearse: Callable[[], Missing]) -> Iterator[None]:
    """A call that can say beforehand which of its kernels are missing."""
    outer, _thread.rehearse = _thread.rehearse, rehearse
    try:
        yield
    finally:
        _thread.rehearse = outer


def a_kernel_is_missing(device: int) -> None:
    """To be called before a kernel is compiled: compiles all that the present call is going to need. What
    can't be compiled is left to its launch, which says why."""
    rehearse, _thread.rehearse = _thread.rehearse, None
    if rehearse is None or torch.cuda.is_current_stream_capturing():
        return
    missing = rehearse()
    if len(missing) > 1:
        _compile(missing, device)


def _compile(missing: Missing, device: int) -> None:
    from triton import AsyncCompileMode, FutureKernel  # here, as planners also run where there is no triton
    from triton.runtime._async_compile import active_mode

    if active_mode.get() is not None:  # the caller's own, who compiles side by side already
        return

    def load(kernel: Any) -> None:
        with torch.cuda.device(device), contextlib.suppress(Exception):
            kernel.run  # noqa: B018  builds the launcher, in C, and hands the kernel to the driver

    with ThreadPoolExecutor(thread_name_prefix="bakeoff-compile") as pool, torch.cuda.device(device):
        with AsyncCompileMode(pool, ignore_errors=True):
            started = [start() for start in missing.values()]
        compiled = [kernel.kernel if isinstance(kernel, FutureKernel) else kernel for kernel in started]
        list(pool.map(load, [kernel for kernel in compiled if kernel is not None]))
