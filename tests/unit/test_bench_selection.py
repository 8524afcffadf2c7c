"""Suite "selection": what choosing costs, against the best candidate and against calling it."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bakeoff.apps.bench import (
    contests,
    regret,
    results,
    starts,
)
from bakeoff.apps.bench.exact import exact
from bakeoff.apps.bench.suites import Cell, cells
from bakeoff.errors import ContestError
from bakeoff.select import Case, Op, TensorMeta, registry
from bakeoff.select.contests.measure import Timing
from bakeoff.select.declare.key import key
from tests.unit.benches import ONE, FakeWorker
from tests.unit.benches import rms_norm as rms_norm
from tests.unit.benches import worker as worker
from tests.unit.verdicts import made


def test_regret_is_against_the_best(rms_norm: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program that exists: nothing is compiled
    (cell, _) = cells(rms_norm, "cpu", ONE)

    def fixed(samplers: Mapping[str, Any], budget_s: float) -> dict[str, Timing]:
        return {name: Timing(us, us, us, 0.0, 9) for name, us in {"eager": 10.0, "compiled": 12.5}.items()}

    class Untimed:
        def sampler(self, calls: Any) -> Any:
            return None

    monkeypatch.setattr(regret, "interleave", fixed)
    monkeypatch.setattr(regret, "timers_for", lambda case: {"eager": Untimed()})
    verdict = made(rms_norm, cell.case, {"eager": 2.0, "compiled": 1.0}, "compiled")
    rows = regret.regret_rows(cell, results.rows_of_verdict(cell, verdict), 1.0)
    eager, compiled, triton = rows[:3]
    assert (compiled.us, compiled.chosen, compiled.regret, compiled.against_eager) == (12.5, True, 1.25, 1.25)
    assert (eager.us, eager.chosen, eager.regret, eager.against_eager) == (10.0, False, 1.0, 1.0)
    assert (triton.us, triton.regret) == (None, None)
    assert triton.reason
    found = regret.summary([msgspec.to_builtins(row) for row in rows])
    assert found["eager"]["cells"] == 1
    assert found["eager"]["worst_regret"] == 1.25
    assert cell.case.name in found["eager"]["worst_cell"]


def test_summary() -> None:
    def row(us: float, regime: str, **more: Any) -> dict[str, Any]:
        return {"op": "rms_norm", "case": f"{us}", "direction": "both", "regime": regime, "us": us, **more}

    rows = [
        row(1, "eager", chosen=True, regret=1.0, against_eager=0.5),
        row(2, "eager", chosen=True, regret=1.21, against_eager=1.01),
        row(3, "eager", chosen=False, regret=7.0, against_eager=7.0),
        row(4, "graph", chosen=True, regret=1.0, against_eager=0.9),
        row(1.5, "eager", measure="overhead"),
        row(1.2, "eager", measure="overhead"),
        {"model": "LLMMed small", "tune_s": 21.0, "cached_start_s": 0.15, "load_s": 0.5},
    ]
    found = regret.summary(rows)
    assert found["eager"]["geomean_regret"] == pytest.approx(math.sqrt(1.21))
    assert (found["eager"]["cells"], found["eager"]["worst_regret"]) == (2, 1.21)
    assert found["eager"]["worst_against_eager_cell"] == "rms_norm 2 both"
    assert found["graph"]["worst_regret"] == 1.0
    assert found["overhead_us"] == {"rms_norm": 1.5}
    assert (found["tune_s"], found["cached_start_s"]) == (21.0, 0.15)


def test_overhead_is_the_median_difference() -> None:
    now = 0.0
    slow = iter([100e-6] * 10)  # a disturbance that a mean would show

    def clock() -> float:
        return now

    def call(seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += seconds + next(slow, 0.0)

        return run

    found = regret.overhead_us(call(5e-6), call(3e-6), "cpu", rounds=21, calls=4, clock=clock)
    assert found == pytest.approx(2.0)


def test_host_and_overhead_of_real_calls(rms_norm: Op) -> None:
    (row,) = [r for r in regret.overhead_rows(rms_norm, "cpu") if r.candidate == "eager"]
    assert row.measure == "overhead"
    assert row.us is not None
    assert row.us > 0  # a dictionary lookup is not free
    small = regret._tiny(rms_norm, "cpu").case
    assert all(meta.numel <= regret.TINY for meta in small.data.values())
    assert small.needs_grad


def test_every_op_has_a_tiny_call() -> None:
    """Those without gradients, too: forward alone."""
    for op in registry.values():
        cell = regret._tiny(op, "cpu")
        assert cell.direction == ("both" if any(case.needs_grad for case in op.cases()) else "forward")
        assert cell.case.needs_grad == (cell.direction == "both")


def test_selection_suite_writes_its_file(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    monkeypatch.setattr(regret, "host_rows", lambda op, device, budget_s: [])
    tuned = {"model": "LLMMed small", "tune_s": 21.0, "cached_start_s": 0.15, "load_s": 0.5}
    monkeypatch.setattr(starts, "measured", lambda device: tuned)
    out = tmp_path / "selection.json"
    for _ in range(2):  # the second run replaces the first's rows
        regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05)
        file = results.read(out)
        assert file.rows.count(tuned) == 1
        times = [row for row in file.rows if row.get("measure") == "time"]
        assert len(times) == 2 * len(rms_norm.candidates)
        assert [row["regret"] for row in times if row["chosen"]] == [1.0, 1.0]
        assert file.summary["eager"]["cells"] == 2
        assert file.summary["tune_s"] == 21.0
    assert "[256,1000]" in worker.held[0]  # the contest is held at the bucket, times are the exact shape's


def test_selection_resumed_measures_the_host_once(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    cell = regret._tiny(rms_norm, "cpu")
    taken = [regret._row(cell, name, 1, 1, measure="host", us=5.0) for name in rms_norm.by_name]
    asked = []
    monkeypatch.setattr(regret, "host_rows", lambda *_: asked.append(1) or taken)
    monkeypatch.setattr(regret, "overhead_rows", lambda *_: [])
    out = tmp_path / "selection.json"
    for resume in (False, True):
        regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05, tuning=False, resume=resume)
    assert len(asked) == 1
    taken[0].source_hash = "of old"
    results.changed(out, results.environment("cpu"), lambda file: results.keep(file, taken))
    regret.run_selection([rms_norm], "cpu", out, text=ONE, budget_s=0.05, tuning=False, resume=True)
    assert len(asked) == 2


def test_selection_reads_decisions_where_the_case_is_its_bucket(
    worker: type[FakeWorker], rms_norm: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = staticmethod(lambda op, case, regime: made(op, case, {"eager": 2.0}, "eager", regime))
    monkeypatch.setattr(regret, "host_rows", lambda op, device, budget_s: [])
    own, rounded = ONE, "x=bf16[200,1000]"
    odd = rms_norm.cases()[5].replace(x=TensorMeta.dense((201, 1000), rms_norm.cases()[5].x.dtype))
    grid = [
        *cells(rms_norm, "cpu", own),
        Cell(exact(rms_norm), Case(odd.without_grad().args, "cpu", rounded), "forward"),
    ]
    for module in (contests, regret):
        monkeypatch.setattr(module, "cells", lambda op, device, text="", direction=None: grid)
    contests.run_ops([rms_norm], "cpu", tmp_path / "ops.json")
    worker.held.clear()
    out = tmp_path / "selection.json"
    regret.run_selection([rms_norm], "cpu", out, budget_s=0.05, tuning=False)
    assert worker.held == [key(rms_norm, grid[2].case, "eager")]
    assert "[224,1000]" in worker.held[0]
    assert results.read(out).summary["eager"]["cells"] == 3
    regret.run_selection([rms_norm], "cpu", out, budget_s=0.05, tuning=False, resume=True)
    assert len(worker.held) == 1


def test_a_candidate_that_fails_at_the_exact_case_says_so(
    rms_norm: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program that exists: nothing is compiled
    (cell, _) = cells(rms_norm, "cpu", ONE)
    verdict = made(rms_norm, cell.case, {"eager": 2.0, "compiled": 1.0}, "compiled")
    monkeypatch.setattr(
        regret, "work", lambda op, case, call, sets: call is rms_norm.incumbent.implementation
    )

    class Fussy:
        def sampler(self, calls: Any) -> Any:
            if not calls:
                raise RuntimeError("no such kernel\nmore")
            return lambda: 1e-6

    monkeypatch.setattr(regret, "timers_for", lambda case: {"eager": Fussy()})
    eager, compiled = regret.regret_rows(cell, results.rows_of_verdict(cell, verdict), 0.01)[:2]
    assert (compiled.us, compiled.regret, compiled.reason) == (None, None, "RuntimeError: no such kernel")
    assert (eager.regret, eager.chosen) == (1.0, False)


def test_tuning_times_leave_the_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    base = dict.fromkeys(("model", "mode", "batch", "seq", "params", "keys", "unsettled"), 1)
    answers = iter(
        [
            {**base, "measured": 3, "tune_s": 20.0, "step_s": 2.0, "first_s": 9.0},
            {**base, "measured": 0, "tune_s": 1.25, "step_s": 1.0, "first_s": 3.0},
        ]
    )
    folders = []

    def once(device: str, folder: str) -> dict[str, Any]:
        folders.append(folder)
        return next(answers)

    monkeypatch.setattr(starts, "_once", once)
    row = starts.measured("cpu")
    assert (row["tune_s"], row["cached_start_s"], row["step_us"], row["measured"]) == (
        18.0,
        0.25,
        1e6,
        [3, 0],
    )
    assert row["load_s"] == 2.0
    assert folders[0] == folders[1]
    assert not Path(folders[0]).exists()


def test_failing_start_says_why() -> None:
    with pytest.raises(ContestError, match=r"on banana failed: .*banana"):
        starts.measured("banana")
