"""A contest: supports -> verify -> measure -> decide, for one case, in this process.

`bakeoff.select.contests.worker` holds the same contest in a process of its own, so that a candidate that
crashes or hangs is a rejection and not the end of a training run.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from bakeoff import hardware
from bakeoff.device import on
from bakeoff.errors import ContestError
from bakeoff.select.contests.examine import batch_invariant, examine
from bakeoff.select.contests.failure import printable, reason
from bakeoff.select.contests.judge import Errors, Inaccurate
from bakeoff.select.contests.measure import (
    GraphTimer,
    HostTimer,
    Timer,
    Timing,
    Work,
    beats,
    input_sets,
    release,
    timed,
    work,
)
from bakeoff.select.contests.region import in_region
from bakeoff.select.contests.screening import Entrant, Screening
from bakeoff.select.contests.verdict import Trial, Verdict, decide
from bakeoff.select.contests.verify import verify
from bakeoff.select.contests.yardstick import REFERENCE, Yardstick, yardsticks
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Op

__all__ = ["contest", "regimes_of", "timers_for"]

Announce = Callable[[str], None]
_BASELINE = "a baseline: timed by `bakeoff bench` alone, and never chosen"


def regimes_of(case: Case) -> tuple[str, ...]:
    """The regimes one contest settles together on this case's device."""
    return ("eager", "graph") if case.device.startswith("cuda") else ("eager",)


def timers_for(case: Case) -> dict[str, Timer]:
    """The timer of each regime."""
    host = HostTimer(case.device)
    return {"eager": host, "compiled": host, "graph": GraphTimer(case.device)}


def contest(
    op: Op,
    case: Case,
    regimes: Sequence[str] | None = None,
    *,
    budget_s: float = 2.0,
    timers: Mapping[str, Timer] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    skip: Mapping[str, str] | None = None,
    for_the_record: bool = False,
    thorough: bool = False,
    announce: Announce = lambda stage: None,
    ready: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Hold a contest at the case's representative and return one verdict per regime (default: those of the
    device); candidates are verified at the case as it is, too.

    `budget_s` bounds the time spent measuring (verification comes on top); `skip` names candidates already
    known to be out, with the reason, or variants of them (`bakeoff.select.declare.variants.label`);
    `for_the_record`, baselines and candidates that are out for their error alone are timed, too, without a
    chance to win, and on a GPU all that are timed are weighed; `thorough`, all variants of the candidates
    that pass are tried, which takes minutes (`bakeoff.select.contests.screening`), else the first few;
    `announce` hears each stage as it begins (``candidate: stage``), and the candidate's bare name before each
    sample; `ready` is called before the first thing is timed, and returns when the device is free for it.
    """
    with on(case.device):
        op.check(case)
        called, case = case, op.bucket(case)
        regimes = regimes_of(case) if regimes is None else tuple(regimes)
        timers = timers or timers_for(case)
        out = {} if for_the_record else {c.name: _BASELINE for c in op.candidates if c.baseline}
        out |= skip or {}
        try:
            stick, passed, rejected, inaccurate, invariant = _qualify(op, case, called, out, announce)
            screening = Screening(op, case, skip or {}, thorough=thorough, announce=announce, clock=clock)
            screening.compile(stick, list(passed), budget_s)
            timed_too = inaccurate if for_the_record else ()
            entrants = {name: c for name, c in op.by_name.items() if name in passed or name in timed_too}
            release(case)
            hashes = {
                candidate.name: candidate.source_hash for candidate in op.candidates
            }  # can take a second
            ready()
            tuned = screening.entrants(called, timers, regimes, budget_s)
            entrants |= {entrant.label: entrant.candidate for entrant in tuned.values()}
            sets = input_sets(op, case, 3 * hardware.l2_bytes(case.device))
        except torch.cuda.OutOfMemoryError as error:
            name = key(op, case, regimes[0])
            raise ContestError(f"not enough GPU memory to hold a contest for {name}") from error
        before = hardware.pulse(case.device)
        share = (budget_s if thorough else screening.left(budget_s)) / len(regimes)
        measured = {}
        for regime in regimes:
            measured[regime] = _measure(
                op, case, regime, entrants, sets, timers[regime], share, clock, announce, stick
            )
        warning = hardware.disturbance(case.device, before)
        del sets
        wrong = _recheck(
            op, stick, {name: c for name, c in entrants.items() if name not in inaccurate}, announce
        )
        del stick
        release(case)
        peaks = _peaks(op, case, entrants, announce) if for_the_record else {}
        verdicts = []
        for regime, (timings, unfit) in measured.items():
            out = {**rejected, **wrong, **unfit}
            trials = _trials(
                op, case, hashes, passed, timings, out, peaks, tuned, screening, everything=for_the_record
            )
            trials = [
                msgspec.structs.replace(t, batch_invariant=t.candidate in invariant and not t.rejected)
                for t in trials
            ]
            verdicts.append(_verdict(op, case, regime, trials, warning, thorough=thorough))
        return verdicts


def _qualify(
    op: Op, case: Case, called: Case, rejected: dict[str, str], announce: Announce
) -> tuple[Yardstick, dict[str, tuple[Errors, bool]], dict[str, str], set[str], set[str]]:
    """A yardstick to verify again by, what passed, why the others did not, which of these are out for their
    error alone, and what is batch invariant."""
    for candidate in op.candidates:
        reasons = candidate.reasons(case)
        if reasons and candidate.name not in rejected:
            rejected[candidate.name] = "; ".join(reasons)
    passed: dict[str, tuple[Errors, bool]] = {}
    inaccurate, invariant = set(), set()
    kept: Yardstick | None = None
    announce(REFERENCE)
    for stick in yardsticks(op, case, called):
        for candidate in op.candidates:
            name = candidate.name
            if name in rejected:
                continue
            announce(name if name in passed else f"{name}: compile and verify")
            try:
                errors, repeats = verify(op, candidate, [stick])
                if name not in passed:
                    examine(op, candidate, stick)
                    if batch_invariant(op, candidate, stick):
                        invariant.add(name)
            except Exception as error:  # whatever a candidate raises is its rejection
                rejected[name] = reason(name, error)
                passed.pop(name, None)
                if isinstance(error, Inaccurate):
                    inaccurate.add(name)
                continue
            worst, repeated = passed.get(name, (errors, repeats))
            passed[name] = worst.larger(errors), repeated and repeats
        kept = kept or stick
        del stick
        announce(REFERENCE)
    assert kept is not None
    if op.incumbent.name not in passed:
        raise ContestError(
            f"{op.name}: the incumbent {op.incumbent.name!r} itself fails: {rejected[op.incumbent.name]}"
        )
    return kept, passed, rejected, inaccurate, invariant


def _recheck(
    op: Op, stick: Yardstick, entrants: Mapping[str, Candidate], announce: Announce
) -> dict[str, str]:
    """Verify once more after all the timed calls: what was right at first must still be right."""
    wrong = {}
    for name, candidate in entrants.items():
        if candidate is op.incumbent:
            continue
        announce(name)
        try:
            verify(op, candidate, [stick])
        except Exception as error:
            wrong[name] = f"after {name} had been timed: {reason(name, error)}"
    return wrong


def _peaks(op: Op, case: Case, entrants: Mapping[str, Candidate], announce: Announce) -> dict[str, int]:
    """`_peak` of each; nothing on the CPU, and for what doesn't fit beside the caching allocator's other
    blocks."""
    found = {}
    for name in sorted(entrants) if case.device.startswith("cuda") else ():
        announce(f"{name}: weigh")
        try:
            found[name] = _peak(op, case, entrants[name])
        except Exception as error:
            reason(name, error)  # what breaks the device is out; else it was timed, which counts
        release(case)
    return found


def _peak(op: Op, case: Case, candidate: Candidate) -> int:
    """Device memory one call adds at its peak, outputs and gradients included."""
    (call,) = work(op, case, candidate.implementation, input_sets(op, case, 0))
    call()
    torch.cuda.synchronize(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    before = torch.cuda.memory_allocated(case.device)
    call()
    torch.cuda.synchronize(case.device)
    return torch.cuda.max_memory_allocated(case.device) - before


def _measure(
    op: Op,
    case: Case,
    regime: str,
    entrants: Mapping[str, Candidate],
    sets: Sequence[tuple[list[Any], list[Any]]],
    timer: Timer,
    budget_s: float,
    clock: Callable[[], float],
    announce: Announce,
    stick: Yardstick,
) -> tuple[dict[str, Timing], dict[str, str]]:
    unfit = {name: why for name, candidate in entrants.items() if (why := _unfit(candidate, regime))}

    if regime == "compiled":
        entrants = {name: in_region(candidate) for name, candidate in entrants.items() if name not in unfit}
        unfit |= _wrong_in_place(op, stick, entrants, announce)

    def prepared(name: str) -> Work:
        announce(f"{name}: measure ({regime})")
        return work(op, case, entrants[name].implementation, sets)

    works = {name: partial(prepared, name) for name in entrants if name not in unfit}
    timings, failed = timed(works, timer, budget_s, clock, announce)
    if not timings:
        raise ContestError(f"{op.name}: the incumbent can't be measured: {failed[op.incumbent.name]}")
    return timings, {**unfit, **failed}


def _wrong_in_place(
    op: Op, stick: Yardstick, regions: Mapping[str, Candidate], announce: Announce
) -> dict[str, str]:
    """Which candidates are wrong as torch.compile traces them, and why; the incumbent is what it makes of
    plain PyTorch."""
    wrong = {}
    for name, candidate in regions.items():
        if name == op.incumbent.name:
            continue
        announce(f"{name}: compile and verify in place")
        try:
            verify(op, candidate, [dataclasses.replace(stick, again="")])  # one region a candidate
        except Exception as error:
            wrong[name] = f"inside torch.compile, {reason(name, error)}"
    return wrong


def _unfit(candidate: Candidate, regime: str) -> str | None:
    if regime == "graph" and not candidate.capturable:
        return "can't be captured in a CUDA graph"
    if regime == "compiled" and candidate.name == "compiled":
        return "is the same as eager inside a compiled region"
    if regime == "compiled" and not candidate.traceable:
        return "can't be traced by torch.compile"
    return None


def _trials(
    op: Op,
    case: Case,
    hashes: Mapping[str, str],
    passed: Mapping[str, tuple[Errors, bool]],
    timings: Mapping[str, Timing],
    rejected: Mapping[str, str],
    peaks: Mapping[str, int],
    tuned: Mapping[str, Entrant],
    screening: Screening,
    *,
    everything: bool,
) -> list[Trial]:
    """A trial per candidate: with its variant where that beat its default, else with the default."""
    trials = []
    for candidate in op.candidates:
        name, place, variant = candidate.name, candidate.name, ""
        errors, deterministic = passed.get(name, (None, candidate.deterministic))
        entrant = tuned.get(name)
        if entrant and name not in rejected:
            if entrant.label in rejected:
                screening.reject(name, entrant.variant, rejected[entrant.label])
            elif beats(timings[entrant.label], timings[name]):
                place, variant = entrant.label, entrant.variant
                errors, deterministic = entrant.errors, entrant.repeats
        trials.append(
            Trial(
                name,
                hashes[name],
                timings.get(place),
                errors,
                deterministic,
                printable(rejected[name]) if name in rejected else None,
                peaks.get(place),
                able=not candidate.reasons(case),
                variant=variant,
                variants=screening.record(name, variant, everything=everything),
            )
        )
    return trials


def _verdict(
    op: Op, case: Case, regime: str, trials: Sequence[Trial], warning: str, *, thorough: bool
) -> Verdict:
    winner, why = decide([trial for trial in trials if not op.by_name[trial.candidate].baseline])
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cost, name = op.cost(case), key(op, case, regime)
    return Verdict(name, op.name, regime, winner, why, tuple(trials), cost, date, warning, thorough)
