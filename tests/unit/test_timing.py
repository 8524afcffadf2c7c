"""The one timer and the one reader of device names."""

import pytest
import torch

from bakeoff import device, timing
from bakeoff.device import named_device, synchronize
from bakeoff.errors import BakeoffError, DeviceError
from bakeoff.timing import seconds_per_call


def test_calls_take_turns_and_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    now = iter([1.0, 4.0])

    def clock() -> float:
        events.append("clock")
        return next(now)

    monkeypatch.setattr(timing, "synchronize", lambda name: events.append(f"wait for {name}"))
    calls = [lambda: events.append("a"), lambda: events.append("b")]
    assert seconds_per_call(calls, 3, "cuda:1", clock=clock) == 1.0
    assert events == ["wait for cuda:1", "clock", "a", "b", "a", "wait for cuda:1", "clock"]


def test_the_hosts_part_does_not_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "synchronize", lambda name: events.append("wait"))
    now = iter([0.0, 2.0])
    us = seconds_per_call([lambda: events.append("call")], 2, "cpu", clock=lambda: next(now), host_only=True)
    assert us == 1.0
    assert events == ["wait", "call", "call"]


def test_the_cpu_has_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    synchronize("cpu")
    synchronize(torch.device("cpu"))
    assert waited == []
    synchronize("cuda:1")
    assert waited == ["cuda:1"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """A machine with so many GPUs."""
    count: int = request.param
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: count)
    return count


@pytest.mark.parametrize(
    ("gpus", "name", "expected"),
    [
        (0, "auto", "cpu"), (0, "cpu", "cpu"), (1, "cpu:0", "cpu"), (1, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1"),
    ],
    indirect=["gpus"],
)  # fmt: skip
def test_devices_by_name(gpus: int, name: str, expected: str) -> None:
    assert str(named_device(name)) == expected


@pytest.mark.parametrize(
    ("gpus", "name", "message"),
    [
        (0, "banana", "'banana' is no device: use auto, cpu, cuda or cuda:N"),
        (0, "", "'' is no device"),
        (1, "cuda:-1", "'cuda:-1' is no device"),
        (1, "mps", "'mps' is not supported: use auto, cpu, cuda or cuda:N"),
        (0, "cuda", "sees no CUDA device here: use cpu, or see bakeoff doctor"),
        (1, "cuda:1", "there is no cuda:1: this machine has cuda:0$"),
        (4, "cuda:9", "there is no cuda:9: this machine has cuda:0 to cuda:3$"),
    ],
    indirect=["gpus"],
)
def test_devices_that_are_not_there(gpus: int, name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        named_device(name)
    assert isinstance(caught.value, BakeoffError)
    assert isinstance(caught.value, ValueError)
