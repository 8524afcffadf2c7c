"""Tuning: contests for exactly the keys that a real step uses."""

import contextlib
import logging
import reprlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from bakeoff.errors import ContestError, PolicyError
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import cache_dir
from bakeoff.select.contests.contest import contest, regimes_of
from bakeoff.select.contests.side_by_side import Outcome, Wanted, Workers, fitting, most_jobs
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.contests.worker import STAGE_LIMIT_S, home_of
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import REGIMES, key
from bakeoff.select.declare.op import Op

__all__ = ["TuneReport", "settle", "tune", "tune_missed"]

log = logging.getLogger("bakeoff")
_PER_KEY_S = 1.5
_LEAST_STAGE_S = 60.0  # a first compilation by torch.compile takes half of it on two slow cores
_NOT_ASKED = "third-party: left out of tuning (peers=True lets it compete)"


Place = tuple[str, str]
"""A key and its device."""
Recorded = dict[Place, tuple[Op, Case]]
recordings: list[Recorded] = []
"""Where dispatch notes the (op, case) behind every selection while steps are recorded: in all of them. The
process's, not a thread's: backward recomputes in autograd's threads."""
_failed: set[Place] = set()
"""Those whose contest could not be held: not tried again at every call."""


class TuneReport(msgspec.Struct, frozen=True):
    """What `tune` did: the verdict of every key the step used; the keys it had no time or way to settle."""

    verdicts: tuple[Verdict, ...]
    measured: int
    unsettled: dict[str, str]
    seconds: float

    @property
    def choices(self) -> dict[str, str]:
        """The winner by key."""
        return {verdict.key: verdict.winner for verdict in self.verdicts}


def tune(
    step: Callable[[], object],
    budget_s: float = 30.0,
    *,
    regimes: Sequence[str] | None = None,
    peers: bool = False,
    force: bool = False,
    thorough: bool = False,
    jobs: int = 0,
    announce: Callable[[str], None] = lambda text: None,
) -> TuneReport:
    """Run `step` once, note which ops it calls with which shapes, and hold their contests.

    Args:
        step: one real training step (forward and backward). It runs exactly once.
        budget_s: seconds for all contests. Keys that no time is left for are listed and keep their heuristic;
            a contest that would end well beyond the budget, judged by those before, is not begun. All of it
            takes twice the budget at most, the step and the start of processes included, unless the step
            alone takes longer than the budget: contests may then take that much again. What is not
            settled by then is given up. (Contests of ops that no other process can import can't be.)
        regimes: settle these; default: those of the device (``eager``, on CUDA also ``graph``), and
            ``compiled`` for ops met inside torch.compile.
        peers: let installed third-party candidates compete, too. Some spend a minute on tuning themselves at
            every new shape; without it the budget goes to PyTorch's candidates and our own.
        force: measure again what the table knows already.
        thorough: try every launch configuration that candidates declare, not the first few, and hold again
            the contests that did not. That takes minutes a key: set `budget_s` to match.
        jobs: contests whose candidates compile and are verified side by side, in a process each; each takes
            memory. They are timed alone, one after the other. 0: as many as suit the machine, up to 4.
        announce: hears one line of progress per stage.

    Returns:
        A `TuneReport`. The verdicts are in the user's table and in force from the next call on; where
            they concern ops inside torch.compile, compiled functions are compiled anew.

    Raises:
        PolicyError: an unknown regime; or the ranks of this job have agreed already (`tune_together`).
        TypeError: a step that can't be called.
        ValueError: a budget that isn't a number of seconds, or jobs that are no number, or more than the
            machine has cores.

    Example:
        >>> import torch, bakeoff
        >>> x = torch.randn(8, 16, requires_grad=True)
        >>> report = bakeoff.tune(lambda: bakeoff.ops.rms_norm(x).sum().backward(), budget_s=0)
        >>> report.seconds < 60
        True
    """
    if not callable(step):
        raise TypeError(f"step is {reprlib.repr(step)}: pass the function itself, tune calls it")
    if regimes is not None and not isinstance(regimes, str):
        regimes = tuple(regimes)  # an iterator is used up by the first look
    if isinstance(regimes, str) or not all(regime in REGIMES for regime in regimes or ()):
        raise PolicyError(f"regimes={regimes!r} must be some of {REGIMES}, such as ('eager',)")
    if not isinstance(budget_s, int | float) or not budget_s >= 0:
        raise ValueError(f"budget_s={budget_s!r} must be a number of seconds, at least 0")
    if not isinstance(jobs, int) or jobs < 0:
        raise ValueError(f"jobs={jobs!r} must be a number of contests; 0 is as many as suit the machine")
    if jobs > most_jobs():
        raise ValueError(f"jobs={jobs} are more than this machine carries: at most {most_jobs()}")
    if policy.store.agreed is not None:
        if dist.is_available() and dist.is_initialized():
            raise PolicyError(
                "the ranks of this job have agreed on rank 0's verdicts, and a rank's own would have no "
                "effect: call bakeoff.select.tune_together(step) on every rank"
            )
        policy.store.agreed = None  # that job is over
    start = time.monotonic()
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
    limit = min(max(2 * budget_s, _LEAST_STAGE_S), STAGE_LIMIT_S)
    with Workers(jobs or fitting(device), announce, stage_limit_s=limit) as workers:
        if budget_s > 0 and not _tables():
            workers.start()  # nothing is known yet: contests are certain, and workers load beside the step
        with recording() as recorded:
            step()
        done, wanted = _sorted(recorded, regimes, peers, force, thorough)
        left_s = max(start + 2 * budget_s - time.monotonic(), budget_s)
        with _ended_after(left_s, workers, budget_s):
            found = _settled(wanted, workers, budget_s, announce)
    unsettled = {name: str(error) for (name, _), error in found.items() if isinstance(error, ContestError)}
    held = [verdicts for verdicts in found.values() if not isinstance(verdicts, ContestError)]
    new = [verdict for verdicts in held for verdict in verdicts]
    policy.forget()
    if any(verdict.regime == "compiled" for verdict in new):  # compiled code holds the choices of before
        torch.compiler.reset()
    return TuneReport((*done, *new), len(held), unsettled, time.monotonic() - start)


@contextlib.contextmanager
def _ended_after(seconds: float, workers: Workers, budget_s: float) -> Iterator[None]:
    """Inside, contests end after so many seconds, in the middle of one if need be."""
    timer = threading.Timer(
        min(seconds, threading.TIMEOUT_MAX), workers.stop, [f"twice the budget of {budget_s:g} s was spent"]
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _sorted(
    recorded: Recorded, regimes: Sequence[str] | None, peers: bool, force: bool, thorough: bool
) -> tuple[list[Verdict], dict[Place, Wanted]]:
    """What the tables know of a step, and the contests to hold for the rest."""
    done: list[Verdict] = []
    wanted: dict[Place, Wanted] = {}
    covered: set[tuple[str, Path]] = set()
    for (name, device), (op, case) in recorded.items():
        own = ("compiled",) if name.endswith(" compiled") else _regimes(case, regimes)
        names = [key(op, case, regime) for regime in own]
        known = [] if force else _known(op, names, case, peers, thorough)
        done += known
        rows = {(each, policy.store.path(device)) for each in names}
        if not known and not rows <= covered:
            covered |= rows
            skip = {} if peers else _uninvited(op)
            wanted[name, device] = Wanted(op, case, own, _PER_KEY_S, skip, thorough=thorough)
    return done, wanted


def _settled(
    wanted: dict[Place, Wanted], workers: Workers, budget_s: float, announce: Callable[[str], None]
) -> dict[Place, Outcome]:
    """The outcome of each contest; an error for those that the budget has no time for."""
    found: dict[Place, Outcome] = {}
    deadline = time.monotonic() + budget_s
    rounds, taken = 0, 0.0
    """Held so far, and the seconds they took on average."""
    for places in _rounds(wanted, workers.jobs):
        left = deadline - time.monotonic()
        if left <= taken / 2:  # half of what a round took so far: the next would end beyond the budget
            found |= dict.fromkeys(places, ContestError(f"the budget of {budget_s:g} s was spent"))
            continue
        for name, _ in places:
            announce(name)
        begun = time.monotonic()
        share = min(_PER_KEY_S, left / len(places))
        outcomes = _hold([wanted[place]._replace(budget_s=share) for place in places], workers)
        rounds += 1
        taken += (time.monotonic() - begun - taken) / rounds
        found |= zip(places, outcomes, strict=True)
    return found


def _rounds(wanted: dict[Place, Wanted], jobs: int) -> Iterator[list[Place]]:
    """The contests, up to `jobs` at a time; then, one by one, those of ops that only this process knows."""
    here = [place for place, one in wanted.items() if home_of(one.op) is None]
    others = [place for place in wanted if place not in here]
    for i in range(0, len(others), jobs):
        yield others[i : i + jobs]
    for place in here:
        yield [place]


def tune_missed(budget_s: float = 60.0, **options: Any) -> TuneReport:
    """Hold the contests for what calls asked the table for and did not find, here or in earlier processes;
    `options` as of `tune`. Does nothing where nothing was missed."""
    from bakeoff.select.choose import missed  # which reads tables that tuning writes

    def step() -> None:
        for op, case, regime in missed.misses().values():
            note(op, case, regime)

    report = tune(step, budget_s, **options)
    missed.settled()
    return report


def note(op: Op, case: Case, regime: str) -> bool:
    """Note a selection in every recording; whether there is one. Of tensors without data nothing is noted."""
    for recorded in recordings if case.device != "meta" else ():
        recorded[key(op, case, regime), case.device] = (op, case)
    return bool(recordings)


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Collect every selection made inside."""
    recorded: Recorded = {}
    recordings.append(recorded)
    policy.forget()  # remembered calls would pass unseen
    try:
        yield recorded
    finally:
        # Another thread's may have begun inside this one and outlive it.
        del recordings[next(i for i, open_ in enumerate(recordings) if open_ is recorded)]


def settle(op: Op, case: Case, regime: str) -> None:
    """Hold the contest for one case now (the ``tune`` policy on a miss)."""
    name = key(op, case, regime), case.device
    if name in _failed:
        return
    with Workers(1) as workers:
        (outcome,) = _hold([Wanted(op, case, regimes_of(case), _PER_KEY_S, _uninvited(op))], workers)
    if isinstance(outcome, ContestError):
        _failed.add(name)


def _regimes(case: Case, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Those of `wanted` (default: all) that count on this case's device: only CUDA has graphs."""
    there = regimes_of(case)
    return tuple(dict.fromkeys(r if r in (*there, "compiled") else there[0] for r in wanted or there))


def _tables() -> bool:
    """Whether there is a table of this user's."""
    try:
        return any(cache_dir().glob("*.json"))
    except OSError:  # a folder that can't be entered
        return False


def _known(op: Op, names: Sequence[str], case: Case, peers: bool, thorough: bool) -> list[Verdict]:
    """The table's verdicts for all of `names`; none if one is missing, stale, not as thorough as asked, or
    leaves out a wanted peer or what can take the case by now (with the compiler, say, that was missing)."""
    found = [policy.store.lookup(op, name, case.device) for name in names]
    verdicts = [f.verdict for f in found if f and not f.stale]
    trials = [trial for verdict in verdicts for trial in verdict.trials]
    left_out = peers and any(trial.rejected == _NOT_ASKED for trial in trials)
    unable = {trial.candidate for trial in trials if not trial.able}
    able_now = any(c.name in unable and not c.reasons(op.bucket(case)) for c in op.candidates)
    short = thorough and not all(verdict.thorough for verdict in verdicts)
    return [] if len(verdicts) < len(names) or left_out or able_now or short else verdicts


def _uninvited(op: Op) -> dict[str, str]:
    """The third-party candidates that are installed, with the reason why they are left out."""
    return {c.name: _NOT_ASKED for c in op.candidates if c.third_party and not c.absent}


def _hold(wanted: Sequence[Wanted], workers: Workers) -> list[Outcome]:
    """Hold a round of contests and keep each one's verdicts as soon as there are some."""
    outcomes: dict[int, Outcome] = {}
    if home_of(wanted[0].op) is None:  # defined in a script: only this process knows it
        workers.close()  # some may still be loading
        round_: Iterable[tuple[int, Outcome]] = [(0, _held_here(wanted[0]))]
    else:
        round_ = workers.hold(wanted)
    for i, outcome in round_:
        outcomes[i] = outcome
        if isinstance(outcome, ContestError):
            log.log(logging.INFO if workers.stopped else logging.WARNING, "%s", outcome)
        else:
            policy.store.add(outcome, wanted[i].case.device)
    return [outcomes[i] for i in range(len(wanted))]


def _held_here(wanted: Wanted) -> Outcome:
    op, case, regimes, budget_s, skip, _, thorough = wanted
    try:
        return contest(op, case, regimes, budget_s=budget_s, skip=skip, thorough=thorough)
    except ContestError as error:
        return error
