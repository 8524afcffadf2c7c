"""Verdicts that no contest gave, for tests of what reads them; and none at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bakeoff.select import Case, Op, Trial, Verdict
from bakeoff.select.choose import policy
from bakeoff.select.contests.judge import Errors
from bakeoff.select.contests.measure import Timing
from bakeoff.select.declare.key import key

DATE = "2026-01-02T03:04:05+00:00"


@contextlib.contextmanager
def no_verdicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty table cache, given, below `folder`; nothing is remembered before and after."""
    monkeypatch.setenv("BAKEOFF_CACHE", str(folder / "cache"))
    policy.store.forget()
    policy.forget()
    yield folder / "cache"
    policy.store.forget()
    policy.forget()


def made(op: Op, case: Case, us: dict[str, float], winner: str, regime: str = "eager") -> Verdict:
    """The verdict of `case` in which the candidates in `us` took that long and all others are out."""
    trials = tuple(
        Trial(
            c.name,
            c.source_hash,
            Timing(us[c.name], 0.9 * us[c.name], 1.1 * us[c.name], 0.001, 9),
            Errors(3e-7, 1e-7, 0),
        )
        if c.name in us
        else Trial(c.name, c.source_hash, rejected="made to be out")
        for c in op.candidates
    )
    return Verdict(key(op, case, regime), op.name, regime, winner, "made to win", trials, op.cost(case), DATE)
