"""Agreement across ranks: rank 0 decides, all hold the same verdicts, and a difference is an error."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from bakeoff.errors import ContestError
from bakeoff.select.choose import policy
from bakeoff.select.choose.agree import Decision, agree, tune_together
from bakeoff.select.declare.key import key
from bakeoff.select.contests.measure import Timing
from bakeoff.select import Candidate, Op, call
from bakeoff.select.choose.policy import using
from bakeoff.select.contests.verdict import Trial, Verdict
from tests.unit import zoo

Ranks = Callable[..., None]


def one(x: Any, w: Any, flag: Any = None) -> Any:
    return zoo.eager(x, w) + 1


def two(x: Any, w: Any, flag: Any = None) -> Any:
    return zoo.eager(x, w) + 2


OP = zoo.op(Candidate("one", one), Candidate("two", two), name="zoo_ranks")
X, W = torch.zeros(4, 8), torch.ones(8)


def verdict(winner: str, rows: int = 4, op: Op = OP) -> Verdict:
    times = {"eager": 9.0, "one": 5.0, "two": 5.0, winner: 1.0}
    trials = tuple(
        Trial(c.name, c.source_hash, Timing(us, us, us, 0.0, 9))
        for c in op.candidates
        for us in [times[c.name]]
    )
    case = zoo.case(rows, 8, grad=False)
    return Verdict(key(op, case, "eager"), op.name, "eager", winner, "because", trials, op.cost(case), "2026")


def chosen(rows: int = 4) -> int:
    """0, 1 or 2: which candidate ran."""
    return int(call(OP, torch.zeros(rows, 8), W, None)[0, 0])


def gathered(value: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def rank_0_decides(rank: int) -> None:
    mine = [verdict("one" if rank == 0 else "two"), *([verdict("two", rows=5)] if rank else [])]
    policy.store.add(mine, "cpu")
    assert chosen() == (1 if rank == 0 else 2), "ranks begin with verdicts of their own"
    agreed = agree(mine)
    assert agreed == [verdict("one")]
    assert gathered(chosen()) == [1] * dist.get_world_size(), "also where another choice was remembered"
    assert gathered(chosen(5)) == [0] * dist.get_world_size(), "a verdict that rank 0 lacks counts nowhere"


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_takes_the_verdicts_of_rank_0(ranks: Ranks, world: int) -> None:
    ranks(world, rank_0_decides)


def tampered(rank: int) -> None:
    if rank == 1:
        broadcast = dist.broadcast_object_list

        def other(objects: list[Any], src: int) -> None:
            broadcast(objects, src)
            objects[0] = msgspec.json.encode(Decision([verdict("two")]))

        dist.broadcast_object_list = other
    with pytest.raises(ContestError, match=r"ranks \[1\] hold other verdicts than rank 0"):
        agree([verdict("one")])


def test_a_rank_that_ends_up_with_other_verdicts_is_named_on_every_rank(ranks: Ranks) -> None:
    ranks(3, tampered)


def tuned(rank: int) -> None:
    """A real contest of an importable op, held by rank 0 alone; the step's collective needs every rank."""
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        loss = call(zoo.CALM, X, W, None).sum()
        dist.all_reduce(loss)

    with zoo.registered(zoo.CALM):
        report = tune_together(step, 20.0)
        assert steps == [1]
        assert report.measured == (1 if rank == 0 else 0)
        assert report.unsettled == {}
        assert len(report.verdicts) == 1
        assert len({str(everybody) for everybody in gathered(report.choices)}) == 1
        with using("strict"):  # a miss would raise
            torch.testing.assert_close(call(zoo.CALM, X, W, None), zoo.eager(X, W))


@pytest.mark.parametrize("world", [2, 3])
def test_tuning_together_measures_once_and_settles_all(ranks: Ranks, world: int) -> None:
    ranks(world, tuned)


def failed(rank: int) -> None:
    def step() -> None:
        if rank == 0:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError if rank == 0 else ContestError, match="out of luck"):
        tune_together(step, 1.0)


def test_a_failure_of_rank_0_is_everybodys(ranks: Ranks) -> None:
    ranks(2, failed)


def no_collective(rank: int) -> None:
    agree([verdict("one")])
    if (
        rank == 0
    ):  # were there a collective on the way, this rank would wait for the other until the time limit
        for rows in (4, 5, 6):
            chosen(rows)


def test_calls_need_no_other_rank(ranks: Ranks) -> None:
    ranks(2, no_collective)


def test_one_process_alone_tunes_as_ever() -> None:
    policy.store.forget()
    report = tune_together(lambda: None, 1.0)
    assert (report.verdicts, report.measured) == ((), 0)
