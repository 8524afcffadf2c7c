"""What a call lacks is compiled in threads before its first launch, forward and backward."""

import threading

import pytest
import torch
from triton import knobs

from bakeoff.ops.memory_scan import OP
from bakeoff.ops.memory_scan.op import _case
from bakeoff.ops.memory_scan.triton import memory_scan
from bakeoff.select.contests.draw import inputs


@pytest.fixture
def compilers(monkeypatch):
    """The name of the thread that compiles, for each kernel."""
    seen = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **_: seen.append(threading.current_thread().name)
    )
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    return seen


def test_kernels_of_a_call_are_compiled_in_threads(compilers):
    case = _case("sizes that no other test has", 3, 50, 24, 40, 16, torch.bfloat16)

    def step():
        args = inputs(OP, case, 0)
        results = memory_scan(*args)
        leaves = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])]

    first = step()
    assert len(compilers) >= 8
    assert all(name.startswith("bakeoff-compile") for name in compilers), compilers
    compilers.clear()
    for mine, other in zip(first, step(), strict=True):
        assert torch.equal(mine, other)
    assert compilers == []
