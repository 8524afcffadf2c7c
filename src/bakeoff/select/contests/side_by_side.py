"""Contests side by side: their candidates compile and are verified at the same time, in a process a contest.
They are timed alone, one contest after the other, once none compiles any more."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple

from bakeoff import hardware
from bakeoff.errors import ContestError
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.contests.worker import STAGE_LIMIT_S, Worker
from bakeoff.select.contests.yardstick import REFERENCE
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.op import Op

__all__ = ["Outcome", "Wanted", "Workers", "fitting", "most_jobs"]

Outcome = list[Verdict] | ContestError
"""The verdicts of a contest, one per regime, or why it could not be held."""

_MOST = 4
_END_S = 30.0  # what a thread may take to end once its process is gone
_EACH = 8 << 30  # bytes of the device's memory for a process with its inputs and references
# What a candidate or a contest fails of where memory is short (the host's kernel kills a process then), or
# where so many share the device that not even the reference is ready in time.
_CROWDED = (
    "out of memory", "not enough GPU memory", "STATUS_ALLOC_FAILED", "killed by SIGKILL",
    f"at '{REFERENCE}': hangs",
)  # fmt: skip


class Wanted(NamedTuple):
    """A contest to hold; see `bakeoff.select.contests.contest.contest`."""

    op: Op
    case: Case
    regimes: tuple[str, ...]
    budget_s: float
    skip: Mapping[str, str] = {}
    for_the_record: bool = False
    thorough: bool = False


class Workers:
    """Up to `jobs` processes that hold contests in rounds, until the end of the with-block."""

    def __init__(
        self,
        jobs: int,
        announce: Callable[[str], None] = lambda stage: None,
        *,
        stage_limit_s: float = STAGE_LIMIT_S,
    ) -> None:
        jobs = max(1, jobs)
        self.workers = [
            Worker(stage_limit_s=stage_limit_s, announce=announce, beside=jobs) for _ in range(jobs)
        ]
        self.turns = _Turns(0)
        self.threads: list[threading.Thread] = []
        """Those of the round in hand."""
        self.stopped = False

    def __enter__(self) -> "Workers":
        return self

    def stop(self, why: str) -> None:
        """Let the contests in hand, and all later ones, fail at once with this reason; from any thread."""
        self.stopped = True
        for worker in self.workers:
            worker.stop(why)
        self.turns.stop()

    def __exit__(self, *_: object) -> None:
        self.stop("interrupted")
        self.close()
        self._join()
        self.close()  # what began in that moment

    def close(self) -> None:
        """End the processes; those of the next round are new ones."""
        for worker in self.workers:
            worker.close()

    def _join(self) -> None:
        for thread in self.threads:
            if thread.ident is not None:  # it was started
                thread.join(timeout=_END_S)

    @property
    def jobs(self) -> int:
        """The most contests of a round."""
        return len(self.workers)

    def start(self) -> None:
        """Start the processes ahead of the first round: they load meanwhile."""
        for worker in self.workers:
            worker.start()

    def hold(self, wanted: Sequence[Wanted]) -> Iterator[tuple[int, Outcome]]:
        """Hold a round of contests, at most `jobs`: (place in `wanted`, outcome), each when it is there.

        The next is measured when the caller asks for it. Processes side by side share the device and its
        memory: a contest that ran short of that, or of time for its reference, is held again alone. What goes
        wrong beside the contests is raised at the end of the round.
        """
        if len(wanted) > self.jobs:
            raise ValueError(f"{len(wanted)} contests in a round of {self.jobs}")
        self.turns = turns = _Turns(len(wanted))
        futures = [Future[list[Verdict]]() for _ in wanted]

        def work(i: int) -> None:
            try:
                with turns.one(i) as ready:
                    verdicts = self.workers[i].contest(*wanted[i], ready=ready)
            except BaseException as error:  # noqa: BLE001  raised below
                futures[i].set_exception(error)
            else:
                futures[i].set_result(verdicts)

        self.threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(wanted))]
        for thread in self.threads:
            thread.start()
        failed: BaseException | None = None
        again = []
        for i, future in enumerate(futures):
            outcome = _awaited(future)
            if len(wanted) > 1 and _crowded(outcome):
                again.append(i)
            elif isinstance(outcome, list | ContestError):
                yield i, outcome
            else:
                failed = failed or outcome
            turns.over(i)
        if again:
            self.close()
        for i in again:
            yield i, _alone(self.workers[0], wanted[i])
        if failed:
            raise failed


def _awaited(future: Future[list[Verdict]]) -> list[Verdict] | BaseException:
    """What comes of it. A signal that another thread gets, as Ctrl-C may be, does not wake this one: it looks
    itself now and then."""
    while wait([future], timeout=0.2).not_done:
        pass
    return future.exception() or future.result()


def fitting(device: str) -> int:
    """How many contests side by side suit this machine: half of its cores and its free memory serve them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // 2, hardware.free(device) // _EACH))


def most_jobs() -> int:
    """The most contests side by side that this machine's cores carry."""
    return max(_MOST, os.cpu_count() or 1)


def _alone(worker: Worker, wanted: Wanted) -> Outcome:
    try:
        return worker.contest(*wanted)
    except ContestError as error:
        return error


def _crowded(outcome: Outcome | BaseException) -> bool:
    if isinstance(outcome, list):
        reasons = [trial.rejected or "" for verdict in outcome for trial in verdict.trials]
    else:
        reasons = [str(outcome)]
    return any(word in reason for reason in reasons for word in _CROWDED)


class _Turns:
    """Whose turn it is to measure, of so many contests of a round: the first one's that waits, once all the
    others wait or are over."""

    def __init__(self, contests: int) -> None:
        self.busy = contests
        """How many compile, verify or have their turn."""
        self.waiting: set[int] = set()
        self.turn = -1
        self.stopped = False
        self.changed = threading.Condition()

    @contextmanager
    def one(self, number: int) -> Iterator[Callable[[], None]]:
        """For one contest: a function that waits for its turn, which lasts until it is `over`."""
        waited = False

        def ready() -> None:
            nonlocal waited
            if waited:  # a candidate took its process down, and the contest began again
                return
            waited = True
            with self.changed:
                self.waiting.add(number)
                self.busy -= 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._comes(number))
                self.waiting.discard(number)
                self.busy += 1
                self.turn = number
            if self.stopped:
                raise ContestError("the round was stopped")

        try:
            yield ready
        finally:
            if not waited:
                self._leave()

    def _comes(self, number: int) -> bool:
        return self.stopped or (self.busy == 0 and number == min(self.waiting))

    def over(self, number: int) -> None:
        """The outcome of this contest has been dealt with."""
        if number == self.turn:
            self._leave()

    def _leave(self) -> None:
        with self.changed:
            self.busy -= 1
            self.changed.notify_all()

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
