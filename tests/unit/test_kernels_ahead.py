"""Kernels that a call is going to need are compiled side by side, before the first of them runs."""

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.kernels import ahead
from bakeoff.kernels.ahead import Missing
from bakeoff.kernels.plan import Plan, Planned


class Kernel:
    """Adds 1 to y; like a kernel of Triton it must be compiled before it first runs."""

    runtime = ("y",)

    def __init__(self, name: str) -> None:
        self.name, self.compiled = name, False

    def __call__(self, grid: tuple[int, ...], /, y: Tensor) -> None:
        if not self.compiled:
            ahead.a_kernel_is_missing(0)
        self.compiled = True
        y += grid[0]

    def missing(self, grid: tuple[int, ...], /, y: Tensor) -> Missing:
        return {} if self.compiled else {self.name: lambda: y.fill_(99.0)}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of kernels that were compiled together."""
    seen: list[list[str]] = []

    def compile_together(missing: Mapping[str, Any], device: int) -> None:
        assert device == 0
        seen.append([*missing])

    monkeypatch.setattr(ahead, "_compile", compile_together)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # CPU builds lack it
    return seen


def planned(*kernels: Kernel, inner: Planned | None = None) -> Planned:
    def add(plan: Plan, x: Tensor, y: Tensor) -> None:
        plan.run(Tensor.add_, y, x)
        if inner is not None:
            plan.run(inner.run, x, y)
        scratch = plan.zeros(y.shape, y.dtype)
        for kernel in kernels:
            plan.launch(kernel, (1,), y=y)
            plan.launch(kernel, (0,), y=y)
        plan.launch(kernels[0], (1,), y=scratch)

    return Planned(add, {"x": "Tensor", "y": "new"})


def called(fn: Planned, size: int) -> Tensor:
    y = torch.zeros(size)
    fn.run(torch.ones(size), y)
    return y


def test_all_that_are_missing_are_compiled_together_once(rounds: list[list[str]]) -> None:
    kernels = [Kernel(name) for name in "abc"]
    fn = planned(*kernels)
    assert called(fn, 4).tolist() == [4.0] * 4  # what was rehearsed has touched nothing
    assert rounds == [["a", "b", "c"]]
    called(fn, 5)
    assert len(rounds) == 1  # another kind of call that finds them compiled
    kernels[0].compiled = kernels[1].compiled = False
    called(fn, 6)
    assert rounds[1:] == [["a", "b"]]


def test_one_alone_is_left_to_its_launch(rounds: list[list[str]]) -> None:
    assert called(planned(Kernel("a")), 4).tolist() == [2.0] * 4
    assert rounds == []


def test_a_plan_within_a_plan_has_its_own(rounds: list[list[str]]) -> None:
    inner = planned(Kernel("a"), Kernel("b"))
    outer = planned(Kernel("c"), Kernel("d"), inner=inner)
    called(outer, 4)
    assert rounds == [["a", "b"], ["c", "d"]]


def test_nothing_is_compiled_ahead_while_a_graph_is_captured(
    rounds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    called(planned(Kernel("a"), Kernel("b")), 4)
    assert rounds == []


def test_a_kernel_outside_a_plan_is_compiled_alone(rounds: list[list[str]]) -> None:
    Kernel("a")((1,), y=torch.zeros(3))
    assert rounds == []


class Built:
    """What Triton's warmup returns: whoever asks for `run` loads it."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.loaded = fails, ""

    @property
    def run(self) -> None:
        self.loaded = threading.current_thread().name
        if self.fails:
            raise RuntimeError("out of resource: shared memory")


def test_what_is_built_is_loaded_in_threads_and_failures_are_the_launch_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    built = [Built(), Built(fails=True), Built()]
    ahead._compile({i: lambda one=one: one for i, one in enumerate(built)} | {3: lambda: None}, 0)
    assert all(one.loaded.startswith("bakeoff-compile") for one in built)
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):  # the caller's own
        other = Built()
        ahead._compile({0: lambda: other}, 0)
        assert other.loaded == ""
