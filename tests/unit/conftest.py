"""Fixtures of the benchmark's tests."""

import pytest

from bakeoff.bench import contests, published, regret
from bakeoff.select import Op, find_op
from tests.unit.benches import FakeWorker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    class Mine(FakeWorker):
        pass

    Mine.held = []

    for module in (contests, published, regret):
        monkeypatch.setattr(module, "Worker", Mine)
    return Mine


@pytest.fixture
def rms_norm() -> Op:
    return find_op("rms_norm")
