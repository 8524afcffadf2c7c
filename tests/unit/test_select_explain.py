"""Explain: the choice, why, each time, error, share of the limit and rejection, and the row's source."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import bakeoff
from bakeoff import hardware
from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select import Op
from bakeoff.select.choose import dispatch, policy
from bakeoff.select.choose.explain import explain, rows_of
from bakeoff.select.choose.policy import using
from bakeoff.select.contests.contest import contest
from tests.unit import test_select_policy as toys
from tests.unit import zoo
from tests.unit.verdicts import made, no_verdicts


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hardware, "ceilings", lambda device: hardware.Ceilings(100.0, 1.0, "float32"))
    with no_verdicts(tmp_path, monkeypatch):
        yield


@pytest.fixture
def op() -> Iterator[Op]:
    made = zoo.op(zoo.GOOD, zoo.WRONG["wrong_dw"][0], zoo.WRONG["absent"][0], name="zoo_explained")
    with zoo.registered(made):
        yield made


ARGS = (torch.ones(16, 8, requires_grad=True), torch.ones(8, requires_grad=True))


def test_without_a_verdict_it_gives_the_heuristic_and_each_reason(op: Op) -> None:
    found = explain(op, *ARGS)
    assert (found.op, found.choice, found.source) == ("zoo_explained", "eager", "no verdict for this key")
    assert found.why == "no verdict: heuristic"
    assert {r.candidate: r.why for r in found.rows} == {
        "eager": "not measured",
        "good": "not measured",
        "wrong_dw": "not measured",
        "absent": "no_such_package is not installed",
    }


def test_with_a_verdict_it_gives_everything(op: Op) -> None:
    verdicts = contest(op, zoo.case(16, 8), budget_s=0.01)
    policy.store.add(verdicts, "cpu")
    found = explain("zoo_explained", *ARGS)
    assert found.key == verdicts[0].key
    assert found.choice == verdicts[0].winner
    assert found.source == "measured now"
    rows = {r.candidate: r for r in found.rows}
    assert [name for name, r in rows.items() if r.chosen] == [found.choice]
    for name in ("eager", "good"):
        us = rows[name].us
        assert us is not None
        assert rows[name].share == pytest.approx(hardware.limit_us(2 * 16 * 8 * 4, 10 * 16 * 8, "cpu") / us)
        assert rows[name].error is not None
    assert rows["wrong_dw"].us is None
    assert rows["wrong_dw"].why.startswith("gradient of w is wrong")
    text = str(found)
    for part in (
        found.key,
        "choice:",
        "source: measured now",
        "of limit",
        "gradient of w is wrong",
        "not installed",
    ):
        assert part in text
    policy.store.fresh.clear()
    policy.store.loaded.clear()
    assert explain(op, *ARGS).source == "user cache"


def test_the_settings_in_force_count(op: Op) -> None:
    with using("off"):
        assert explain(op, *ARGS).why == "selection is off"
    with using(zoo_explained="good"):
        found = explain(op, *ARGS)
        assert (found.choice, found.why) == ("good", "forced by override")
    with using(zoo_explained="absent"), pytest.raises(Unsupported, match="not installed"):
        explain(op, *ARGS)
    with using("strict"), pytest.raises(PolicyError, match="no verdict"):
        explain(op, *ARGS)


@pytest.mark.parametrize(
    ("settings", "forced", "why"),
    [
        ({"zoo_explained": "good"}, "good", "forced by override"),
        ({"policy": "off"}, "eager", "forced by the policy off"),
        ({"policy": "heuristic"}, "eager", "forced by the policy heuristic"),
    ],
)
def test_what_is_forced_stands_among_the_times_of_the_contest(
    op: Op, settings: dict[str, str], forced: str, why: str
) -> None:
    (verdict,) = contest(op, zoo.case(16, 8), budget_s=0.01)
    policy.store.add([verdict], "cpu")
    free = {row.candidate: row for row in explain(op, *ARGS).rows}
    with using(**settings):
        found = explain(op, *ARGS)
    assert (found.choice, found.source, found.verdict) == (forced, "measured now", None)
    assert found.why.startswith(why)
    for row in found.rows:
        assert (row.us, row.error, row.chosen) == (
            free[row.candidate].us,
            free[row.candidate].error,
            row.candidate == forced,
        )
        assert row.why.startswith(why) == row.chosen
        assert row.why.endswith(free[row.candidate].why)


def test_a_forced_candidate_that_its_contest_refused_says_both(op: Op) -> None:
    policy.store.add(contest(op, zoo.case(16, 8), budget_s=0.01), "cpu")
    with using(zoo_explained="wrong_dw"):
        assert explain(op, *ARGS).why.startswith("forced by override; gradient of w is wrong")


def test_it_neither_runs_nor_tunes(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(*_: object) -> None:
        raise AssertionError("an explanation held a contest")

    monkeypatch.setattr(dispatch, "settle", must_not)
    toys.ran.clear()
    with using("tune"):
        assert explain(op, *ARGS).choice == "eager"
    assert explain(zoo.op(zoo.GOOD, incumbent=toys.noting("eager")), *ARGS).choice == "eager"
    assert toys.ran == []


def test_a_stale_row_and_a_busy_device_are_mentioned(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "disturbance", lambda device, before=0.0: "3 other process(es) use the GPU")
    with monkeypatch.context() as before:
        old = msgspec.structs.replace(hardware.facts("cpu"), torch="1.0")
        before.setattr(hardware, "facts", lambda device="cuda": old)
        policy.store.add(contest(op, zoo.case(16, 8), budget_s=0.01), "cpu")
    policy.store.forget()
    found = explain(op, *ARGS)
    assert found.why.endswith("from user cache (measured under other versions)")
    assert found.source == "user cache (measured under other versions)", "which the command line prints"
    assert "warning: 3 other process(es) use the GPU" in str(found)


def test_ops_go_by_name_function_or_declaration() -> None:
    x = torch.ones(2, 4)
    from bakeoff.ops import rms_norm

    for op in ("rms_norm", rms_norm):
        assert bakeoff.explain(op, x).op == "rms_norm"
    assert bakeoff.explain("rms_norm", x, eps=1e-5).key.count("eps=1e-05") == 1
    with pytest.raises(PolicyError, match="did you mean 'rms_norm'"):
        bakeoff.explain("rmsnorm", x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        bakeoff.explain("rms_norm")
    with pytest.raises(TypeError, match="takes an op's name, its public function or an Op, not 3"):
        bakeoff.explain(3, x)
    with pytest.raises(ValueError, match="must be on one device"):
        bakeoff.explain("rms_norm", x, torch.ones(4, device="meta"))
    with pytest.raises(TypeError, match=r"torch.nn.functional.rms_norm is not the op rms_norm"):
        bakeoff.explain(torch.nn.functional.rms_norm, x, (4,))


def test_a_call_is_explained_as_its_public_function_makes_it() -> None:
    ids, table, window = torch.zeros(1, 16, dtype=torch.uint8), torch.randn(256, 1), torch.ones(8)
    weight = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = bakeoff.explain(bakeoff.ops.byte_spectral, ids, table, window, weight=weight)
        report = bakeoff.tune(lambda: bakeoff.ops.byte_spectral(ids, table, window, weight=weight), 0)
    assert found.key in report.unsettled, "a weight in bfloat16"
    assert bakeoff.explain("rms_norm", torch.ones(2, 4), torch.ones(4), offset=1).key.count("offset=1.0") == 1


@pytest.mark.parametrize("name", ["memory_scan", "memory_update"])
def test_tuples_of_arguments_are_explained_as_the_call_takes_them(name: str) -> None:
    memory = (torch.zeros(2, 6, 4), torch.zeros(2, 6), torch.zeros(2, 4, 6), torch.zeros(2, 4))
    gates = [torch.zeros((2, 8) if name == "memory_scan" else (2,))] * 3
    inputs = [torch.ones(2, 8, 4)] * (3 if name == "memory_scan" else 2)
    flat = bakeoff.explain(name, *inputs, *memory, *memory, *gates)
    for op in (name, getattr(bakeoff.ops, name)):
        assert bakeoff.explain(op, *inputs, memory, memory, *gates).key == flat.key


def test_a_forced_implementation_is_explained(op: Op) -> None:
    with pytest.raises(Unsupported, match="'triton' can't take this case"):
        bakeoff.explain("rms_norm", torch.ones(2, 4), impl="triton")
    found = bakeoff.explain("rms_norm", torch.ones(2, 4), impl="eager")
    assert (found.choice, found.why) == ("eager", "forced by override")
    assert explain(op, *ARGS, impl="good").choice == "good"


def test_a_verdict_of_a_gpu_that_is_not_here_has_no_share(op: Op) -> None:
    (verdict,) = contest(op, zoo.case(16, 8), budget_s=0.01)
    if not torch.cuda.is_available():
        assert all(r.share is None for r in rows_of(verdict, "cuda:0", "eager"))
    assert any(r.share for r in rows_of(verdict, "cpu", "eager"))


def test_lists_of_tensors_are_explained_too() -> None:
    found = explain("global_norm", [torch.ones(2), torch.ones(3)])
    assert found.key == "global_norm(grads=fp32[2 tensors, 5]) cpu eager"
    assert found.choice == "eager"
    ones = [torch.ones(2)]
    assert "exp_avg=fp32[1 tensors, 2]" in explain("adamw_", ones, ones, ones, ones, [torch.zeros(())]).key


def test_what_is_out_has_no_time_though_it_was_timed(op: Op) -> None:
    """For the record, or because it was wrong after it had been timed."""
    verdict = made(op, zoo.case(16, 8), {"eager": 9.0, "good": 1.0}, "eager")
    trials = tuple(
        msgspec.structs.replace(trial, rejected="after good had been timed: output is wrong")
        if trial.candidate == "good"
        else trial
        for trial in verdict.trials
    )
    rows = {
        row.candidate: row for row in rows_of(msgspec.structs.replace(verdict, trials=trials), "cpu", "eager")
    }
    assert (rows["eager"].us, rows["good"].us, rows["good"].share) == (9.0, None, None)
