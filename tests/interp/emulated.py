"""CUDA C++ candidates on the CPU: `bakeoff.cuda` with a compiler for this machine and threads for threads."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import bakeoff
from bakeoff import cuda
from bakeoff.ops.long_conv import direct, direct_major, fft

HARNESS = Path(__file__).with_name("emulation.cpp")
ROOT = Path(bakeoff.__file__).parent


@functools.cache
def _library(source, kernels, options):
    """The compiled source, kept for all workers of the run under a name made of everything it depends on."""
    command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-pthread", *options]
    command += [
        "-march=native",
        "-ffp-contract=fast",
    ]  # products that are added to something, as NVRTC has them
    command += [f'-DSOURCE="{ROOT / source}"', "-DKERNELS=" + " ".join(f"KERNEL({name})" for name in kernels)]
    headers = b"".join(path.read_bytes() for path in sorted((ROOT / source).parent.glob("*.cuh")))
    text = headers + (ROOT / source).read_bytes() + HARNESS.read_bytes() + repr(command).encode()
    folder = Path(os.environ["BAKEOFF_TEST_RUN"]) / "emulation"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        command += [str(HARNESS), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.replace(path)
    return ctypes.CDLL(str(path))


class Module:
    """As `bakeoff.cuda.Module`."""

    def __init__(self, source, kernels, options, device):
        del device
        self.library = _library(source, tuple(kernels), tuple(options))
        self.allowed = dict.fromkeys(kernels, 0)

    def allow_shared(self, kernel, nbytes):
        self.allowed[kernel] = nbytes

    def launch(self, kernel, blocks, threads, shared, *args):
        assert shared <= max(self.allowed[kernel], 48 << 10)
        assert threads <= 1024
        cuda._count += 1
        given = [self._argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(given))(
            *(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in given)
        )
        assert self.library.emulate(kernel.encode(), blocks, threads, shared, pointers, len(given)) == 0

    @staticmethod
    def _argument(value):
        if value is None:
            return ctypes.c_void_p(None)
        if isinstance(value, torch.Tensor):
            assert value.numel() == 0 or value.untyped_storage().data_ptr()
            return ctypes.c_void_p(value.data_ptr() or None)
        return ctypes.c_int(value)  # refuses floats, as the launcher does


def emulate(monkeypatch, shared=227 << 10):
    """CUDA candidates run here, built anew, on a device with `shared` bytes of shared memory a block."""
    if shutil.which("g++") is None:
        pytest.skip("emulating CUDA needs g++")
    for cache in (
        fft._kernels,
        fft._twiddles,
        fft.launch,
        direct._module,
        direct._launch,
        direct_major._module,
        direct_major._launch,
    ):
        cache.cache_clear()
    monkeypatch.setattr(cuda, "Module", Module)
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(cuda, "limits", lambda device: cuda.Limits(2, shared))
