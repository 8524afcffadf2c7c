"""A contest: supports -> verify -> measure -> decide, for one case, in this process.

`bakeoff.select.contests.worker` holds the same contest in a process of its own, so that a candidate that
crashes or hangs is a rejection and not the end of a training run.
"""

import datetime
import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.errors import ContestError
from bakeoff.select.contests.apart import keep_apart
from bakeoff.select.contests.measure import GraphTimer, HostTimer, Timer, Timing, input_sets, interleave, work
from bakeoff.select.contests.verdict import Trial, Verdict, decide
from bakeoff.select.contests.verify import Errors, Inaccurate, Rejected, Yardstick, verify, yardsticks
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Op

__all__ = ["DeviceLost", "contest", "regimes_of", "timers_for"]

Announce = Callable[[str], None]
_BASELINE = "a baseline: timed by `bakeoff bench` alone, and never chosen"


class DeviceLost(ContestError):
    """A candidate broke the CUDA context; nothing more can run in this process."""

    def __init__(self, candidate: str, reason: str) -> None:
        super().__init__(f"{candidate}: {reason}")
        self.candidate, self.reason = candidate, reason


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
    announce: Announce = lambda stage: None,
    ready: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Hold a contest at the case's representative and return one verdict per regime (default: those of the
    device); candidates are verified at the case as it is, too.

    `budget_s` bounds the time spent measuring (verification comes on top); `skip` names candidates already
    known to be out, with the reason; `for_the_record`, baselines and candidates that are out for their error
    alone are timed, too, without a chance to win, and on a GPU all that are timed are weighed; `announce`
    hears each stage as it begins (``candidate: stage``), and the candidate's bare name before each sample;
    `ready` is called before the first thing is timed, and returns when the device is free for it.
    """
    op.check(case)
    called, case = case, op.bucket(case)
    regimes = regimes_of(case) if regimes is None else tuple(regimes)
    timers = timers or timers_for(case)
    out = {} if for_the_record else {c.name: _BASELINE for c in op.candidates if c.baseline}
    out |= skip or {}
    try:
        stick, passed, rejected, inaccurate = _qualify(op, case, called, out, announce)
        timed = {*passed, *(inaccurate if for_the_record else ())}
        _release(case)
        hashes = {candidate.name: candidate.source_hash for candidate in op.candidates}  # can take a second
        ready()
        sets = input_sets(op, case, 3 * hardware.l2_bytes(case.device))
    except torch.cuda.OutOfMemoryError as error:
        name = key(op, case, regimes[0])
        raise ContestError(f"not enough GPU memory to hold a contest for {name}") from error
    before = hardware.pulse(case.device)
    measured = {}
    for regime in regimes:
        share = budget_s / len(regimes)
        measured[regime] = _measure(op, case, regime, timed, sets, timers[regime], share, clock, announce)
    warning = hardware.disturbance(case.device, before)
    del sets
    rejected |= _recheck(op, stick, passed)
    del stick
    _release(case)
    peaks = _peaks(op, case, sorted(timed), announce) if for_the_record else {}
    return [
        _verdict(op, case, regime, hashes, passed, timings, {**rejected, **unfit}, peaks, warning)
        for regime, (timings, unfit) in measured.items()
    ]


def _qualify(
    op: Op, case: Case, called: Case, rejected: dict[str, str], announce: Announce
) -> tuple[Yardstick, dict[str, tuple[Errors, bool]], dict[str, str], set[str]]:
    """A yardstick to verify again by, what passed, why the others did not, and which of these are out for
    their error alone."""
    for candidate in op.candidates:
        reasons = candidate.reasons(case)
        if reasons and candidate.name not in rejected:
            rejected[candidate.name] = "; ".join(reasons)
    passed: dict[str, tuple[Errors, bool]] = {}
    inaccurate = set()
    kept: Yardstick | None = None
    announce("prepare the reference")
    for stick in yardsticks(op, case, called):
        for candidate in op.candidates:
            name = candidate.name
            if name in rejected:
                continue
            announce(name if name in passed else f"{name}: compile and verify")
            try:
                errors, repeats = verify(op, candidate, [stick])
                if name not in passed:
                    keep_apart(candidate, stick)
            except Exception as error:  # whatever a candidate raises is its rejection
                rejected[name] = _reason(candidate, error)
                passed.pop(name, None)
                if isinstance(error, Inaccurate):
                    inaccurate.add(name)
                continue
            worst, repeated = passed.get(name, (errors, repeats))
            passed[name] = worst.larger(errors), repeated and repeats
        kept = kept or stick
        del stick
        announce("prepare the reference")
    assert kept is not None
    if op.incumbent.name not in passed:
        raise ContestError(
            f"{op.name}: the incumbent {op.incumbent.name!r} itself fails: {rejected[op.incumbent.name]}"
        )
    return kept, passed, rejected, inaccurate


def _recheck(op: Op, stick: Yardstick, passed: Mapping[str, Any]) -> dict[str, str]:
    """Verify once more after all the timed calls: what was right at first must still be right."""
    wrong = {}
    for name in passed:
        if name == op.incumbent.name:
            continue
        try:
            verify(op, op.by_name[name], [stick])
        except Exception as error:
            wrong[name] = f"after {name} had been timed: {_reason(op.by_name[name], error)}"
    return wrong


def _peaks(op: Op, case: Case, names: Sequence[str], announce: Announce) -> dict[str, int]:
    """`_peak` of each candidate; nothing on the CPU, and for what doesn't fit beside the caching allocator's
    other blocks."""
    found = {}
    for name in names if case.device.startswith("cuda") else ():
        announce(f"{name}: weigh")
        try:
            found[name] = _peak(op, case, op.by_name[name])
        except Exception as error:
            _reason(op.by_name[name], error)  # what breaks the device is out; else it was timed, which counts
        _release(case)
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
    timed: Collection[str],
    sets: Sequence[tuple[list[Any], list[Any]]],
    timer: Timer,
    budget_s: float,
    clock: Callable[[], float],
    announce: Announce,
) -> tuple[dict[str, Timing], dict[str, str]]:
    samplers: dict[str, Callable[[], float]] = {}
    rejected: dict[str, str] = {}
    for candidate in op.candidates:
        if candidate.name not in timed:
            continue
        unfit = _unfit(candidate, regime)
        if unfit:
            rejected[candidate.name] = unfit
            continue
        announce(f"{candidate.name}: measure ({regime})")
        call = _in_situ(candidate.implementation) if regime == "compiled" else candidate.implementation
        try:
            samplers[candidate.name] = timer.sampler(work(op, case, call, sets))
        except Exception as error:
            rejected[candidate.name] = _reason(candidate, error)
    while op.incumbent.name in samplers:
        try:
            watched = {name: _watched(name, sample, announce) for name, sample in samplers.items()}
            return interleave(watched, budget_s, clock), rejected
        except _Failed as failed:  # it is out, and the others start again
            rejected[failed.candidate] = _reason(op.by_name[failed.candidate], failed.error)
            del samplers[failed.candidate]
    raise ContestError(f"{op.name}: the incumbent can't be measured: {rejected[op.incumbent.name]}")


class _Failed(Exception):
    def __init__(self, candidate: str, error: Exception) -> None:
        super().__init__(candidate)
        self.candidate, self.error = candidate, error


def _watched(name: str, sample: Callable[[], float], announce: Announce) -> Callable[[], float]:
    """`sample`, with the candidate's name on what goes wrong in it, also on a crash or a hang."""

    def watched() -> float:
        announce(name)
        try:
            return sample()
        except Exception as error:
            raise _Failed(name, error) from error

    return watched


def _unfit(candidate: Candidate, regime: str) -> str | None:
    if regime == "graph" and not candidate.capturable:
        return "can't be captured in a CUDA graph"
    if regime == "compiled" and candidate.name == "compiled":
        return "is the same as eager inside a compiled region"
    if regime == "compiled" and not candidate.traceable:
        return "can't be traced by torch.compile"
    return None


def _in_situ(call: Callable[..., Any]) -> Callable[..., Any]:
    """The op inside a compiled region with pointwise neighbours, so that losing their fusion counts."""

    def region(*args: Any) -> Any:
        outputs = call(*[a * 1.5 if _is_floating(a) and a.dim() > 1 else a for a in args])
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return tuple(out * 1.5 if _is_floating(out) else out for out in outputs)

    compiled: Callable[..., Any] = torch.compile(region, fullgraph=True)
    return compiled


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _verdict(
    op: Op,
    case: Case,
    regime: str,
    hashes: Mapping[str, str],
    passed: Mapping[str, tuple[Errors, bool]],
    timings: Mapping[str, Timing],
    rejected: Mapping[str, str],
    peaks: Mapping[str, int],
    warning: str,
) -> Verdict:
    trials = []
    rejected = {name: _printable(reason) for name, reason in rejected.items()}
    for candidate in op.candidates:
        errors, deterministic = passed.get(candidate.name, (None, candidate.deterministic))
        trials.append(
            Trial(
                candidate.name,
                hashes[candidate.name],
                timings.get(candidate.name),
                errors,
                deterministic,
                rejected.get(candidate.name),
                peaks.get(candidate.name),
                able=not candidate.reasons(case),
            )
        )
    winner, why = decide([trial for trial in trials if not op.by_name[trial.candidate].baseline])
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cost = op.cost(case)
    return Verdict(key(op, case, regime), op.name, regime, winner, why, tuple(trials), cost, date, warning)


def _printable(text: str) -> str:
    """`text` as one line that is safe to print and to keep in a table."""
    return "".join(c if c.isprintable() else " " for c in text)


def _reason(candidate: Candidate, error: Exception) -> str:
    if isinstance(error, Rejected):
        return str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "CUDA out of memory"
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"(its text can't be had: {type(unprintable).__name__})"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # a heading says nothing alone
    reason = f"{type(error).__name__}: {first[:300]}"
    if "CUDA error" in first or "CUDA driver error" in first:
        raise DeviceLost(candidate.name, reason) from error
    return reason


def _release(case: Case) -> None:
    if case.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
