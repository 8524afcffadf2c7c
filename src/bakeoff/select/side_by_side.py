"""Contests side by side: their candidates compile and are verified at the same time, in a process a contest.
They are timed alone, one contest after the other, once none compiles any more."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bakeoff import hardware
from bakeoff.errors import ContestError
from bakeoff.select.op import Case, Op
from bakeoff.select.verdict import Verdict
from bakeoff.select.worker import Worker

__all__ = ["Outcome", "Wanted", "Workers", "fitting"]

Outcome = list[Verdict] | ContestError
"""The verdicts of a contest, one per regime, or why it could not be held."""

_MOST = 4
_EACH = 8 << 30  # bytes of the device's memory for a process with its inputs and references
# What a candidate or a contest fails of where memory is short; the host's kernel kills a process then.
_SHORT = ("out of memory", "not enough GPU memory", "killed by SIGKILL")


class Wanted(NamedTuple):
    """A contest to hold; see `bakeoff.select.contest.contest`."""

    op: Op
    case: Case
    regimes: tuple[str, ...]
    budget_s: float
    skip: Mapping[str, str] = {}
    for_the_record: bool = False


class Workers:
    """Up to `jobs` processes that hold contests in rounds."""

    def __init__(self, jobs: int, announce: Callable[[str], None] = lambda stage: None) -> None:
        self.workers = [Worker(announce=announce) for _ in range(max(1, jobs))]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()

    @property
    def jobs(self) -> int:
        """The most contests of a round."""
        return len(self.workers)

    def start(self) -> None:
        """Start the processes ahead of the first round: they load meanwhile."""
        for worker in self.workers:
            worker.start()

    def hold(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Hold a round of contests, at most `jobs`.

        Processes side by side share the device's memory: a contest that ran short of it is held again alone.
        """
        if len(wanted) > self.jobs:
            raise ValueError(f"{len(wanted)} contests in a round of {self.jobs}")
        turns = _Turns(len(wanted))
        outcomes: list[Outcome | BaseException] = [ContestError("not held")] * len(wanted)

        def work(i: int) -> None:
            with turns.one() as ready:
                outcomes[i] = _held(self.workers[i], wanted[i], ready)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, len(wanted))]
        for thread in threads:
            thread.start()
        try:
            if wanted:
                work(0)
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop(turns, threads)
            raise
        for i, outcome in enumerate(outcomes):
            if len(wanted) > 1 and _short_of_memory(outcome):
                self.close()
                outcomes[i] = _held(self.workers[0], wanted[i])
        return [_raised_or(outcome) for outcome in outcomes]

    def _stop(self, turns: "_Turns", threads: Sequence[threading.Thread]) -> None:
        """End a round in which this thread was interrupted."""
        turns.stop()
        for worker in self.workers:
            worker.ended = True
        self.close()
        for thread in threads:
            thread.join()
        self.close()  # what began in that moment


def fitting(device: str) -> int:
    """How many contests side by side suit this machine: half of its cores and its free memory serve them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // 2, hardware.free(device) // _EACH))


def _held(
    worker: Worker, wanted: Wanted, ready: Callable[[], None] = lambda: None
) -> Outcome | BaseException:
    try:
        return worker.contest(*wanted, ready=ready)
    except Exception as error:  # noqa: BLE001  raised where the round was asked for
        return error


def _raised_or(outcome: Outcome | BaseException) -> Outcome:
    if isinstance(outcome, list | ContestError):
        return outcome
    raise outcome


def _short_of_memory(outcome: Outcome | BaseException) -> bool:
    if isinstance(outcome, list):
        reasons = [trial.rejected or "" for verdict in outcome for trial in verdict.trials]
    else:
        reasons = [str(outcome)]
    return any(word in reason for reason in reasons for word in _SHORT)


class _Turns:
    """Whose turn it is to measure, of so many contests of a round."""

    def __init__(self, contests: int) -> None:
        self.busy = contests
        """How many compile, verify or measure."""
        self.stopped = False
        self.changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[Callable[[], None]]:
        """For one contest: a function that waits until nothing else is at work. Its turn lasts to the end."""
        waited = False

        def ready() -> None:
            nonlocal waited
            if waited:  # a candidate took its process down, and the contest began again
                return
            waited = True
            with self.changed:
                self.busy -= 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.busy == 0 or self.stopped)
                self.busy += 1
            if self.stopped:
                raise ContestError("the round was stopped")

        try:
            yield ready
        finally:
            with self.changed:
                self.busy -= 1
                self.changed.notify_all()

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
