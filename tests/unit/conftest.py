"""The unit lane: contests measure for a fifth of their usual time, enough to tell what tests let compete."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def _short_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = sys.modules.get("bakeoff.select.choose.tune")
    if tune is not None:  # a test of nothing else needs no torch
        monkeypatch.setattr(tune, "_PER_KEY_S", 0.3)


@pytest.fixture
def forked_workers(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contests are held in forks of this process, which start at once. They compute with one thread: those of
    this process don't exist there."""
    from bakeoff.select.contests import worker
    from tests.unit.forked_worker import Fork

    names = ("PIPE", "DEVNULL", "TimeoutExpired")
    replaced = SimpleNamespace(Popen=Fork, **{name: getattr(subprocess, name) for name in names})
    monkeypatch.setattr(worker, "subprocess", replaced)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of PyTorch's: in operations on tiny tensors more of them mostly wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
