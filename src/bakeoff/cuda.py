"""CUDA C++ sources of this package, compiled when they are first needed, by the NVRTC that PyTorch's CUDA
builds bring along: no build step and no compiler to install.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels.counter import count

__all__ = ["Limits", "Module", "limits", "missing"]


class _Thread(threading.local):
    bound = False
    """Whether the driver has a context here."""


_thread = _Thread()


class Limits(NamedTuple):
    """Of a device."""

    multiprocessors: int
    shared: int
    """Bytes of shared memory a block may use."""


@lru_cache(maxsize=16)
def limits(device: torch.device) -> Limits:
    """What `device` has."""
    found = torch.cuda.get_device_properties(device)
    return Limits(found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def missing() -> str | None:
    """Why no CUDA source can run here; None where one can."""
    if torch.version.cuda is None:
        return "needs a CUDA build of PyTorch"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


class Module:
    """A source file compiled with some options for one device, and its kernels.

    Raises RuntimeError, with the compiler's log, where it can't be compiled.
    """

    def __init__(
        self, source: str, kernels: Sequence[str], options: Sequence[str], device: torch.device
    ) -> None:
        from torch.cuda import _utils

        path = Path(__file__).parent / source
        index: int | None = device.index  # "cuda" has none
        if index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        with torch.cuda.device(device):
            _bind(torch.cuda.current_device())
            binary, _ = _utils._nvrtc_compile(
                path.read_text(),
                kernels[0],
                cuda_include_dirs=[str(path.parent)],
                nvcc_options=["--std=c++17", *options],
            )
            loaded: Any = _utils._cuda_load_module(binary, list(kernels))
        self.device = device
        self.kernels = loaded

    def allow_shared(self, kernel: str, nbytes: int) -> None:
        """Let `kernel` use so much shared memory."""
        with torch.cuda.device(self.device):
            self.kernels[kernel].set_shared_memory_config(nbytes)

    def launch(self, kernel: str, blocks: int, threads: int, shared: int, *args: Tensor | int | None) -> None:
        """Run `kernel` on the current stream. Arguments are tensors, None for a null pointer, and numbers of
        C's type int."""
        index = self.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self.launch(kernel, blocks, threads, shared, *args)
            return
        if not _thread.bound:
            _bind(index)
        count()
        # Eight bytes for each, of which the driver reads as many as the kernel's argument has.
        values = (ctypes.c_int64 * len(args))(
            *[x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in args]
        )
        start = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(args))(*range(start, start + 8 * len(args), 8))
        status = _driver().cuLaunchKernel(
            self.kernels[kernel].func, blocks, 1, 1, threads, 1, 1, shared,
            torch._C._cuda_getCurrentRawStream(index), places, None,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"CUDA refused to launch {kernel}: error {status} of the driver")


def _bind(index: int) -> None:
    """Gives this thread the context of its device, if it has none: PyTorch leaves that to the first call of
    CUDA's runtime, and in the thread that runs backward it may be yet to come.
    """
    driver, context, device = _driver(), ctypes.c_void_p(), ctypes.c_int()
    status = driver.cuCtxGetCurrent(ctypes.byref(context))
    if not status and not context:
        status = (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or driver.cuCtxSetCurrent(context)
        )
    if status:
        raise RuntimeError(
            f"CUDA gives this thread no context of device {index}: error {status} of the driver"
        )
    _thread.bound = True


@cache
def _driver() -> ctypes.CDLL:
    """The driver's library, which PyTorch's own launches open anew each time."""
    from torch.cuda import _utils

    found: ctypes.CDLL = _utils._get_cuda_library()
    size, pointer = ctypes.c_uint, ctypes.c_void_p
    found.cuLaunchKernel.argtypes = [pointer, *[size] * 7, pointer, pointer, pointer]
    return found
