"""Bad candidates of every kind that verification is for: each is rejected, and its reason says why."""

import functools
import re
from collections.abc import Callable

import pytest
import torch

from bakeoff.select import Candidate, Case, Verdict
from bakeoff.select.contests.contest import contest
from tests.unit import bad_candidates as bad
from tests.unit import zoo

Table = dict[str, tuple[Callable[..., object], str]]


def held(table: Table, case: Case) -> Verdict:
    """One contest of all of them beside a good one."""
    candidates = (Candidate(name, call) for name, (call, _) in table.items())
    (verdict,) = contest(zoo.op(*candidates, zoo.GOOD), case, budget_s=0.01)
    return verdict


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {
        "gradients": held(bad.WITH_GRADIENTS, bad.case()),
        "forward": held(bad.FORWARD_ONLY, bad.case(grad=False)),
        "strided": held(bad.STRIDED, bad.case(strided=True)),
    }


@pytest.mark.parametrize(
    ("contest", "name", "reason"),
    [
        (contest, name, reason)
        for contest, table in (
            ("gradients", bad.WITH_GRADIENTS),
            ("forward", bad.FORWARD_ONLY),
            ("strided", bad.STRIDED),
        )
        for name, (_, reason) in table.items()
    ],
)
def test_is_rejected_for_what_it_does(
    verdicts: dict[str, Verdict], contest: str, name: str, reason: str
) -> None:
    (trial,) = (t for t in verdicts[contest].trials if t.candidate == name)
    assert trial.rejected is not None, "it may win"
    assert re.search(reason, trial.rejected), trial.rejected


def test_the_good_neighbour_takes_part(verdicts: dict[str, Verdict]) -> None:
    for verdict in verdicts.values():
        assert {t.candidate for t in verdict.trials if not t.rejected} == {"eager", "good"}
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_right_in_eager_and_wrong_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        return torch.tanh(x) * (w * 1.01 if torch.compiler.is_compiling() else w)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    op = zoo.op(Candidate("traced", traced), Candidate("good", zoo.eager))
    for grad in (True, False):
        eager, compiled = contest(op, bad.case(grad=grad), ("eager", "compiled"), budget_s=0.01)
        assert {t.candidate for t in eager.trials if not t.rejected} == {"eager", "traced", "good"}
        rejected = {t.candidate: t.rejected for t in compiled.trials if t.rejected}
        assert rejected.keys() == {"traced"}
        assert re.match("inside torch.compile, output is wrong", str(rejected["traced"]))
