"""Launching a Triton kernel in a few microseconds.

``kernel[grid](...)`` re-derives the kernel's specialisation from every argument on every call. Here the
compiled kernel is remembered under what can really change it (constexprs, dtypes, pointer alignment),
and later launches go straight to the driver.

Contract for kernels launched through `Launcher`: every runtime integer and float is listed in
``do_not_specialize``, so that its value never selects another binary. Under Triton's interpreter the
same call runs the interpreted kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton import knobs

from bakeoff.kernels.counter import count

__all__ = ["Launcher"]


class Launcher:
    """Launches one ``@triton.jit`` function, reusing compiled kernels.

    ``launcher(grid, *args, num_warps=.., NAME=constexpr, ..)``: `args` are the runtime arguments in the
    kernel's order, the keywords its constexprs (declared after them) and compile options. A misaligned
    pointer or an installed Triton launch hook takes Triton's own, slower path.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any, **meta: Any) -> None:
        count()
        alignment = 0
        device = -1
        values: list[Any] = []
        types: list[Any] = []
        for a in args:
            if isinstance(a, torch.Tensor):
                pointer = a.data_ptr()
                alignment |= pointer
                device = a.get_device()
                values.append(pointer)
                types.append(a.dtype)
            else:
                values.append(a)
                types.append(a.__class__)
        if device < 0 or alignment & 15 or knobs.runtime.launch_enter_hook.calls:
            self.kernel[grid](*args, **meta)
            return
        key = (device, *types, *meta.values())
        found = self.compiled.get(key)
        if found is None or device != torch.cuda.current_device():
            with torch.cuda.device(device):
                compiled = self.kernel[grid](*args, **meta)
            names = self.kernel.arg_names
            constants = tuple(meta[name] for name in names if name in meta)
            self.compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)
            return
        run, function, packed, constants = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, packed, None, None, None, *values, *constants)
