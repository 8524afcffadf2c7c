"""What a plan's runs say: the learning rate of each model, means over seeds, and who is ahead."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bakeoff.apps.compare.judge import CONFIDENCE, winner
from bakeoff.apps.compare.plans.plan import Plan, Setting
from bakeoff.apps.compare.plans.record import Finished

__all__ = ["Line", "Outcome", "outcomes", "spread", "summarise"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A model in one setting. Scores, steps and times are means over the seeds run with its best rate."""

    model: str
    rate: float | None
    """The best by validation; None while that isn't known."""
    edge: bool
    """Whether that is the lowest or highest of several tried, so that a better one may lie beyond."""
    seeds: int
    parameters: int = 0
    validation: float | None = None
    score: float | None = None
    """None where a seed has no finite score."""
    deviation: float | None = None
    farther: float | None = None
    steps: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes_per_s: float = 0.0
    peak_bytes: int | None = None
    tried: dict[str, float | None] = {}
    """Validation by learning rate, of the first seed."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All models in one setting."""

    setting: Setting
    lines: list[Line]
    verdict: str


def outcomes(plan: Plan, done: Mapping[str, Finished]) -> dict[str, list[Finished]]:
    """The runs of `plan` that are done, by setting."""
    found: dict[str, dict[str, Finished]] = {}
    for setting in plan.settings:
        keys = found.setdefault(str(setting), {})
        for entry in plan.entries:
            runs = [*plan.swept(entry, setting), *plan.scored(entry, setting, done)]
            keys |= {run.key: done[run.key] for run in runs if run.key in done}
    return {name: list(runs.values()) for name, runs in found.items()}


def summarise(plan: Plan, done: Mapping[str, Finished]) -> list[Outcome]:
    """The outcome of every setting, as far as its runs are done."""
    found = []
    for setting in plan.settings:
        scores: dict[str, list[float | None]] = {}
        lines = []
        for entry in plan.entries:
            best = plan.best(entry, setting, done)
            runs = [done[run.key] for run in plan.scored(entry, setting, done) if run.key in done]
            scores[entry.name] = [run.score for run in runs]
            tried = {
                run.rate: done[run.key].validation for run in plan.swept(entry, setting) if run.key in done
            }
            ends = {min(entry.rates), max(entry.rates)} if len(entry.rates) > 1 else set()
            lines.append(_line(entry.name, best.rate if best else None, ends, runs, tried))
        found.append(Outcome(setting=setting, lines=lines, verdict=_verdict(scores, plan.seeds, lines)))
    return found


def _line(
    model: str,
    rate: float | None,
    ends: set[float],
    runs: Sequence[Finished],
    tried: Mapping[float, float | None],
) -> Line:
    bits = [run.score for run in runs if run.score is not None]
    whole = bool(bits) and len(bits) == len(runs)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes]
    return Line(
        model=model,
        rate=rate,
        edge=rate in ends,
        seeds=len(runs),
        parameters=runs[0].parameters if runs else 0,
        validation=_mean(run.validation for run in runs),
        score=statistics.fmean(bits) if whole else None,
        deviation=statistics.stdev(bits) if whole and len(bits) > 1 else None,
        farther=_mean(run.farther for run in runs),
        steps=_mean(run.steps for run in runs) or 0.0,
        seconds=_mean(run.seconds for run in runs) or 0.0,
        flops=_mean(run.flops for run in runs) or 0.0,
        bytes_per_s=_mean(run.bytes_per_s for run in runs) or 0.0,
        peak_bytes=max(peaks, default=None),
        tried={f"{rate:g}": value for rate, value in sorted(tried.items())},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _verdict(scores: Mapping[str, Sequence[float | None]], seeds: int, lines: Sequence[Line]) -> str:
    """Who is ahead of all others outside seed noise. With k models the best is compared with k - 1, so each
    comparison has a share of the 5 % (Bonferroni)."""
    if len(scores) < 2:
        return "one model alone: nothing to compare"
    if lost := [name for name, row in scores.items() if any(score is None for score in row)]:
        return f"no winner: runs of {', '.join(lost)} ended without a finite score"
    short = [name for name, row in scores.items() if len(row) < seeds]
    if short:
        return f"unfinished: runs of {', '.join(short)} are missing"
    known = {name: [score for score in row if score is not None] for name, row in scores.items()}
    best, *others = sorted(known, key=lambda name: statistics.fmean(known[name]))
    if seeds < 2:
        return "no winner: one seed does not show seed noise; use --seeds 2 or more (3 are advised)"
    confidence = 1.0 - (1.0 - CONFIDENCE) / len(others)
    tests = {name: winner(known[best], known[name], confidence) for name in others}
    said = "; ".join(
        f"{test.difference:+.4f} ± {test.half_width:.4f} against {name}" for name, test in tests.items()
    )
    level = [name for name, test in tests.items() if test.winner != "first"]
    edges = [line.model for line in lines if line.edge]
    beyond = (
        f". The best learning rate of {', '.join(edges)} is at the end of those tried: try more"
        if edges
        else ""
    )
    if level:
        return (
            f"no winner: {best} does not differ from {', '.join(level)} outside seed noise ({said}){beyond}"
        )
    return f"{best} is ahead of {'the other' if len(others) == 1 else 'all others'} ({said}){beyond}"


def spread(line: Line) -> str:
    """Mean and standard deviation of the scores."""
    if line.score is None:
        return "not finite" if line.seeds else "-"
    return f"{line.score:.4f}" + (f" ± {line.deviation:.4f}" if line.deviation is not None else "")
