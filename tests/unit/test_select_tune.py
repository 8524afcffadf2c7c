"""Tuning: one real step, the exact keys it used, their contests within the budget, the table in force."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import bakeoff
from bakeoff.errors import ContestError, PolicyError
from bakeoff.select import Candidate, Op, call
from bakeoff.select.choose import policy
from bakeoff.select.choose.policy import using
from bakeoff.select.choose.table import Table, read, write
from bakeoff.select.choose.tune import TuneReport, recordings, tune
from bakeoff.select.contests.side_by_side import Outcome, Wanted
from bakeoff.select.declare.key import key
from tests.unit import test_select_policy as toys
from tests.unit import zoo
from tests.unit.verdicts import no_verdicts

pytestmark = pytest.mark.usefixtures("forked_workers")

module = __import__("sys").modules["bakeoff.select.choose.tune"]


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_failed", set())
    torch.compiler.reset()
    with no_verdicts(tmp_path, monkeypatch):
        yield
    torch.compiler.reset()


@pytest.fixture
def op() -> Iterator[Op]:
    made = zoo.op(toys.noting("one"), toys.noting("two"), incumbent=toys.noting("eager"), name="zoo_tuned")
    toys.ran.clear()
    with zoo.registered(made):
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contests that "two" wins without being run; the keys they were held for."""
    keys: list[str] = []

    def hold(wanted: list[Wanted], workers: object) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for op, case, regimes, *_ in wanted:
            keys.extend(key(op, case, regime) for regime in regimes)
            made = [toys.verdict(op, "two", rows=case.x.shape[0], regime=regime) for regime in regimes]
            policy.store.add(made, case.device)
            outcomes.append(made)
        return outcomes

    monkeypatch.setattr(module, "_hold", hold)
    return keys


def run(op: Op, rows: int = 4) -> None:
    call(op, torch.ones(rows, 8), torch.ones(8), None)


def test_a_contest_that_would_end_well_beyond_the_budget_is_not_begun(
    op: Op, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    hold = module._hold

    def slowly(*args: Any) -> list[Outcome]:
        nonlocal now
        now += 10.0
        return hold(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "_hold", slowly)
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    report = tune(lambda: [run(op, rows) for rows in (4, 5, 6, 7)], 25.0)
    assert (report.measured, report.seconds) == (2, 20.0)
    assert list(report.unsettled.values()) == ["the budget of 25 s was spent"] * 2


@pytest.mark.parametrize("regimes", [("bogus",), ("eager", "bogus"), "eager"])
def test_an_unknown_regime_is_an_error_before_the_step(op: Op, held: list[str], regimes: Any) -> None:
    with pytest.raises(PolicyError, match=r"must be some of \('eager', 'graph', 'compiled'\)"):
        tune(lambda: run(op), regimes=regimes)
    assert toys.ran == held == []


def test_regimes_may_come_from_an_iterator(op: Op, held: list[str]) -> None:
    assert len(tune(lambda: run(op), regimes=iter(["eager"])).verdicts) == len(held) == 1  # type: ignore[arg-type]


def test_a_step_that_was_called_already_is_named() -> None:
    with pytest.raises(TypeError, match="step is None: pass the function itself"):
        tune(None)  # type: ignore[arg-type]


def test_it_settles_the_keys_of_one_step_and_puts_them_in_force(op: Op, held: list[str]) -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        for rows in (4, 5, 4):
            run(op, rows)

    report = tune(step, 30.0)
    wanted = [key(op, zoo.case(rows, 8, grad=False), "eager") for rows in (4, 5)]
    assert steps == [1]
    assert held == wanted
    assert report.choices == dict.fromkeys(wanted, "two")
    assert (report.measured, report.unsettled) == (2, {})
    toys.ran.clear()
    run(op, 5)
    assert toys.ran == ["two"]
    assert sorted(json.loads(policy.store.path("cpu").read_text())["rows"]) == sorted(wanted)


def test_known_keys_are_not_measured_again_unless_forced_or_stale(op: Op, held: list[str]) -> None:
    tune(lambda: run(op), 30.0)
    again = tune(lambda: run(op), 30.0)
    assert (again.measured, len(again.verdicts), len(held)) == (0, 1, 1)
    assert tune(lambda: run(op), 30.0, force=True).measured == 1
    policy.store.forget()
    path = policy.store.path("cpu")
    path.write_text(path.read_text().replace(f'"{torch.__version__}"', '"1.0"'))
    assert tune(lambda: run(op), 30.0).measured == 1, "measured under another torch"


def test_the_budget_leaves_the_rest_unsettled_and_says_so(op: Op, held: list[str]) -> None:
    report = tune(lambda: run(op), 0.0)
    assert held == []
    assert report.verdicts == ()
    assert report.unsettled == {key(op, zoo.case(4, 8, grad=False), "eager"): "the budget of 0 s was spent"}


@pytest.mark.parametrize("budget", [math.nan, -1.0, "3", None])
def test_a_budget_is_a_number_of_seconds(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"budget_s=.* must be a number of seconds"):
        tune(lambda: pytest.fail("the step ran"), budget)


def test_what_only_a_gpu_has_is_the_devices_regime_elsewhere(op: Op, held: list[str]) -> None:
    report = tune(lambda: run(op), regimes=("graph", "eager"))
    assert [name.rpartition(" ")[2] for name in held] == ["eager"]
    assert report.unsettled == {}


def test_what_can_take_part_by_now_reopens_the_contest() -> None:
    missing: list[str] = ["a compiler is missing"]
    late = Candidate("late", zoo.good, supports=lambda case: missing[0] if missing else None)
    script = zoo.op(late, name="zoo_late")

    def step() -> None:
        call(script, torch.ones(4, 8), torch.ones(8), None)

    with zoo.registered(script):
        (before,) = tune(step).verdicts
        assert [t.rejected for t in before.trials] == [None, "a compiler is missing"]
        assert tune(step).measured == 0
        missing.clear()
        again = tune(step)
        assert again.measured == 1
        assert [t.rejected for t in again.verdicts[0].trials] == [None, None]
        assert tune(step).measured == 0


def test_recordings_that_overlap_miss_nothing(op: Op, held: list[str]) -> None:
    """One begins inside the other, in another thread, and outlives it."""
    inside, outlived = threading.Event(), threading.Event()
    reports: list[TuneReport] = []

    def short() -> None:
        inside.set()
        outlived.wait(60)

    first = threading.Thread(target=lambda: reports.append(tune(short)))

    def long() -> None:
        first.start()
        inside.wait(60)
        run(op, rows=4)
        outlived.set()
        first.join(60)
        run(op, rows=5)

    report = tune(long)
    assert {key.partition("[")[2][0] for key in report.choices} == {"4", "5"}
    assert recordings == []


def test_after_ranks_agreed_no_rank_tunes_alone(
    op: Op, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.store, "agreed", {})
    with monkeypatch.context() as job:
        job.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(PolicyError, match="tune_together"):
            tune(lambda: run(op))
    assert tune(lambda: run(op)).measured == 1, "that job is over"
    assert policy.store.agreed is None


def test_a_long_step_does_not_eat_the_budget(
    op: Op, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def step() -> None:
        run(op)
        now[0] += 1000

    report = tune(step, 1.0)
    assert (report.measured, report.seconds) == (1, 1000)


def test_twice_the_budget_ends_the_contests_in_hand(
    op: Op, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those behind them are not begun."""
    begun: list[int] = []

    def hold(wanted: list[Wanted], workers: module.Workers) -> list[Outcome]:
        begun.append(wanted[0].case.x.shape[0])
        limit = time.monotonic() + 60
        while not workers.workers[0].ended and time.monotonic() < limit:
            time.sleep(0.001)
        return [ContestError(workers.workers[0].ended)]

    monkeypatch.setattr(module, "_hold", hold)
    report = tune(lambda: (run(op, 4), run(op, 5)), 0.2)
    assert begun == [4]
    assert set(report.unsettled.values()) == {
        "twice the budget of 0.2 s was spent",
        "the budget of 0.2 s was spent",
    }
    assert 0.4 <= report.seconds < 30


def test_a_contest_that_fails_is_listed_and_the_next_is_held(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(wanted: list[Wanted], workers: object) -> list[Outcome]:
        (one,) = wanted
        if one.case.x.shape[0] == 4:
            return [ContestError("the incumbent fails")]
        return [[toys.verdict(op, "two", rows=5)]]

    monkeypatch.setattr(module, "_hold", hold)
    report = tune(lambda: (run(op, 4), run(op, 5)), 30.0)
    assert report.unsettled == {key(op, zoo.case(4, 8, grad=False), "eager"): "the incumbent fails"}
    assert report.measured == 1


def test_ctrl_c_leaves_the_table_whole_and_the_process_usable(op: Op, held: list[str]) -> None:
    seen: list[str] = []

    def announce(text: str) -> None:
        seen.append(text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(lambda: (run(op, 4), run(op, 5)), 30.0, announce=announce)
    assert len(json.loads(policy.store.path("cpu").read_text())["rows"]) == 1
    assert recordings == []


def test_a_step_that_raises_ends_the_recording(op: Op) -> None:
    with pytest.raises(ZeroDivisionError):
        tune(lambda: 1 / 0, 1.0)
    assert recordings == []
    run(op)
    assert len(policy.memo(policy.current())) == 1


@pytest.mark.parametrize("name", ["tune", "strict"])
def test_policies_that_mind_a_miss_wait_until_the_step_is_over(op: Op, held: list[str], name: str) -> None:
    with using(name):
        report = tune(lambda: run(op), 30.0)
        assert report.measured == 1
        toys.ran.clear()
        run(op)
        assert toys.ran == ["two"]


def test_compiled_regions_are_settled_and_compiled_anew(op: Op, held: list[str]) -> None:
    from tests.unit.test_select_dispatch import one, two, who

    added = zoo.op(
        zoo.Candidate("one", one),
        zoo.Candidate("two", two),
        name="zoo_added",
        heuristic=lambda case, regime: "one",
    )
    x, w = torch.randn(4, 8), torch.randn(8)
    with zoo.registered(added):
        run = torch.compile(lambda x, w: call(added, x, w, None), fullgraph=True, backend="aot_eager")
        report = tune(lambda: run(x, w), 30.0)
        assert list(report.choices) == held == ["zoo_added(x=fp32[*,8], w=fp32[8]) cpu compiled"]
        assert who(run(x, w), x, w) == "two"


def test_the_tune_policy_gives_a_failing_contest_one_try(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def hold(*_: Any) -> list[Outcome]:
        tries.append(1)
        return [ContestError("no")]

    monkeypatch.setattr(module, "_hold", hold)
    with using("tune"):
        for rows in (1025, 1026, 1027):  # one key, three fingerprints
            run(op, rows)
    assert len(tries) == 1


def test_a_real_contest_of_an_importable_op_and_of_one_from_a_script() -> None:
    """No fakes: an op known to this process alone is held here, any other in a worker."""
    script = zoo.op(zoo.GOOD, zoo.WRONG["wrong_dw"][0], name="zoo_script")
    x, w = torch.randn(16, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def step() -> None:
        (call(script, x, w, None) + call(zoo.CALM, x, w, None)).sum().backward()

    with zoo.registered(script, zoo.CALM):
        heard: list[str] = []
        report = bakeoff.tune(step, 30.0, announce=heard.append)
    assert {v.op for v in report.verdicts} == {"zoo_script", "zoo_calm"}
    assert report.unsettled == {}
    assert set(report.choices.values()) <= {"eager", "good"}
    assert "good: compile and verify" in heard
    assert all(v.key.endswith("cpu eager") and "'" in v.key for v in report.verdicts)


def test_contests_of_one_step_are_held_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only this process knows is held alone, at the end. A round shares what is left of the budget."""
    script = zoo.op(zoo.GOOD, name="zoo_script")
    rounds: list[list[str]] = []
    shares: list[float] = []

    def hold(wanted: list[Wanted], workers: object) -> list[Outcome]:
        rounds.append([f"{one.op.name} {one.case.x.shape[0]}" for one in wanted])
        shares.extend(one.budget_s for one in wanted)
        return [ContestError("not now") for _ in wanted]

    def step() -> None:
        for op, rows in ((zoo.CALM, 3), (zoo.CALM, 4), (script, 6), (zoo.CALM, 5)):
            run(op, rows)

    monkeypatch.setattr(module, "_hold", hold)
    monkeypatch.setattr(module, "_PER_KEY_S", 1.5)
    with zoo.registered(script, zoo.CALM):
        report = tune(step, 30.0, jobs=2)
        assert rounds == [["zoo_calm 3", "zoo_calm 4"], ["zoo_calm 5"], ["zoo_script 6"]]
        assert len(report.unsettled) == 4
        assert set(shares) == {1.5}
        shares.clear()
        tune(step, 1.0, jobs=3)
    assert all(share <= 1.0 / 3 for share in shares[:3])


def test_what_was_measured_before_an_interrupt_is_kept() -> None:
    def announce(stage: str) -> None:
        if stage.endswith("measure (eager)"):
            seen.append(stage)
            if len(seen) == 4:
                os.kill(os.getpid(), signal.SIGINT)

    seen: list[str] = []
    with zoo.registered(zoo.CALM), pytest.raises(KeyboardInterrupt):
        tune(lambda: [run(zoo.CALM, rows) for rows in (3, 4, 5)], 100.0, jobs=3, announce=announce)
    assert 1 <= len(json.loads(policy.store.path("cpu").read_text())["rows"]) < 3


@pytest.mark.parametrize("jobs", [2.5, "2", None, -1, math.nan])
def test_jobs_are_a_number_of_contests(jobs: Any) -> None:
    with pytest.raises(ValueError, match=r"jobs=.* must be a number of contests"):
        tune(lambda: pytest.fail("the step ran"), jobs=jobs)


@pytest.mark.parametrize(("budget", "limit"), [(1.0, 60), (45.0, 90), (math.inf, 120)])
def test_what_compiles_for_long_is_waited_for_as_the_budget_allows(
    monkeypatch: pytest.MonkeyPatch, budget: float, limit: float
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(module.Workers, "start", lambda self: seen.append(self.workers[0].stage_limit_s))
    tune(lambda: None, budget)
    assert seen == [limit]


def test_third_parties_compete_only_when_asked_for() -> None:
    made = zoo.with_candidates(zoo.CALM, zoo.GOOD, Candidate("peer", zoo.good, requires=("click",)))
    x, w = torch.randn(16, 8), torch.randn(8)

    def peer(**options: Any) -> tuple[int, str | None]:
        report = tune(lambda: call(made, x, w, None), 20.0, **options)
        (verdict,) = report.verdicts
        return report.measured, next(t.rejected for t in verdict.trials if t.candidate == "peer")

    with zoo.registered(made):
        measured, reason = peer()
        assert measured == 1
        assert reason is not None
        assert "peers=True" in reason
        assert peer()[0] == 0, "what left peers out is an answer for whoever does not ask for them"
        assert peer(peers=True) == (1, None)
        assert peer(peers=True) == (0, None)
        assert peer() == (0, None), "a verdict with peers serves everybody"


def test_the_worker_loads_beside_the_first_step_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(module.Workers, "start", lambda self: started.append(f"{self.jobs} workers"))
    tune(lambda: started.append("step"), 1.0, jobs=3)
    assert started == ["3 workers", "step"]
    started.clear()
    policy.store.path("cpu").parent.mkdir(parents=True, exist_ok=True)
    policy.store.path("cpu").write_text("{}")
    tune(lambda: started.append("step"), 1.0)
    assert started == ["step"]


def test_what_other_versions_measured_is_measured_again(op: Op, held: list[str]) -> None:
    """Their table, left where it is, serves calls; to tune is to measure under the versions here."""
    tune(lambda: run(op))
    mine = policy.store.path("cpu")
    table = read(mine)
    older = msgspec.structs.replace(table.facts, torch="1.0")
    write(policy.store.path("cpu", older), Table(older, table.rows))
    mine.unlink()
    policy.store.forget()
    policy.forget()
    assert toys.who_runs(op) == "two", "in force meanwhile"
    assert tune(lambda: run(op)).measured == 1
