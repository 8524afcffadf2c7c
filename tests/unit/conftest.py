"""The unit lane: contests measure for a fifth of their usual time, enough to tell what tests let compete."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _short_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = sys.modules.get("bakeoff.select.choose.tune")
    if tune is not None:  # a test of nothing else needs no torch
        monkeypatch.setattr(tune, "_PER_KEY_S", 0.3)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of PyTorch's: in operations on tiny tensors more of them mostly wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
