"""Launches of CUDA C++ kernels: what reaches the driver, here one that writes down what it is given."""

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bakeoff import cuda
from bakeoff.kernels.counter import launches

DRIVER = """
#include <string.h>
long seen[9]; void *pointer; int number, negative, retained;
__thread long context;
int cuCtxGetCurrent(long *found) { return *found = context, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = 10 + ordinal, ordinal > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(long *found, int device) { return *found = (1l << 42) + device, retained++, 0; }
int cuCtxSetCurrent(long given) { return context = given, 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **args, void **extra) {
    if (!context) return 201;
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
    monkeypatch.setattr(cuda, "_thread", cuda._Thread())
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
    before = launches()
    module().launch("kernel", 1 << 20, 64, 1000, data, 2**31 - 1, -(2**31), None)
    assert launches() == before + 1
    seen = (ctypes.c_long * 9).in_dll(driver, "seen")
    assert list(seen) == [(1 << 41) + 5, 1 << 20, 1, 1, 64, 1, 1, 1000, (1 << 40) + 7]
    assert ctypes.c_void_p.in_dll(driver, "pointer").value == data.data_ptr()
    assert ctypes.c_int.in_dll(driver, "number").value == 2**31 - 1
    assert ctypes.c_int.in_dll(driver, "negative").value == -(2**31)


def test_a_launch_on_another_device_enters_it_and_counts_once(driver: ctypes.CDLL) -> None:
    before = launches()
    module(1).launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, None)
    assert launches() == before + 1
    assert list((ctypes.c_long * 9).in_dll(driver, "seen"))[-1] == (1 << 40) + 8
    assert torch.cuda.current_device() == 0


def test_what_the_driver_refuses_is_raised(driver: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match="refused to launch kernel: error 1"):
        module().launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, torch.ones(1))


def test_a_thread_in_which_cuda_has_not_run_yet_gets_a_context_once(driver: ctypes.CDLL) -> None:
    """As the one that runs backward may be, where a kernel's launch comes first."""
    contexts: list[int] = []

    def run(index: int) -> None:
        with torch.cuda.device(index):
            for _ in range(2):
                module(index).launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, None)
        found = ctypes.c_long()
        driver.cuCtxGetCurrent(ctypes.byref(found))
        contexts.append(found.value)

    retained = ctypes.c_int.in_dll(driver, "retained")
    for index in (0, 1):
        thread = threading.Thread(target=run, args=(index,))
        thread.start()
        thread.join()
        assert contexts[index:] == [(1 << 42) + 10 + index]
        assert retained.value == index + 1
    driver.cuCtxSetCurrent(ctypes.c_long(5))
    run(0)
    assert (contexts[2], retained.value) == (5, 2), "it keeps what it has"


def test_a_thread_that_gets_no_context_says_so(driver: ctypes.CDLL) -> None:
    with torch.cuda.device(2), pytest.raises(RuntimeError, match="no context of device 2: error 101"):
        module(2).launch("kernel", 1, 64, 0, torch.ones(1), 0, 0, None)
