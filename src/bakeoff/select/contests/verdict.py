"""Verdicts: what a contest found, and how it decides."""

from collections.abc import Sequence

import msgspec

from bakeoff.select.contests.judge import Errors
from bakeoff.select.contests.measure import Timing, beats, margin
from bakeoff.select.declare.case import Cost

__all__ = ["Trial", "Verdict", "decide"]

TIE = 0.01  # challengers this close are equal, and the simpler one is taken


class Trial(msgspec.Struct, frozen=True):
    """One candidate's part in a contest: its time and errors, or why it is out. A benchmark may have timed
    one that is out, for the record."""

    candidate: str
    source_hash: str
    timing: Timing | None = None
    errors: Errors | None = None
    deterministic: bool = True
    rejected: str | None = None
    peak_bytes: int | None = None
    """Device memory that one call adds at its peak, outputs and gradients included; benchmarks ask for it."""
    batch_invariant: bool = False
    """Whether it was seen to give an item the same bits however many items there are beside it, in its
    default configuration."""
    able: bool = True
    """Whether it could take the case where and when the contest was held (else `rejected` says why not)."""
    variant: str = ""
    """The launch configuration (`bakeoff.select.declare.variants`) that all this was measured with."""
    variants: dict[str, float | str] = {}
    """Each configuration that was tried: microseconds in the screening, or why it is out."""


class Verdict(msgspec.Struct, frozen=True):
    """The full result of one contest for one key."""

    key: str
    op: str
    regime: str
    winner: str
    why: str
    trials: tuple[Trial, ...]
    cost: Cost
    date: str
    warning: str = ""
    """Why the times deserve little trust (a busy or drifting device), or empty."""
    thorough: bool = False
    """Whether all variants of the candidates that passed took part, and not the first few alone."""

    def variant(self, candidate: str) -> str:
        """The launch configuration that `candidate` was measured with; "" is its default."""
        return next((trial.variant for trial in self.trials if trial.candidate == candidate), "")

    @property
    def timings(self) -> dict[str, Timing]:
        return {t.candidate: t.timing for t in self.trials if t.timing and not t.rejected}

    def ranking(self, *, deterministic: bool = False) -> list[str]:
        """Candidates that may be used, the winner first, then by time."""
        usable = [t for t in self.trials if t.timing and not t.rejected]
        usable = [t for t in usable if t.deterministic or not deterministic]
        usable.sort(key=lambda t: (t.candidate != self.winner, t.timing.us if t.timing else 0.0))
        return [t.candidate for t in usable]


def decide(trials: Sequence[Trial]) -> tuple[str, str]:
    """The winner and why. `trials` stand from the simplest candidate, the incumbent, to the most complex.

    The incumbent stays unless the best challenger beats it by more than max(3 %, twice the spread). By as
    much torch.compile's code must beat the others: each process makes it anew, and not always as fast.
    """
    timed = [(t.candidate, t.timing) for t in trials if t.timing and not t.rejected]
    (incumbent, base), *challengers = timed
    if not challengers:
        return incumbent, "no other candidate qualified"
    better = [(n, t) for n, t in challengers if beats(t, base)]
    if not better:
        name, timing = min(challengers, key=_us)
        gain = base.us / timing.us
        if gain < 1:
            return incumbent, f"fastest; {name} takes {1 / gain:.2f} times as long"
        needed = margin(base, timing)
        return incumbent, f"{name} is only {gain - 1:.1%} faster, within the margin of {needed:.1%}"
    fastest = min(better, key=_us)
    anew, others = dict(better).get("compiled"), [pair for pair in better if pair[0] != "compiled"]
    if anew and others and not beats(anew, min(others, key=_us)[1]):
        better = others
    best_name, best = min(better, key=_us)
    name, timing = next((n, t) for n, t in better if t.us <= best.us * (1 + TIE))
    text = f"{base.us / timing.us:.2f} times as fast as {incumbent}"
    if name != best_name:
        text += f"; {best_name} is within {TIE:.0%} and more complex"
    if fastest[0] != best_name:
        text += f"; {fastest[0]} is {best.us / fastest[1].us - 1:.1%} faster, but made anew in each process"
    return name, text


def _us(contestant: tuple[str, Timing]) -> float:
    return contestant[1].us
