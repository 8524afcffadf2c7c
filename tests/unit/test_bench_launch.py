"""Suite "launch": the host's time of a call at each length."""

import itertools
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bakeoff.apps.bench import launch
from bakeoff.apps.bench.results import ResultsError
from bakeoff.apps.bench.suites import Cell
from bakeoff.apps.cli import main
from bakeoff.select import find_op


def test_cases_of_a_length() -> None:
    """One row, so many positions, and what belongs to them."""
    case = launch.at_length(find_op("rotary"), 512, "cpu")
    assert case is not None
    assert [case.q.shape[:2], case.k.shape[:2], case.cos.shape[0], case.sin.shape[0]] == [(1, 512)] * 2 + [
        512
    ] * 2
    assert case.name == "T=512"
    case = launch.at_length(find_op("dilated_attention"), 256, "cpu")  # whose v is declared to be as k
    assert case is not None
    assert {meta.shape[:2] for meta in case.tensors.values()} == {(1, 256)}
    case = launch.at_length(find_op("attention"), 256, "cpu")  # as many keys as queries
    assert case is not None
    assert case.needs_grad
    assert {meta.shape[:2] for meta in case.tensors.values()} == {(1, 256)}
    assert launch.at_length(find_op("rms_norm"), 512, "cpu") is None  # has rows, but no positions
    assert launch.at_length(find_op("adamw_"), 512, "cpu") is None


def test_the_hosts_time_is_that_until_calls_return() -> None:
    """By a clock that moves 3 us a call: the device is waited for outside of what is timed."""
    now = itertools.count(0.0, 24e-6)
    timing = launch.host_timing([lambda: None], "cpu", 1e-3, clock=lambda: next(now))
    assert timing.us == pytest.approx(3.0)
    assert timing.samples >= 7


def test_a_slow_candidate_is_called_a_few_times_alone() -> None:
    """Bursts of a Python loop that takes a second a call would take a minute at every length."""
    now, calls = itertools.count(0.0, 1.0), []
    timing = launch.host_timing([lambda: calls.append(1)], "cpu", 1e-3, clock=lambda: next(now))
    assert timing.us == pytest.approx(1e6)
    assert timing.samples == 3
    assert len(calls) == 7  # three before, one that tells how slow it is, three that are timed


def test_every_candidate_has_a_row_and_resume_measures_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, out, heard = find_op("short_conv"), tmp_path / "launch.json", []
    # nothing is compiled for a time that nobody looks at
    monkeypatch.setitem(op.by_name["compiled"].__dict__, "implementation", op.incumbent.implementation)

    def run() -> None:
        launch.run_launch(
            [op], "cpu", out, lengths=(4,), budget_s=0.001, resume=True,
            hear=lambda cell, rows: heard.append((cell.case.name, cell.direction)),
        )  # fmt: skip

    run()
    assert heard == [("T=4", "forward"), ("T=4", "both")]
    rows = json.loads(out.read_text())["rows"]
    assert {row["candidate"] for row in rows} == {*op.by_name}
    assert all(row["us"] or row["reason"] for row in rows)
    assert {(row["length"], row["measure"], row["regime"]) for row in rows} == {(4, "host", "eager")}
    run()
    assert len(heard) == 2


def test_every_candidate_is_called_side_by_side_before_any_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads here; and one that is broken stops none."""
    op, stages = find_op("rotary"), []
    called: list[bool] = []

    def broken(*_: object) -> torch.Tensor:
        called.append(not any("T=4" in stage for stage in stages))
        raise RuntimeError("out of luck")

    monkeypatch.setitem(op.by_name["compiled"].__dict__, "implementation", broken)
    monkeypatch.setattr(launch, "ProcessPoolExecutor", lambda jobs, _, **__: ThreadPoolExecutor(jobs))
    launch.run_launch(
        [op], "cpu", tmp_path / "launch.json", lengths=(4,), budget_s=0.001, jobs=2, announce=stages.append
    )
    assert stages == [
        "rotary: compiled 1 of 2",
        "rotary: compiled 2 of 2",
        "rotary T=4, forward",
        "rotary T=4, both",
    ]
    assert called == [True, True, False, False]


def test_an_interrupt_ends_the_processes_that_compile() -> None:
    op = find_op("dilated_attention")  # which has nothing to compile on a CPU
    case = launch.at_length(op, 4, "cpu")
    assert case is not None
    heard = []

    def interrupted(stage: str) -> None:
        heard.append(stage)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch._compile([Cell(op, case.without_grad(), "forward")] * 50, 1, interrupted)
    assert heard == ["dilated_attention: compiled 1 of 50"]
    assert not multiprocessing.active_children()


def test_ops_without_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="ops with positions"):
        launch.run_launch([find_op("swiglu")], "cpu", tmp_path / "launch.json")


def test_other_options_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["bench", "--suite", "launch", "rotary", "--filter", "bf16", "--device", "cpu"]
    )
    assert done.exit_code != 0
    assert "leave --filter and --regimes out" in done.output


def test_a_candidate_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    op = find_op("rotary")
    case = launch.at_length(op, 4, "cpu")
    assert case is not None

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(op.by_name["compiled"].__dict__, "implementation", broken)
    rows = launch.measured(Cell(op, case.without_grad(), "forward"), 4, 0.001)
    found = {row.candidate: row for row in rows}
    assert found["compiled"].reason == "RuntimeError: out of luck"
    assert found["compiled"].us is None
    assert found["eager"].us
