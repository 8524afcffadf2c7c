"""Measurement: interleaved, over rotated inputs, until the answer is narrow or the budget is spent.

A timer turns a contestant's work into a sampler, a function that returns one sample in seconds per
call. `interleave` draws samples round-robin, so that drifting clocks hit every contestant alike; `timed` does
so for contestants of which some may fail.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from bakeoff.select.contests.draw import cotangent, inputs
from bakeoff.select.contests.failure import reason
from bakeoff.select.contests.results import gradients, outputs_of
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.op import Op
from bakeoff.timing import Clock, seconds_per_call

__all__ = [
    "GraphTimer",
    "HostTimer",
    "Timer",
    "Timing",
    "Work",
    "beats",
    "interleave",
    "margin",
    "release",
    "timed",
    "work",
]

Work = Sequence[Callable[[], Any]]
"""The same call on different input sets."""
Sampler = Callable[[], float]

_SETS_S = 2.0  # most host seconds spent drawing inputs
_SLOW_S = 0.1  # a call that takes longer is not repeated only to find out how many calls fill a sample
_ENOUGH = 0.004  # sampling ends when every median's relative half width is at most this
_MIN_ROUNDS, _MAX_ROUNDS = 7, 400
MARGIN = 0.03  # a challenger must beat the incumbent by more than this
_HOPELESS = 2.0  # a contestant this many times slower than the best is not sampled any more


class Timing(msgspec.Struct, frozen=True):
    """Microseconds per call: median, 20th and 80th percentile; `spread` is the relative half width of
    the median's 95 % confidence interval."""

    us: float
    p20: float
    p80: float
    spread: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        ordered = sorted(1e6 * s for s in seconds)
        n = len(ordered)
        median = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
        reach = 0.98 * n**0.5
        low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
        spread = (ordered[high] - ordered[low]) / 2 / median if median else 0.0
        return cls(median, ordered[int(0.2 * (n - 1))], ordered[int(0.8 * (n - 1) + 0.999)], spread, n)


class Timer(Protocol):
    """Makes samplers for one way of issuing calls."""

    def sampler(self, work: Work) -> Sampler: ...


class HostTimer:
    """Back-to-back calls by the wall clock, the device's queue drained at the end: what a caller in
    eager mode waits for. On the CPU simply the wall time of a call."""

    def __init__(self, device: str, clock: Clock = time.perf_counter, sample_s: float = 4e-3) -> None:
        self.device, self.clock, self.sample_s = device, clock, sample_s

    def sampler(self, work: Work) -> Sampler:
        def run(calls: int) -> float:
            return seconds_per_call(work, calls, self.device, clock=self.clock)

        run(2)  # first calls compile and allocate
        # The least of some: after a hiccup a sample would be so short that draining fills it.
        each = min(run(1), run(1))
        if each < _SLOW_S:
            each = max(min(run(2) for _ in range(3)), 1e-9)
        calls = max(1, min(1000, round(self.sample_s / each)))
        return lambda: run(calls)


class GraphTimer:
    """Replays of a CUDA graph that holds one call per input set: device time without the host's. Calls that
    the host issues so slowly that capturing all would take `capture_s` are held fewer times."""

    def __init__(self, device: str, capture_s: float = 0.5) -> None:
        self.device, self.capture_s = device, capture_s

    def sampler(self, work: Work) -> Sampler:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                issue_s = math.inf
                for call in list(work[:2]) * 2:
                    issue_s = min(issue_s, seconds_per_call([call], 1, self.device, host_only=True))
            torch.cuda.current_stream().wait_stream(side)
            work = work[: max(1, int(self.capture_s / max(issue_s, 1e-9)))]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in work:
                    call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            with torch.cuda.device(self.device):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3 / len(work)

        sample()
        return sample


def work(op: Op, case: Case, call: Callable[..., Any], sets: Sequence[tuple[list[Any], list[Any]]]) -> Work:
    """The calls to time: forward, and backward too (with ready-made gradients) when the case needs it. An op
    that writes in place goes on from what its last call has left, as an optimizer does."""

    def forward(args: list[Any]) -> Callable[[], Any]:
        return lambda: call(*args)

    def both(args: list[Any], dys: list[Any]) -> Callable[[], Any]:
        def step() -> Any:
            outputs = call(*args)
            return gradients(outputs if isinstance(outputs, tuple | list) else (outputs,), args, dys)

        return step

    return [both(args, dys) if case.needs_grad else forward(args) for args, dys in sets]


def input_sets(
    op: Op, case: Case, beyond_bytes: int, clock: Clock = time.perf_counter
) -> list[tuple[list[Any], list[Any]]]:
    """Enough (arguments, output gradients) sets to exceed `beyond_bytes` (three times the L2). Where a call
    launches so much that they would take seconds it is fewer, at least two."""
    own = max(sum(meta.nbytes for meta in case.data.values()), 1)
    count = max(1, min(64, -(-beyond_bytes // own)))
    sets: list[tuple[list[Any], list[Any]]] = []
    quickest = math.inf
    for seed in range(count):
        if len(sets) >= 2 and len(sets) * quickest > _SETS_S:
            break
        begin = clock()
        args = inputs(op, case, seed)
        dys: list[Any] = []
        if not op.mutates:
            with torch.no_grad():
                outputs = outputs_of(op.incumbent.implementation, args)
            dys = [cotangent(out, args, seed) for out in outputs] if case.needs_grad else []
        sets.append((args, dys))
        quickest = min(quickest, clock() - begin)
    return sets


def release(case: Case) -> None:
    """Give device memory that nothing holds any more back to the device."""
    if case.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()


def interleave(
    samplers: Mapping[str, Sampler], budget_s: float, clock: Clock = time.perf_counter
) -> dict[str, Timing]:
    """Sample every contestant in turn, then the first (the incumbent) and the two best once more.

    For these the second pass counts alone: neither a lucky first pass nor one that was fast only at
    first can win.
    """
    first = _rounds(samplers, list(samplers), clock() + budget_s * 2 / 3, clock, hopeless=_HOPELESS)
    finalists = {*list(samplers)[:1], *sorted(first, key=lambda name: first[name].us)[:2]}
    order = [name for name in samplers if name in finalists]
    return {**first, **_rounds(samplers, order, clock() + budget_s / 3, clock, patience_s=3 * budget_s)}


def timed(
    works: Mapping[str, Callable[[], Work]],
    timer: Timer,
    budget_s: float,
    clock: Clock,
    announce: Callable[[str], None],
) -> tuple[dict[str, Timing], dict[str, str]]:
    """`interleave` of the contestants that can be sampled, and why the others can't; no times where the first
    is among these. Before each sample the contestant's name is announced: it may crash or hang in it."""
    failed: dict[str, str] = {}
    samplers: dict[str, Sampler] = {}
    for name, make in works.items():
        try:
            samplers[name] = timer.sampler(make())
        except Exception as error:  # whatever a contestant raises
            failed[name] = reason(name, error)
    while samplers and next(iter(works)) in samplers:
        try:
            watched = {name: _watched(name, sample, announce) for name, sample in samplers.items()}
            return interleave(watched, budget_s, clock), failed
        except _Failed as failure:  # it is out, and the others start again
            failed[failure.name] = reason(failure.name, failure.error)
            del samplers[failure.name]
    return {}, failed


class _Failed(Exception):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


def _watched(name: str, sample: Sampler, announce: Callable[[str], None]) -> Sampler:
    def watched() -> float:
        announce(name)
        try:
            return sample()
        except Exception as error:
            raise _Failed(name, error) from error

    return watched


def beats(challenger: Timing, base: Timing) -> bool:
    """Whether the challenger is faster by more than the `margin`."""
    return base.us / challenger.us > 1 + margin(base, challenger)


def margin(base: Timing, challenger: Timing) -> float:
    """By how much (relatively) a challenger must beat the incumbent for its gain to be no noise."""
    return max(MARGIN, 2 * max(base.spread, challenger.spread))


def _rounds(
    samplers: Mapping[str, Sampler],
    names: list[str],
    deadline: float,
    clock: Clock,
    *,
    hopeless: float = math.inf,
    patience_s: float = 0.0,
) -> dict[str, Timing]:
    """Sample `names` in turn until `deadline`; past it for `patience_s` more while noise hides the winner."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(_MAX_ROUNDS):
        for name in names:
            seconds[name].append(samplers[name]())
        if done + 1 < 3:
            continue
        timings = {name: Timing.of(seconds[name]) for name in names}
        best = min(t.us for t in timings.values())
        names = [name for name in names if timings[name].us <= hopeless * best]
        if done + 1 >= _MIN_ROUNDS and all(timings[name].spread <= _ENOUGH for name in names):
            break
        late = clock() - deadline
        if late >= patience_s or (late >= 0 and not _hidden([timings[name] for name in names])):
            break
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def _hidden(timings: Sequence[Timing]) -> bool:
    """Whether a gain over the first, the incumbent, would count were it not for the spread."""
    base, *challengers = timings
    return any(MARGIN < base.us / t.us - 1 <= margin(base, t) for t in challengers)
