"""What calls missed is written down and settled; what must be batch invariant is; locks and jobs end."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bakeoff import hardware
from bakeoff.errors import PolicyError
from bakeoff.select import Candidate, Case, Op, call, explain, tune, tune_missed
from bakeoff.select.choose import missed, policy, table
from bakeoff.select.choose.policy import using
from bakeoff.select.choose.require import family
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.side_by_side import most_jobs
from bakeoff.select.contests.wire import encode_dtype
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.verdicts import made, no_verdicts


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    op = zoo.op(Candidate("one", zoo.good), Candidate("two", zoo.good), name="zoo_missed")
    monkeypatch.setattr(missed, "_kept", set())
    with no_verdicts(tmp_path, monkeypatch), zoo.registered(op):
        yield op


def run(op: Op, rows: int) -> None:
    call(op, torch.randn(rows, 48), torch.randn(48), None)


def test_misses_are_kept_once_and_settled(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (16, 16, 15, 32):
        run(op, rows)
    with using("heuristic"):
        run(op, 64)
    assert [case.x.shape[0] for _, case, _ in missed.misses().values()] == [16, 32]
    lines = missed._path().read_bytes()
    assert lines.count(b"\n") == 2, "15 rows have the key of 16"
    missed._path().write_bytes(b'garbage\n{"op": "gone", "case": {}}\n' + lines)
    report = tune_missed(20.0, jobs=1)
    assert report.measured == 2
    assert not missed.misses()
    assert missed._path().read_bytes() == b""
    assert tune_missed(1.0, jobs=1).measured == 0


def test_a_folder_that_cannot_be_written_is_no_error(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAKEOFF_CACHE", "/dev/null/nowhere")
    run(op, 16)
    assert not missed.misses()


def test_a_call_that_is_only_explained_was_not_missed(op: Op) -> None:
    explain(op, torch.randn(16, 48), torch.randn(48), None)
    assert not missed.misses()
    run(op, 16)
    assert len(missed.misses()) == 1


def test_what_other_machines_missed_stays_for_them(op: Op) -> None:
    run(op, 16)
    (case,) = (case for _, case, _ in missed.misses().values())
    elsewhere = missed.Miss(op.name, Case(case.args, "cuda:97"), "graph")
    line = msgspec.json.encode(elsewhere, enc_hook=encode_dtype) + b"\n"
    missed._path().write_bytes(missed._path().read_bytes() + line)
    assert [case.device for _, case, _ in missed.misses().values()] == ["cpu"]
    assert tune_missed(20.0, jobs=1).measured == 1
    assert missed._path().read_bytes() == line


def test_a_pipe_in_the_place_of_the_list_stops_nothing(op: Op) -> None:
    missed._path().parent.mkdir(parents=True)
    os.mkfifo(missed._path())
    run(op, 16)
    assert not missed.misses()


def test_tensors_without_data_are_not_missed(op: Op) -> None:
    x, w = torch.randn(16, 48, device="meta"), torch.randn(48, device="meta")
    report = tune(lambda: call(op, x, w, None), 20.0, jobs=1)
    assert report.unsettled == {}
    assert call(op, x, w, None).shape == x.shape
    assert not missed._path().exists()
    with using("strict"):
        assert call(op, x, w, None).shape == x.shape


# ------------------------------------------------------------------------------- batch invariance
def by_rows(x: torch.Tensor, w: torch.Tensor, flag: Any = None) -> torch.Tensor:
    """Its sums depend on how many rows there are, in the last bit."""
    y: torch.Tensor = zoo.good(x, w)
    return torch.nextafter(y, torch.full_like(y, 9.0)) if len(x) > 20 else y


def test_batch_invariance_is_seen() -> None:
    op = zoo.op(Candidate("by_rows", by_rows), zoo.GOOD)
    (verdict,) = contest(op, zoo.case(grad=False), budget_s=0.01)
    assert {t.candidate: t.batch_invariant for t in verdict.trials if not t.rejected} == {
        "eager": True,
        "by_rows": False,
        "good": True,
    }


def test_a_family_is_all_that_must_agree() -> None:
    op = zoo.op(name="zoo_family")
    names = {
        family(op, key(op, zoo.case(rows, dtype=torch.bfloat16, grad=grad), regime))
        for rows in (1, 4096)
        for grad in (True, False)
        for regime in ("eager", "graph")
    }
    assert names == {"zoo_family(x=bf16[*,48], w=bf16[48]) cpu"}
    assert family(op, key(op, zoo.case(features=64), "eager")) not in names


def test_one_invariant_candidate_runs_for_all_numbers_of_rows(op: Op) -> None:
    def row(rows: int, one: float, two: float, invariant: tuple[str, ...]) -> Any:
        verdict = made(op, zoo.case(rows, grad=False), {"eager": 9.0, "one": one, "two": two}, "one")
        verdict = msgspec.structs.replace(verdict, winner="one" if one < two else "two")
        trials = [
            msgspec.structs.replace(t, batch_invariant=t.candidate in invariant) for t in verdict.trials
        ]
        return msgspec.structs.replace(verdict, trials=tuple(trials))

    ran: list[str] = []

    def spied(name: str) -> Candidate:
        def run(*args: Any) -> Any:
            ran.append(name)
            return zoo.good(*args)

        return Candidate(name, run)

    op = zoo.with_candidates(op, spied("one"), spied("two"))
    with zoo.registered(op):
        with using(require="batch_invariant"), pytest.raises(PolicyError, match=r"run bakeoff\.tune"):
            run(op, 16)
        policy.store.add([row(16, 1.0, 2.0, ("one", "two")), row(512, 8.0, 1.0, ("one", "two"))], "cpu")
        for required, expected in (("", ["one", "two"]), ("batch_invariant", ["two", "two"])):
            ran.clear()
            with using(require=required):
                run(op, 16)
                run(op, 512)
                found = explain(op, torch.randn(16, 48), torch.randn(48), None)
            assert ran == expected
            assert found.choice == expected[0]
            assert {row.candidate: row.us for row in found.rows} == {"eager": 9.0, "one": 1.0, "two": 2.0}
        policy.store.add([row(16, 1.0, 2.0, ("one",)), row(512, 8.0, 1.0, ("two",))], "cpu")
        policy.forget()
        with using(require="batch_invariant"), pytest.raises(PolicyError, match="no candidate was seen"):
            run(op, 16)
    with pytest.raises(PolicyError, match="nothing is known of 'speed'"), using(require="speed"):
        pass
    with pytest.raises(PolicyError, match="chooses whatever"), using("off", require="batch_invariant"):
        pass


# ---------------------------------------------------------------------------------- limits, stamps
def test_a_lock_that_is_never_released_costs_seconds(
    op: Op, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table, "_LOCK_S", 0.1)
    path = policy.store.path("cpu")
    path.parent.mkdir(parents=True)
    with open(path.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        verdict = made(op, zoo.case(), {"eager": 1.0}, "eager")
        monkeypatch.setattr(policy.store, "silent", False)
        policy.store.add([verdict], "cpu")
    assert "another process has held" in caplog.text
    assert policy.store.lookup(op, verdict.key, "cpu") is not None, "it holds for this run"
    assert not path.exists()


def test_jobs_have_a_limit() -> None:
    with pytest.raises(ValueError, match=f"at most {most_jobs()}"):
        tune(lambda: pytest.fail("the step ran"), jobs=most_jobs() + 1)


def test_operators_that_pytorch_overrides_are_part_of_the_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dsl:
        enabled, version = True, "4.1"

    class Native:
        available_dsls = ("cutedsl",)
        cutedsl = Dsl()

        def get_dsl_operations(self, name: str) -> list[str]:
            return ["topk", "_fused_rms_norm"]

        def is_operation_disabled(self, name: str) -> bool:
            return name == "topk"

    before = hardware.facts("cpu")
    monkeypatch.setattr(torch.backends, "python_native", Native(), raising=False)
    after = hardware.facts("cpu")
    assert after.overrides == "cutedsl 4.1: _fused_rms_norm"
    assert after.same_software != before.same_software
    assert table._file_name(after) != table._file_name(before)
    assert len(table._file_name(after)) < 200
    monkeypatch.setattr(Dsl, "enabled", False)
    assert hardware.facts("cpu") == before
