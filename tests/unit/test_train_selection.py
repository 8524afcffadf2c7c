"""What a run keeps of its selection."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bakeoff.apps.train.config import Select
from bakeoff.apps.train.selection import choices, select_candidates
from bakeoff.select import Op, call
from bakeoff.select.choose import policy
from bakeoff.select.choose import table as tables
from bakeoff.select.choose.policy import using
from bakeoff.select.declare.key import key
from tests.unit import test_select_policy as toys
from tests.unit import zoo


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "cache"))
    policy.store.forget()
    policy.forget()
    made = zoo.op(toys.noting("one"), toys.noting("two"), incumbent=toys.noting("eager"), name="zoo_kept")
    with zoo.registered(made):
        yield made
    policy.store.forget()
    policy.forget()


def test_the_verdicts_a_run_uses_are_kept_with_it_and_can_be_pinned(op: Op, tmp_path: Path) -> None:
    def step() -> None:
        call(op, torch.ones(4, 8), torch.ones(8), None)

    toys.learn(op, "two", rows=4)
    toys.learn(op, "one", rows=5)  # no call of the step's
    found = select_candidates(step, Select(tune=False), tmp_path, announce=print)
    assert choices(found) == {"select/zoo_kept": "two"}
    assert set(tables.read(tmp_path / "table.json").rows) == {key(op, zoo.case(4, 8, grad=False), "eager")}
    policy.store.forget()  # another machine's cache, say
    toys.learn(op, "one", rows=4)
    toys.ran.clear()
    with using(f"pinned:{tmp_path / 'table.json'}"):
        step()
    assert toys.ran == ["two"]


def test_a_full_disk_costs_the_copy_and_not_the_run(
    op: Op, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toys.learn(op, "two", rows=4)
    (tmp_path / "file").write_text("")
    found = select_candidates(
        lambda: call(op, torch.ones(4, 8), torch.ones(8), None),
        Select(tune=False),
        tmp_path / "file",
        announce=print,
    )
    assert choices(found) == {"select/zoo_kept": "two"}
    assert "can't keep the verdict table" in caplog.text
