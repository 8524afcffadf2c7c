"""Launches of CUDA C++ kernels: what reaches the driver, here one that writes down what it is given."""

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bakeoff.kernels import counter, cuda

SOURCE = """
extern "C" __global__ void __launch_bounds__(64, 2)
scale(const float *__restrict__ x,  // what is scaled
      int T, int stride, float *y) {
}
"""
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


def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> cuda.CudaKernel:
    """A kernel of four arguments, as if it had been compiled."""
    monkeypatch.setattr(torch.cuda._utils, "_nvrtc_compile", lambda *_, **__: (b"", ""))
    loaded = {"scale": SimpleNamespace(func=ctypes.c_void_p((1 << 41) + 5))}
    monkeypatch.setattr(torch.cuda._utils, "_cuda_load_module", lambda *_: loaded)
    source = tmp_path / "scale.cu"
    source.write_text(SOURCE)
    return cuda.CudaKernel(source, "scale", torch.device("cuda", index), 1000, ())


def launch(kernel: cuda.CudaKernel, **named: Any) -> Any:
    return kernel((1,), threads=64, **{"x": torch.ones(1), "T": 0, "stride": 0, "y": None, **named})


def test_names_are_read_from_the_source(tmp_path: Path) -> None:
    source = tmp_path / "scale.cu"
    source.write_text(SOURCE)
    assert cuda.parameters(source, "scale") == ("x", "T", "stride", "y")
    with pytest.raises(LookupError, match=r"scale.cu defines no kernel shift"):
        cuda.parameters(source, "shift")


def test_a_launch_passes_pointers_and_ints(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.ones(3)
    before = counter.launches()
    scale = kernel(tmp_path, monkeypatch)
    scale((1 << 20,), threads=64, y=None, stride=-(2**31), T=2**31 - 1, x=data)
    assert counter.launches() == before + 1
    seen = (ctypes.c_long * 9).in_dll(driver, "seen")
    assert list(seen) == [(1 << 41) + 5, 1 << 20, 1, 1, 64, 1, 1, 1000, (1 << 40) + 7]
    assert ctypes.c_void_p.in_dll(driver, "pointer").value == data.data_ptr()
    assert ctypes.c_int.in_dll(driver, "number").value == 2**31 - 1
    assert ctypes.c_int.in_dll(driver, "negative").value == -(2**31)


def test_wrong_arguments_are_refused(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = kernel(tmp_path, monkeypatch)
    with pytest.raises(TypeError, match=r"scale takes x, T, stride, y; wrong or missing: T, length"):
        scale((1,), threads=64, x=None, length=1, stride=1, y=None)
    with pytest.raises(OverflowError, match="T = 2147483648 does not fit"):
        launch(scale, T=2**31)


def test_later_launches_are_one_line(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an address isn't aligned."""
    scale = kernel(tmp_path, monkeypatch)
    ready = launch(scale)
    assert ready is not None
    line, scope = ready.replay("7, 1, 1", "p_x, 3, 4, None, ", "a_")
    exec(line, {**scope, "stream": 11, "p_x": 1 << 40})
    assert list((ctypes.c_long * 9).in_dll(driver, "seen")) == [(1 << 41) + 5, 7, 1, 1, 64, 1, 1, 1000, 11]
    assert ctypes.c_void_p.in_dll(driver, "pointer").value == 1 << 40
    assert ctypes.c_int.in_dll(driver, "negative").value == 4
    assert launch(scale, x=torch.ones(5)[1:]) is None


def test_a_launch_on_another_device_enters_it_and_counts_once(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counter.launches()
    launch(kernel(tmp_path, monkeypatch, 1))
    assert counter.launches() == before + 1
    assert list((ctypes.c_long * 9).in_dll(driver, "seen"))[-1] == (1 << 40) + 8
    assert torch.cuda.current_device() == 0


def test_what_the_driver_refuses_is_raised(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="refused to launch scale: error 1"):
        launch(kernel(tmp_path, monkeypatch), y=torch.ones(1))


def test_a_thread_in_which_cuda_has_not_run_yet_gets_a_context_once(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one that runs backward may be, where a kernel's launch comes first."""
    kernels = [kernel(tmp_path, monkeypatch, index) for index in (0, 1)]
    contexts: list[int] = []
    driver.cuCtxSetCurrent(ctypes.c_long(0))
    before = ctypes.c_int.in_dll(driver, "retained").value

    def run(index: int) -> None:
        with torch.cuda.device(index):
            for _ in range(2):
                launch(kernels[index])
        found = ctypes.c_long()
        driver.cuCtxGetCurrent(ctypes.byref(found))
        contexts.append(found.value)

    retained = ctypes.c_int.in_dll(driver, "retained")
    for index in (0, 1):
        thread = threading.Thread(target=run, args=(index,))
        thread.start()
        thread.join()
        assert contexts[index:] == [(1 << 42) + 10 + index]
        assert retained.value == before + index + 1
    driver.cuCtxSetCurrent(ctypes.c_long(5))
    run(0)
    assert (contexts[2], retained.value) == (5, before + 2), "it keeps what it has"


def test_a_thread_that_gets_no_context_says_so(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.cuCtxSetCurrent(ctypes.c_long(0))
    with torch.cuda.device(2), pytest.raises(RuntimeError, match="no context of device 2: error 101"):
        kernel(tmp_path, monkeypatch, 2)
