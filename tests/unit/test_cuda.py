"""Launches of CUDA C++ kernels: what reaches the driver, here one that writes down what it is given."""

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bakeoff import cuda

DRIVER = """
#include <string.h>
long seen[9]; void *pointer; int number, negative;
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **args, void **extra) {
    long now[9] = {(long)f, gx, gy, gz, bx, by, bz, shared, (long)stream};
    memcpy(seen, now, sizeof(now));
    pointer = *(void **)args[0];
    number = *(int *)args[1];
    negative = *(int *)args[2];
    return extra || *(void **)args[3] ? 1 : 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    if shutil.which("gcc") is None:
        pytest.skip("building a driver needs gcc")
    path = tmp_path / "driver.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    library = ctypes.CDLL(str(path))
    monkeypatch.setattr(torch.cuda._utils, "_get_cuda_library", lambda: library)
    devices = [0]

    @contextlib.contextmanager
    def enter(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: (1 << 40) + 7 + index, raising=False
    )
    cuda._driver.cache_clear()
    yield library
    cuda._driver.cache_clear()


def module(index: int = 0) -> cuda.Module:
    made = object.__new__(cuda.Module)
    made.device = torch.device("cuda", index)
    made.kernels = {"kernel": SimpleNamespace(func=ctypes.c_void_p((1 << 41) + 5))}
    return made


def test_a_launch_passes_pointers_and_ints(driver: ctypes.CDLL) -> None:
    data = torch.ones(3)
    before = cuda.launches()
    module().launch("kernel", 1 << 20, 64, 1000, data, 2**31 - 1, -(2**31), None)
    assert cuda.launches() == before + 1
    seen = (ctypes.c_long * 9).in_dll(driver, "seen")
    assert list(seen) == [(1 << 41) + 5, 1 << 20, 1, 1, 64, 1, 1, 1000, (1 << 40) + 7]
    assert ctypes.c_void_p.in_dll(driver, "pointer").value == data.data_ptr()
    assert ctypes.c_int.in_dll(driver, "number").value == 2**31 - 1
    assert ctypes.c_int.in_dll(driver, "negative").value == -(2**31)


def test_a_launch_on_another_device_enters_it_and_counts_once(driver: ctypes.CDLL) -> None:
    before = cuda.launches()
    module(1).launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, None)
    assert cuda.launches() == before + 1
    assert list((ctypes.c_long * 9).in_dll(driver, "seen"))[-1] == (1 << 40) + 8
    assert torch.cuda.current_device() == 0


def test_what_the_driver_refuses_is_raised(driver: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match="refused to launch kernel: error 1"):
        module().launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, torch.ones(1))
