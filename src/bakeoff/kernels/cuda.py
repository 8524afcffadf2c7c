"""CUDA C++ kernels, compiled when they are first needed, by the NVRTC that PyTorch's CUDA builds bring along:
no build step and no compiler to install.
"""

import ctypes
import re
import struct
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels import counter

__all__ = ["DATA", "CudaKernel", "Loaded", "cuda_kernel", "missing", "options", "parameters"]

DATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What ``data.cuh`` calls dtypes."""

_MOST_PARAMETERS = 64


def missing() -> str | None:
    """Why no CUDA source can run here; None where one can."""
    if torch.version.cuda is None:
        return "needs a CUDA build of PyTorch"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


@lru_cache(maxsize=1024)
def cuda_kernel(
    source: Path, name: str, device: torch.device, shared: int = 0, **macros: int
) -> "CudaKernel":
    """The kernel `name` of a source, compiled for a device (with an index) with a -D for each of `macros`,
    to be launched with `shared` bytes of dynamic shared memory. Compiled once for the same arguments.

    Raises RuntimeError, with the compiler's log, where it can't be compiled.
    """
    return CudaKernel(source, name, device, shared, options(macros))


def options(macros: dict[str, int]) -> tuple[str, ...]:
    """What the compiler is told."""
    return tuple(f"-D{name}={int(value)}" for name, value in macros.items())


class CudaKernel:
    """Launches one kernel: ``kernel((blocks,), threads=256, x=x, T=T)``, with its arguments by the names that
    the source gives them: tensors or None for pointers, and integers for C's int."""

    def __init__(
        self, source: Path, name: str, device: torch.device, shared: int, options: tuple[str, ...]
    ) -> None:
        self.name = name
        self.runtime = parameters(source, name)
        """The names of the arguments that a launch passes, in order."""
        self._names = frozenset(self.runtime)
        self.loaded = Loaded(source, name, device, shared, options, len(self.runtime))

    def __call__(self, grid: tuple[int, ...], /, *, threads: int, **named: Any) -> "_Launch | None":
        """Launch once on the device's current stream. The result is what later launches of the same kind may
        use, or None where they can't, as an address isn't aligned to 16 bytes."""
        if named.keys() != self._names:
            wrong = sorted(named.keys() ^ self._names)
            raise TypeError(
                f"{self.name} takes {', '.join(self.runtime)}; wrong or missing: {', '.join(wrong)}"
            )
        counter.count()
        values, addresses = [], 0
        for name in self.runtime:
            value = named[name]
            if isinstance(value, Tensor):
                value = value.data_ptr()
                addresses |= value
            elif value is None:
                value = 0
            elif not -(1 << 31) <= value < 1 << 31:
                raise OverflowError(f"{self.name}: {name} = {value} does not fit into C's int")
            values.append(value)
        self.loaded.launch_now(grid[0], threads, *values)
        return _Launch(self, threads) if addresses & 15 == 0 else None


class _Launch(NamedTuple):
    """What later launches of one kind need."""

    kernel: CudaKernel
    threads: int

    def replay(self, grid: str, arguments: str, prefix: str) -> tuple[str, dict[str, Any]]:
        """The line of Python that launches it on `stream`, and the objects that line names."""
        blocks = grid.split(",")[0]
        words = arguments.replace("None", "0")
        return f"{prefix}run(stream, {blocks}, {self.threads}, {words})", {
            f"{prefix}run": self.kernel.loaded.launch
        }


class Loaded:
    """A kernel in the driver, with `parameters` pointers and integers for arguments."""

    def __init__(
        self,
        source: Path,
        name: str,
        device: torch.device,
        shared: int,
        options: tuple[str, ...],
        parameters: int,
    ) -> None:
        from torch.cuda import _utils

        self.name, self.shared = name, shared
        self.index: int = device.index
        with torch.cuda.device(self.index):
            _bind(self.index)
            binary, _ = _utils._nvrtc_compile(
                source.read_text(),
                name,
                cuda_include_dirs=[str(source.parent)],
                nvcc_options=["--std=c++17", *options],
            )
            kernel: Any = _utils._cuda_load_module(binary, [name])[name]  # type: ignore[index]
            if shared > 48 << 10:
                kernel.set_shared_memory_config(shared)
        self._kernel = kernel  # keeps the driver's module alive
        self._function: Any = kernel.func
        # Eight bytes for each argument, of which the driver reads as many as the argument has.
        self._pack = struct.Struct(f"{parameters}q").pack_into

    def launch(self, stream: int, blocks: int, threads: int, *values: int) -> None:
        """Run it on `stream`, a stream of its device, which is the current one."""
        thread = _thread
        if not thread.bound:
            _bind(self.index)
        self._pack(thread.arguments, 0, *values)
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self.shared, stream, thread.addresses, None
        )
        if status:
            raise RuntimeError(f"CUDA refused to launch {self.name}: error {status} of the driver")

    def launch_now(self, blocks: int, threads: int, *values: int) -> None:
        """Run it on the current stream of its device, whichever device is the current one."""
        with torch.cuda.device(self.index):
            self.launch(torch._C._cuda_getCurrentRawStream(self.index), blocks, threads, *values)


@cache
def parameters(source: Path, kernel: str) -> tuple[str, ...]:
    """The names of a kernel's parameters, read from its source."""
    match = re.search(rf"__global__[^;{{]*?\b{kernel}\s*\(([^)]*)\)\s*{{", source.read_text())
    if match is None:
        raise LookupError(f"{source.name} defines no kernel {kernel}")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", match[1], flags=re.DOTALL)
    return tuple(re.findall(r"\w+", parameter)[-1] for parameter in text.split(","))


class _Thread(threading.local):
    """What launches of one thread use: the driver copies a kernel's arguments before it returns."""

    def __init__(self) -> None:
        self.bound = False
        """Whether the driver has a context here."""
        self.arguments = ctypes.create_string_buffer(8 * _MOST_PARAMETERS)
        start = ctypes.addressof(self.arguments)
        self.addresses = (ctypes.c_void_p * _MOST_PARAMETERS)(*range(start, start + 8 * _MOST_PARAMETERS, 8))


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
