"""What tests of the benchmark share: a worker that answers at once, a machine, rows."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bakeoff.apps.bench import published
from bakeoff.apps.bench.results import Env
from bakeoff.select import Case, Op, Verdict, find_op
from bakeoff.select.contests import side_by_side
from bakeoff.select.declare.key import key
from tests.unit.verdicts import DATE, made

ONE = "256,1000]"  # names one case of rms_norm's grid on the CPU

STEP = {"model": "LLMMed small", "mode": "eager", "batch": 48, "seq": 512, "params": 17_900_000,
        "step_us": 41234.5, "tokens_per_s": 596000.4, "launches": 1203, "syncs": 0, "peak_bytes": 3 * 2**30,
        "loss": 2.34567, "reason": "", "precision": "bf16", "date": "2026-01-02"}  # fmt: skip


class FakeWorker:
    """Answers contests at once, from a function of (op, case, regime)."""

    answer: Callable[[Op, Case, str], Verdict] = staticmethod(
        lambda op, case, regime: made(op, case, {"eager": 2.0, "compiled": 1.0}, "compiled", regime)
    )
    held: list[str]
    thorough: list[bool]

    def __init__(self, announce: Callable[[str], None] = lambda stage: None, **_: object) -> None:
        self.announce = announce

    def contest(
        self,
        op: Op,
        case: Case,
        regimes: tuple[str, ...],
        budget_s: float,
        skip: object = None,
        for_the_record: bool = False,
        thorough: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> list[Verdict]:
        ready()
        type(self).held.append(key(op, case, regimes[0]))
        type(self).thorough.append(thorough)
        return [self.answer(op, case, regime) for regime in regimes]

    def stop(self, why: str) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


def environment(**changes: Any) -> Env:
    plain = Env(
        "NVIDIA H100 80GB HBM3", 132, 85 * 10**9, "580.1", "2.11.0", "3.6.0", "13.0", "3.12.3", DATE, "abc",
        3000.0, 700.0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    class Mine(FakeWorker):
        pass

    Mine.held, Mine.thorough = [], []

    for module in (published, side_by_side):
        monkeypatch.setattr(module, "Worker", Mine)
    return Mine


@pytest.fixture
def rms_norm() -> Op:
    return find_op("rms_norm")
