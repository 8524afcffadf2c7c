"""The sentinel: a candidate that goes wrong in a run is seen, retired, and leaves a file that repeats it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bakeoff.errors import BakeoffError
from bakeoff.select import Candidate, Op, call, replay, sentinel
from bakeoff.select.choose import policy
from bakeoff.select.choose.policy import using
from bakeoff.select.choose.sentinel import _quarantine
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.verdicts import made, no_verdicts


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """Its candidate is right until `wrong` is set."""
    wrong.clear()
    _quarantine.clear()
    hook = zoo.product(lambda x, w, y: y * 1.01 if wrong else None)
    op = zoo.op(Candidate("fast", hook), name="zoo_watched")
    with no_verdicts(tmp_path, monkeypatch), zoo.registered(op):
        policy.store.add([made(op, zoo.case(), {"eager": 2.0, "fast": 1.0}, "fast")], "cpu")
        yield op
    _quarantine.clear()


wrong: list[bool] = []


def arguments() -> tuple[torch.Tensor, torch.Tensor, None]:
    torch.manual_seed(0)
    return torch.randn(32, 48, requires_grad=True), torch.randn(48, requires_grad=True), None


def test_a_right_candidate_goes_on(op: Op) -> None:
    with sentinel(every=2) as guard:
        for _ in range(4):
            guard.step()
            call(op, *arguments())
    (place, count), *_ = guard.checked.items()
    assert place.endswith("eager: fast")
    assert count == 2
    assert not guard.failed


def test_a_wrong_one_is_retired_and_can_be_replayed(op: Op, caplog: pytest.LogCaptureFixture) -> None:
    x, w, flag = arguments()
    with sentinel(every=1) as guard, caplog.at_level(logging.ERROR, "bakeoff"):
        guard.step()
        call(op, x, w, flag)
        wrong.append(True)
        for _ in range(3):
            guard.step()
            torch.testing.assert_close(call(op, x, w, flag), zoo.eager(x, w))
    assert len(guard.failed) == 1
    assert len([r for r in caplog.records if "went wrong in this run" in r.message]) == 1
    (file,) = guard.failed.values()
    assert "output is wrong" in str(replay(file))
    wrong.clear()
    assert replay(file) is None
    found = policy.store.lookup(op, key(op, zoo.case(), "eager"), "cpu")
    assert found is not None
    assert found.verdict.winner == "eager"
    assert "wrong in a run" in str(found.verdict.trials[1].rejected)


def test_off_by_default_and_each_kind_of_call_has_its_turn(op: Op) -> None:
    call(op, *arguments())
    x, w, _ = arguments()
    with using(policy="table"), sentinel(every=1) as guard:
        for _ in range(4):
            guard.step()
            for rows in (x, x[:3]):
                call(op, rows.detach(), w.detach(), None)
                call(op, rows, w, None)
    assert sum(guard.checked.values()) <= 4
    assert not guard.failed
    with pytest.raises(ValueError, match="number of steps"), sentinel(every=0):
        pass


@pytest.mark.parametrize("held", [b"", b"no file of torch's", {"a": 1}, [1]])
def test_a_file_of_something_else_is_not_replayed(tmp_path: Path, held: object) -> None:
    file = tmp_path / "other.pt"
    if isinstance(held, bytes):
        file.write_bytes(held)
    else:
        torch.save(held, file)
    with pytest.raises(BakeoffError, match=r"other\.pt can't be replayed: give a file that sentinel wrote"):
        replay(file)
