"""CUDA C++ sources of this package, compiled when they are first needed, by the NVRTC that PyTorch's CUDA
builds bring along: no build step and no compiler to install.
"""

import ctypes
import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels import counter

__all__ = ["CudaKernel", "CudaModule", "missing"]


def missing() -> str | None:
    """Why no CUDA source can run here; None where one can."""
    if torch.version.cuda is None:
        return "needs a CUDA build of PyTorch"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


class CudaModule:
    """A source file compiled with some options for one device.

    Raises RuntimeError, with the compiler's log, where it can't be compiled.
    """

    def __init__(self, path: Path, kernels: Sequence[str], options: Sequence[str], device: torch.device):
        self.path = path
        self.device = torch.device(
            device.type, torch.cuda.current_device() if device.index is None else device.index
        )
        self._kernels = self._compiled(kernels, options)

    def _compiled(self, kernels: Sequence[str], options: Sequence[str]) -> Any:
        from torch.cuda import _utils

        with torch.cuda.device(self.device):
            _bind(self.device.index)
            binary, _ = _utils._nvrtc_compile(
                self.path.read_text(),
                kernels[0],
                cuda_include_dirs=[str(self.path.parent)],
                nvcc_options=["--std=c++17", *options],
            )
            return _utils._cuda_load_module(binary, list(kernels))

    def allow_shared(self, kernel: str, nbytes: int) -> None:
        """Let `kernel` use so much shared memory."""
        with torch.cuda.device(self.device):
            self._kernels[kernel].set_shared_memory_config(nbytes)

    def launch(self, kernel: str, stream: int, blocks: int, threads: int, shared: int, *values: int) -> None:
        """Run `kernel` on `stream`. `values` are addresses, 0 for a null pointer, and numbers of C's type
        int."""
        if not _thread.bound:
            _bind(self.device.index)
        # Eight bytes for each, of which the driver reads as many as the kernel's argument has.
        slots = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        status = _driver().cuLaunchKernel(
            self._kernels[kernel].func, blocks, 1, 1, threads, 1, 1, shared, stream, places, None
        )
        if status:
            raise RuntimeError(f"CUDA refused to launch {kernel}: error {status} of the driver")


class _Launch(NamedTuple):
    """What later launches of one kind need."""

    kernel: "CudaKernel"
    threads: int
    shared: int

    def replay(self, grid: str, arguments: str, prefix: str) -> tuple[str, dict[str, Any]]:
        """The line of Python that launches it on `stream`, and the objects that line names."""
        blocks = grid.split(",")[0]
        words = arguments.replace("None", "0")
        line = f"{prefix}run({self.kernel.name!r}, stream, {blocks}, {self.threads}, {self.shared}, {words})"
        return line, {f"{prefix}run": self.kernel.module.launch}


class CudaKernel:
    """Launches one kernel of a module: ``kernel((blocks,), threads=256, shared=0, x=x, T=T)``, its arguments
    by
    the names that the source gives them."""

    def __init__(self, module: CudaModule, name: str) -> None:
        self.module, self.name = module, name
        self.runtime = parameters(module.path, name)

    def __call__(
        self, grid: tuple[int, ...], /, *, threads: int, shared: int = 0, **named: Any
    ) -> _Launch | None:
        """Launch once. The result is what later launches of the same kind may use, or None where they
        can't."""
        if named.keys() != set(self.runtime):
            wrong = sorted(named.keys() ^ set(self.runtime))
            raise TypeError(
                f"{self.name} takes {', '.join(self.runtime)}; wrong or missing: {', '.join(wrong)}"
            )
        counter.count()
        values = [named[name] for name in self.runtime]
        values = [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values]
        device = self.module.device
        with torch.cuda.device(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.module.launch(self.name, stream, grid[0], threads, shared, *values)
        pointers = [named[name].data_ptr() for name in self.runtime if isinstance(named[name], Tensor)]
        return _Launch(self, threads, shared) if all(p % 16 == 0 for p in pointers) else None


@cache
def parameters(path: Path, kernel: str) -> tuple[str, ...]:
    """The names of a kernel's parameters, read from its source."""
    match = re.search(rf"__global__[^;{{]*?\b{kernel}\s*\(([^)]*)\)\s*{{", path.read_text())
    if match is None:
        raise LookupError(f"{path.name} defines no kernel {kernel}")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", match[1], flags=re.DOTALL)
    return tuple(re.findall(r"\w+", parameter)[-1] for parameter in text.split(","))


class _Thread(threading.local):
    bound = False
    """Whether the driver has a context here."""


_thread = _Thread()


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

    driver: ctypes.CDLL = _utils._get_cuda_library()
    size, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuLaunchKernel.argtypes = [pointer, *[size] * 7, pointer, pointer, pointer]
    return driver
