"""A written-out launch: what goes past the Python of Triton's launchers, and what can't."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from bakeoff.kernels.triton import Compiled, TritonKernel


class Launcher:
    """A launcher as Triton makes them: Python in front of a function in C, `launch`."""

    def __init__(self, scratch: int = 0) -> None:
        self.scratch, self.asked = scratch, 0
        self.calls: list[Any] = []
        self.launch: Callable[..., None] = lambda *args: self.calls.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.asked += 1
        memory = x * y * z * self.scratch if self.scratch else None
        self.launch(x, y, z, stream, function, False, memory, *args)


class Packing(Launcher):
    """One that hands on the kernel's arguments as a tuple."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.asked += 1
        self.launch(x, y, z, stream, function, args[:4], None, "signature", args[4:])


def launched(launcher: Any) -> Any:
    """What arrives behind the launcher when it is called, and when its launch is written out."""
    compiled = Compiled(launcher, 111, (4, 1), (1024, True, "fp32", None))
    line, scope = compiled.replay("7, 1, 1", "p_x, None, 3, value1, ", "launch0_")
    launcher.asked = 0
    exec(line, scope | {"stream": 99, "p_x": 5, "value1": 1.5})
    asked = launcher.asked
    launcher(7, 1, 1, 99, 111, (4, 1), None, None, None, 5, None, 3, 1.5, 1024, True, "fp32", None)
    return *launcher.calls, asked


@pytest.mark.parametrize("kind", [Launcher, Packing])
def test_a_launcher_without_work_of_its_own_is_passed_by(kind: type[Launcher]) -> None:
    written, called, asked = launched(kind())
    assert written == called
    assert asked == 0


def test_a_launcher_that_allocates_is_called_each_time() -> None:
    written, called, asked = launched(Launcher(scratch=5))
    assert written == called
    assert written[6] == 35
    assert asked == 1


def test_a_function_is_called_as_it_is() -> None:
    calls: list[Any] = []
    line, scope = Compiled(lambda *args: calls.append(args), 1, 2, ()).replay("1, 1, 1", "", "launch3_")
    exec(line, scope | {"stream": 9})
    assert calls == [(1, 1, 1, 9, 1, 2, None, None, None)]


def test_a_launch_on_triton_s_own_path_is_the_tensors_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pointers are misaligned, as where another device is the current one."""
    devices: list[int] = []
    ran_on: list[int] = []

    class Entered:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            devices.append(self.device)

        def __exit__(self, *_: object) -> None:
            devices.pop()

    def kernel(x: Any) -> None: ...

    @dataclass
    class Function:
        fn: Callable[..., None]

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **_: ran_on.extend(devices)

    launch = TritonKernel(Function(kernel))
    monkeypatch.setattr(launch, "_told", lambda named: (None, 1, []))
    monkeypatch.setattr(torch.cuda, "device", Entered)
    assert launch((1,), x=torch.zeros(1)) is None
    assert ran_on == [1]
