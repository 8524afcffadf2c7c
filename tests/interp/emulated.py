"""CUDA C++ on the CPU: `bakeoff.kernels.cuda` with a compiler for this machine; threads take turns."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bakeoff import hardware
from bakeoff.kernels import cuda, triton
from bakeoff.kernels import plan as plan_module
from bakeoff.kernels.plan import _unrecordable
from bakeoff.ops.long_conv.direct.convolution import direct
from bakeoff.ops.long_conv.fft.convolution import fft
from bakeoff.ops.long_conv.toeplitz.convolution import toeplitz
from bakeoff.ops.spectral_filter.fft import fft as spectral

HARNESS = Path(__file__).with_name("emulation.cpp")


@functools.cache
def _library(source, kernel, options):
    """The compiled source, kept for all workers of the run under a name made of everything it depends on."""
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *options]
    command += [
        "-march=native",
        "-ffp-contract=fast",
    ]  # products that are added to something, as NVRTC has them
    command += [f'-DSOURCE="{source}"', f"-DKERNEL={kernel}"]
    texts = [path.read_bytes() for path in _included(source)]
    text = b"".join(texts) + HARNESS.read_bytes() + repr(command).encode()
    folder = Path(os.environ["BAKEOFF_TEST_RUN"]) / "emulation"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        command += [str(HARNESS), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.replace(path)
    return ctypes.CDLL(str(path))


def _included(source):
    """A source and the files it includes, directly or not."""
    found = [source]
    for path in found:
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            included = (path.parent / name).resolve()
            if included not in found:
                found.append(included)
    return found


class Loaded:
    """As `bakeoff.kernels.cuda.Loaded`."""

    def __init__(self, source, name, device, shared, options, parameters):
        assert device.type == "cpu"
        assert shared <= hardware.shared_memory(-1)
        self.library = _library(source, name, options)
        self.shared, self.parameters = shared, parameters

    def launch(self, stream, blocks, threads, *values):
        del stream
        assert threads <= 1024
        assert all(isinstance(value, int) for value in values)  # as the driver's launch asks for
        slots = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        assert self.library.emulate(blocks, threads, self.shared, places, len(values)) == 0

    def launch_now(self, blocks, threads, *values):
        self.launch(0, blocks, threads, *values)


class Interpreted:
    """A launch of an interpreted Triton kernel, to be repeated with other addresses."""

    def __init__(self, kernel, named):
        self.kernel = kernel
        self.dtypes = [
            t.dtype if isinstance(t, torch.Tensor) else None for t in map(named.get, kernel.runtime)
        ]
        self.constants = {name: value for name, value in named.items() if name not in kernel.runtime}

    def replay(self, grid, arguments, prefix):
        return f"{prefix}run(({grid}), [{arguments}])", {f"{prefix}run": self.run}

    def run(self, grid, values):
        values = [
            v if dtype is None else torch.frombuffer((ctypes.c_char * 16).from_address(v), dtype=dtype)
            for v, dtype in zip(values, self.dtypes, strict=True)
        ]
        named = dict(zip(self.kernel.runtime, values, strict=True))
        self.kernel.function[grid](**named, **self.constants)


def _interpret(launch, kernel, grid, named):
    launch(kernel, grid, **named)
    tensors = [t for t in named.values() if isinstance(t, torch.Tensor)]
    return None if any(t.data_ptr() % 16 for t in tensors) else Interpreted(kernel, named)


def forget_plans():
    """What calls have recorded, on a device that may have been another."""
    for root in (direct, toeplitz, fft, spectral):
        for kernel_op in (root, *root._bound.values()):
            for run in kernel_op._fills:
                run.__globals__["plans"].clear()


def replays(kernel_op):
    """Whether what a call does is written out, forward and backward, for every kind of call seen twice."""
    kinds = [run.__globals__["plans"].values() for run in kernel_op._fills]
    return [all(plan is not _unrecordable for plan in plans) and any(plans) for plans in kinds]


def emulate(monkeypatch, shared=227 << 10):
    """CUDA candidates run here, on a device with `shared` bytes of shared memory a block; Triton's kernels
    are interpreted, also where a call's launches are recorded and replayed."""
    if shutil.which("g++") is None:
        pytest.skip("emulating CUDA needs g++")
    forget_plans()
    cuda.cuda_kernel.cache_clear()
    monkeypatch.setattr(cuda, "Loaded", Loaded)
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(hardware, "shared_memory", lambda device: shared)
    surroundings = plan_module._surroundings
    monkeypatch.setattr(plan_module, "_surroundings", lambda: {**surroundings(), "stream": 0})
    launch = triton.TritonKernel.__call__
    monkeypatch.setattr(
        triton.TritonKernel,
        "__call__",
        lambda kernel, grid, /, **named: _interpret(launch, kernel, grid, named),
    )
