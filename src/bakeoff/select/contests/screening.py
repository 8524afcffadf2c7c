"""Screening: which launch configurations of the candidates that passed take part in a contest.

A candidate always takes part with its default configuration. Of its other variants as many as the contest has
time for are compiled and verified on one draw. Those that are right are timed against the default, axis by
axis and then the best of the axes together. What beats the default by more than the margin is verified like a
candidate, and the best that passes takes part beside the default. A variant that fails is out alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bakeoff import hardware
from bakeoff.select.contests.examine import examine
from bakeoff.select.contests.failure import printable, reason
from bakeoff.select.contests.judge import Errors
from bakeoff.select.contests.measure import Timer, beats, input_sets, release, timed, work
from bakeoff.select.contests.verify import verify
from bakeoff.select.contests.yardstick import REFERENCE, Yardstick, yardsticks
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.variants import EVERY, at, joined, label, named, variants_of

__all__ = ["Entrant", "Screening"]

_FEW = 2  # variants of an axis that an ordinary contest tries beside the default
_COMPILE_SHARE = 0.5  # of the budget, for compiling them
_TIME_SHARE = 0.25  # of the budget, for timing them; of a thorough contest for each round, on top
_THOROUGH_S = 600.0  # for compiling the variants of a thorough contest
_AT_ONCE = 4  # variants timed at once, beside the default and the best so far: each CUDA graph holds memory
_SHOWN = 4  # fastest variants and failures of a candidate that a table records
_FALLBACKS = 3  # variants of a candidate that may be verified in full, one after the other

Record = dict[str, float | str]
"""By variant microseconds in the screening, or why it is out."""


class Entrant(NamedTuple):
    """A variant that was verified in full and takes part beside its candidate's default."""

    candidate: Candidate
    """The candidate with this variant as its implementation."""
    variant: str
    errors: Errors
    repeats: bool

    @property
    def label(self) -> str:
        return label(self.candidate.name, self.variant)


class Screening:
    """The screening of one contest; `out` names variants already known to be out, with the reason."""

    def __init__(
        self,
        op: Op,
        case: Case,
        out: Mapping[str, str],
        *,
        thorough: bool,
        announce: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.op, self.case, self.thorough = op, case, thorough
        self.announce, self.clock = announce, clock
        self.records: dict[str, Record] = {}
        """By candidate."""
        self.usable: dict[str, dict[str, list[str]]] = {}
        """By candidate and axis the variants that passed on one draw."""
        self.out = out
        for name, variant, why in ((*named(text), why) for text, why in out.items()):
            if variant:
                self.records.setdefault(name, {})[variant] = why

    def compile(self, stick: Yardstick, passed: Sequence[str], budget_s: float) -> None:
        """Compile variants of the candidates in `passed` and verify each on one draw, while there is time:
        the most promising of all candidates and axes first."""
        begun = self.clock()
        limit = _THOROUGH_S if self.thorough else _COMPILE_SHARE * budget_s
        for name, axis, text in self._promising(passed):
            if self.clock() - begun >= limit:
                return
            if self._known(name, text):
                continue
            self.announce(f"{label(name, text)}: compile and verify")
            try:
                verify(self.op, at(self.op.by_name[name], text), [stick])
            except Exception as error:  # whatever a variant raises is its own rejection
                self.reject(name, text, reason(label(name, text), error))
            else:
                self.usable.setdefault(name, {}).setdefault(axis, []).append(text)

    def left(self, budget_s: float) -> float:
        """The part of the budget for measuring that `entrants` leaves."""
        return budget_s * (1 - _TIME_SHARE) if self.usable and not self.thorough else budget_s

    def entrants(
        self, called: Case, timers: Mapping[str, Timer], regimes: Sequence[str], budget_s: float
    ) -> dict[str, Entrant]:
        """By candidate the variant that takes part beside its default, where one does."""
        winners = self._fastest(timers, regimes, budget_s) if self.usable else {}
        release(self.case)
        return self._verified(called, winners)

    def record(self, name: str, chosen: str, *, everything: bool) -> Record:
        """What was tried of a candidate: everything, or the best and some failures, to keep tables short."""
        record = {
            text: printable(v) if isinstance(v, str) else v for text, v in self.records.get(name, {}).items()
        }
        if everything:
            return record
        times = sorted(
            (text for text, v in record.items() if text and not isinstance(v, str)), key=lambda t: record[t]
        )
        failures = [text for text, v in record.items() if isinstance(v, str)]
        shown = {"", chosen, *times[:_SHOWN], *failures[:_SHOWN]}
        return {text: v for text, v in record.items() if text in shown}

    def _fastest(
        self, timers: Mapping[str, Timer], regimes: Sequence[str], budget_s: float
    ) -> dict[str, list[str]]:
        """By candidate the variants that beat its default, the best first."""
        sets = input_sets(self.op, self.case, 3 * hardware.l2_bytes(self.case.device))
        share = _TIME_SHARE * budget_s
        rounds = sum(-(-len(texts) // _AT_ONCE) for axes in self.usable.values() for texts in axes.values())
        rounds += len(self.usable)
        round_s = share if self.thorough else share / rounds
        winners: dict[str, list[str]] = {}
        for name, axes in self.usable.items():
            candidate = self.op.by_name[name]
            timer = timers[self._regime(candidate, timers, regimes)]
            faster = partial(self._faster, candidate, sets, timer, round_s)
            best = {axis: found for axis, texts in axes.items() if (found := self._best(faster, texts))}
            if not best:
                continue
            singles = {axis: found[0] for axis, found in best.items()}
            if len(best) == 1:
                winners[name] = next(iter(best.values()))[:_FALLBACKS]
            else:
                together = joined(singles)
                texts = [text for text in (together, *singles.values()) if not self._known(name, text)]
                winners[name] = faster(texts)[:_FALLBACKS]
        return {name: texts for name, texts in winners.items() if texts}

    def _verified(self, called: Case, winners: Mapping[str, Sequence[str]]) -> dict[str, Entrant]:
        """By candidate the first of its `winners` that passes on every draw."""
        waiting = {name: list(texts) for name, texts in winners.items()}
        entrants: dict[str, Entrant] = {}
        while tried := {
            name: texts.pop(0) for name, texts in waiting.items() if texts and name not in entrants
        }:
            try:
                entrants |= self._passing(called, tried)
            except torch.cuda.OutOfMemoryError:
                for name, text in tried.items():
                    self.reject(name, text, "not enough GPU memory to verify it")
                return entrants
        return entrants

    def reject(self, name: str, text: str, why: str) -> None:
        """Note that a variant is out."""
        self.records.setdefault(name, {})[text] = why

    def _promising(self, passed: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        """(candidate, axis, variant) in the order in which they are tried."""
        queues: list[list[tuple[str, str, str]]] = []
        for name in passed:
            candidate = self.op.by_name[name]
            if candidate is self.op.incumbent or label(name, EVERY) in self.out:
                continue
            try:
                axes = variants_of(candidate, self.case)
            except Exception as error:  # its default has passed, and stays
                self.reject(name, EVERY, f"variants() fails: {reason(name, error)}")
                continue
            for axis, texts in axes.items():
                queues.append([(name, axis, text) for text in (texts if self.thorough else texts[:_FEW])])
        for layer in itertools.zip_longest(*queues):
            yield from filter(None, layer)

    def _known(self, name: str, text: str) -> bool:
        """Whether it is known that this variant is out."""
        return isinstance(self.records.get(name, {}).get(text), str)

    def _regime(self, candidate: Candidate, timers: Mapping[str, Timer], regimes: Sequence[str]) -> str:
        """The regime whose timer shows variants best: the device's time where it can be had."""
        graphs = self.case.device.startswith("cuda") or "graph" in regimes
        if graphs and candidate.capturable and "graph" in timers:
            return "graph"
        return "eager" if "eager" in timers else regimes[0]

    def _best(self, faster: Callable[[Sequence[str]], list[str]], texts: Sequence[str]) -> list[str]:
        """The variants of one axis that beat the default, the best first."""
        best: list[str] = []
        for start in range(0, len(texts), _AT_ONCE):
            found = faster([*best[:1], *texts[start : start + _AT_ONCE]])
            best = [*found, *(text for text in best[1:] if text not in found)]
        return best

    def _faster(
        self,
        candidate: Candidate,
        sets: Sequence[tuple[list[Any], list[Any]]],
        timer: Timer,
        budget_s: float,
        texts: Sequence[str],
    ) -> list[str]:
        """Time `texts` against the default: those that beat it, the fastest first."""
        name = candidate.name
        self.announce(f"{name}: time {len(texts)} variants")
        works = {
            label(name, text): partial(self._work, at(candidate, text), sets, label(name, text))
            for text in ("", *texts)
        }
        timings, failed = timed(works, timer, budget_s, self.clock, self.announce)
        record = self.records.setdefault(name, {})
        for place, timing in timings.items():
            record[named(place)[1]] = round(timing.us, 3)
        for place, why in failed.items():
            self.reject(name, named(place)[1], why)
        if name not in timings:  # the default itself fails: the contest will say so
            return []
        base = timings.pop(name)
        faster = {named(place)[1]: timing.us for place, timing in timings.items() if beats(timing, base)}
        return sorted(faster, key=lambda text: faster[text])

    def _work(self, candidate: Candidate, sets: Any, place: str) -> Any:
        self.announce(place)  # making its sampler runs it
        return work(self.op, self.case, candidate.implementation, sets)

    def _passing(self, called: Case, tried: Mapping[str, str]) -> dict[str, Entrant]:
        """Of one variant a candidate those that pass on every draw."""
        entrants: dict[str, Entrant] = {}
        left = dict(tried)
        for i, stick in enumerate(yardsticks(self.op, self.case, called)):
            for name, text in list(left.items()):
                candidate, place = at(self.op.by_name[name], text), label(name, text)
                self.announce(f"{place}: verify")
                try:
                    errors, repeats = verify(self.op, candidate, [stick])
                    if i == 0:
                        examine(self.op, candidate, stick)
                except Exception as error:
                    self.reject(name, text, reason(place, error))
                    del left[name]
                    entrants.pop(name, None)
                    continue
                if name in entrants:
                    errors = entrants[name].errors.larger(errors)
                    repeats = entrants[name].repeats and repeats
                entrants[name] = Entrant(candidate, text, errors, repeats)
            self.announce(REFERENCE)
        return entrants
