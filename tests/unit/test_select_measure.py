"""Measurement by a fake clock: what is timed, in which order, until when; what a lucky start is worth."""

import itertools
import os
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bakeoff import hardware
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.measure import MARGIN, HostTimer, Timing, input_sets, interleave, work
from bakeoff.select.contests.verdict import TIE, Trial, decide
from bakeoff.select.contests.worker import Worker
from tests.unit import zoo


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> float:
        self.now += seconds
        return seconds


def test_median_percentiles_and_spread() -> None:
    timing = Timing.of([s * 1e-6 for s in range(1, 102)])
    assert (timing.us, timing.samples) == (51, 101)
    assert (timing.p20, timing.p80) == pytest.approx((21, 81))
    assert timing.spread == pytest.approx((60 - 40) / 2 / 51, rel=0.1)
    assert Timing.of([2e-6, 2e-6, 2e-6]).spread == 0
    even = Timing.of([1e-6, 3e-6])
    assert (even.us, even.samples) == (2, 2)


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=50))
def test_timing_is_ordered(seconds: list[float]) -> None:
    timing = Timing.of(seconds)
    assert timing.p20 <= timing.us <= timing.p80
    assert timing.spread >= 0


def test_a_timing_does_not_depend_on_the_order_of_its_samples() -> None:
    assert Timing.of([3e-6, 1e-6, 2e-6]) == Timing.of([1e-6, 2e-6, 3e-6])


def test_the_host_timer_leaves_first_calls_out_and_fills_a_sample() -> None:
    clock = Clock()
    costs = itertools.chain([5.0, 1.0], itertools.repeat(100e-6))  # compiles on its first calls
    calls = []

    def call() -> None:
        calls.append(clock.taking(next(costs)))

    sample = HostTimer("cpu", clock, sample_s=2e-3).sampler([call])
    before = len(calls)
    assert sample() == pytest.approx(100e-6)
    assert len(calls) - before == 20


def test_a_hiccup_at_the_start_does_not_shorten_samples() -> None:
    """A sample of two calls would be filled by draining the queue."""
    clock = Clock()
    costs = itertools.chain([5.0, 1.0, 20e-3, 100e-6], itertools.repeat(100e-6))
    calls = []
    sample = HostTimer("cpu", clock, sample_s=2e-3).sampler([lambda: calls.append(clock.taking(next(costs)))])
    before = len(calls)
    sample()
    assert len(calls) - before == 20


def test_what_takes_long_is_not_called_often_before_it_is_timed() -> None:
    clock, calls = Clock(), []
    sample = HostTimer("cpu", clock).sampler([lambda: calls.append(clock.taking(1.0))])
    assert len(calls) == 4
    assert sample() == pytest.approx(1.0)
    assert len(calls) == 5


def test_a_long_hiccup_does_not_make_a_call_a_slow_one() -> None:
    clock, calls = Clock(), []
    costs = itertools.chain([5.0, 1.0, 0.5], itertools.repeat(100e-6))
    sample = HostTimer("cpu", clock, sample_s=2e-3).sampler([lambda: calls.append(clock.taking(next(costs)))])
    before = len(calls)
    sample()
    assert len(calls) - before == 20


def test_the_host_timer_rotates_inputs() -> None:
    clock = Clock()
    seen: list[int] = []

    def on(i: int) -> object:
        return lambda: (seen.append(i), clock.taking(1e-3))

    sample = HostTimer("cpu", clock, sample_s=6e-3).sampler([on(0), on(1), on(2)])  # type: ignore[list-item]
    seen.clear()
    sample()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_samples_are_taken_in_turn() -> None:
    clock, order = Clock(), []

    def sampler(name: str, seconds: float) -> object:
        def sample() -> float:
            order.append(name)
            return clock.taking(seconds)

        return sample

    timings = interleave({"a": sampler("a", 1e-3), "b": sampler("b", 1.1e-3)}, 10.0, clock)  # type: ignore[dict-item]
    assert order[:6] == ["a", "b", "a", "b", "a", "b"]
    assert timings["a"].us == pytest.approx(1000)
    assert len(order) == 2 * 2 * 7, "constant times are known after the least number of rounds"


def test_measuring_stops_at_the_budget() -> None:
    clock = Clock()
    noisy = itertools.cycle([1.0, 2.0, 3.0])
    interleave({"a": lambda: clock.taking(next(noisy)), "b": lambda: clock.taking(2.0)}, 60.0, clock)
    assert 55 <= clock.now <= 75


def test_a_hopeless_contestant_is_sampled_no_further() -> None:
    clock, count = Clock(), [0]

    def slow() -> float:
        count[0] += 1
        return clock.taking(1.0)

    timings = interleave(
        {"a": lambda: clock.taking(0.1), "b": lambda: clock.taking(0.1), "c": slow}, 100.0, clock
    )
    assert count[0] == 3
    assert timings["c"].us == pytest.approx(1e6)


@pytest.mark.parametrize("fast_samples", [3, 7, 8, 10])
def test_fast_while_sampled_first_and_slow_later_does_not_count_as_fast(fast_samples: int) -> None:
    clock = Clock()
    costs = itertools.chain([0.5] * fast_samples, itertools.repeat(2.0))
    timings = interleave(
        {"eager": lambda: clock.taking(1.0), "tired": lambda: clock.taking(next(costs))}, 1000.0, clock
    )
    assert timings["tired"].us == pytest.approx(2e6)
    assert decide([Trial(n, "hash", t) for n, t in timings.items()])[0] == "eager"


def test_the_incumbent_and_the_two_best_are_measured_again() -> None:
    clock = Clock()
    counts = dict.fromkeys("abcd", 0)
    cost = {"a": 1.6, "b": 1.0, "c": 1.2, "d": 1.4}

    def sampler(name: str) -> object:
        def sample() -> float:
            counts[name] += 1
            return clock.taking(cost[name])

        return sample

    timings = interleave({n: sampler(n) for n in "abcd"}, 1000.0, clock)  # type: ignore[misc]
    assert counts == {"a": 14, "b": 14, "c": 14, "d": 7}
    assert list(timings) == list("abcd")


def test_work_is_forward_alone_or_forward_and_backward() -> None:
    op = zoo.op()
    for grad in (True, False):
        case = zoo.case(grad=grad)
        sets = input_sets(op, case, 0)
        assert len(sets) == 1
        (step,) = work(op, case, zoo.eager, sets)
        result = step()
        if grad:
            assert [g.shape for g in result] == [(32, 48), (48,)]
        else:
            assert result.shape == (32, 48)


def test_work_of_an_op_with_an_integer_output() -> None:
    case = Case({"x": TensorMeta.dense((8, 16), torch.float32, grad=True)}, "cpu")
    (step,) = work(zoo.ORDER, case, zoo.ORDER.incumbent.implementation, input_sets(zoo.ORDER, case, 0))
    (gradient,) = step()
    assert gradient.shape == (8, 16)


def test_inputs_rotate_through_more_than_the_cache() -> None:
    op, case = zoo.op(), zoo.case(64, 64)
    own = sum(meta.nbytes for meta in case.tensors.values())
    sets = input_sets(op, case, 10 * own)
    assert len(sets) == 10
    assert not torch.equal(sets[0][0][0], sets[1][0][0])
    assert len(input_sets(op, case, 10_000 * own)) == 64
    slow = itertools.count()  # a second between any two looks at the clock
    assert len(input_sets(op, case, 10 * own, lambda: float(next(slow)))) == 3


# ------------------------------------------------------------------------------------------- decide
def trials(**times: float | tuple[float, float]) -> list[Trial]:
    made = []
    for name, value in times.items():
        us, spread = value if isinstance(value, tuple) else (value, 0.0)
        made.append(Trial(name, "hash", Timing(us, us, us, spread, 9)))
    return made


@pytest.mark.parametrize(
    ("times", "winner", "why"),
    [
        ({"eager": 100, "a": 99}, "eager", r"a is only 1.0% faster, within the margin of 3.0%"),
        ({"eager": 100, "a": 97.2}, "eager", "within the margin"),
        ({"eager": 100, "a": 95}, "a", "1.05 times as fast as eager"),
        ({"eager": 100, "a": 120}, "eager", "fastest; a takes 1.20 times as long"),
        ({"eager": (100, 0.05), "a": 92}, "eager", "within the margin of 10.0%"),
        ({"eager": 100, "a": (92, 0.05)}, "eager", "within the margin of 10.0%"),
        ({"eager": 100, "a": 50.2, "b": 50}, "a", "b is within 1% and more complex"),
        ({"eager": 100, "a": 52, "b": 50}, "b", "2.00 times"),
        ({"eager": 100}, "eager", "no other candidate qualified"),
        ({"eager": 103.5, "a": 100.8, "b": 100}, "b", "1.03 times"),  # a is near b but no clear gain
        ({"eager": 100, "a": (90, 0.2), "b": 94}, "b", "1.06 times"),  # a is faster, but who knows
        ({"eager": 100, "compiled": 48, "a": 49}, "a", "compiled is 2.1% faster, but made anew"),
        ({"eager": 100, "compiled": 48, "a": 48.4, "b": 49}, "a", "compiled is 0.8% faster"),
        ({"eager": 100, "compiled": 50.2, "a": 50}, "a", "2.00 times as fast as eager"),
        ({"eager": 100, "compiled": 48, "a": 49.6}, "compiled", "2.08 times"),
        ({"eager": 100, "compiled": 48, "a": (50, 0.03)}, "a", "4.2% faster"),  # or slower: a is noisy
        ({"eager": 100, "compiled": 96, "a": 97.5}, "compiled", "1.04 times"),  # a is no clear gain
        ({"eager": 100, "compiled": 95}, "compiled", "1.05 times"),
    ],
)
def test_decide(times: dict[str, float], winner: str, why: str) -> None:
    chosen, reason = decide(trials(**times))
    assert chosen == winner
    assert why in reason


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 0.3)), min_size=1, max_size=6),
)
def test_a_winner_beats_the_incumbent_beyond_margin_and_noise(times: list[tuple[float, float]]) -> None:
    contestants = trials(**{f"c{i}": time for i, time in enumerate(times)})
    winner, _ = decide(contestants)
    by_name = {t.candidate: t.timing for t in contestants}
    base, best = by_name["c0"], by_name[winner]
    assert base is not None
    assert best is not None
    if winner != "c0":
        assert base.us / best.us > 1 + max(MARGIN, 2 * max(base.spread, best.spread))
    quiet = [
        t for t in by_name.values() if t and base.us / t.us > 1 + max(MARGIN, 2 * max(base.spread, t.spread))
    ]
    assert best.us <= min((t.us for t in quiet), default=best.us) * (1 + TIE)


def test_the_rejected_do_not_compete() -> None:
    out = Trial("a", "hash", Timing(1, 1, 1, 0, 9), rejected="wrong")
    assert decide([*trials(eager=100), out])[0] == "eager"


# ----------------------------------------------------------------------------------- a busy device
def test_no_worker_is_a_stranger_and_any_other_child_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker() as worker, subprocess.Popen(["sleep", "60"]) as child:
        worker.start()
        assert worker.process is not None
        own = f"{os.getpid()}\n{worker.process.pid}\n{child.pid}\n"
        monkeypatch.setattr(hardware, "_nvidia_smi", lambda query: own)
        assert hardware.disturbance("cuda") == "1 other process(es) use the GPU"
        # The host's numbers, in a container: this process, its parent and the worker may be among them.
        monkeypatch.setattr(hardware, "_nvidia_smi", lambda query: "4000001\n4000002\n4000003\n4000004\n")
        assert hardware.disturbance("cuda") == "1 other process(es) use the GPU"
        child.kill()


def test_drift_and_strangers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pulse", lambda device: 1.2)
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda query: "4001\n4002\n4003\n")
    text = hardware.disturbance("cuda", 1.0)
    assert "drifted by +20%" in text
    assert "other process(es) use the GPU" in text
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda query: "")
    assert hardware.disturbance("cuda", 1.19) == ""


def test_the_cpu_has_no_pulse() -> None:
    assert hardware.pulse("cpu") == 0
    assert hardware.disturbance("cpu", hardware.pulse("cpu")) == ""


def test_measuring_goes_on_while_noise_hides_a_gain() -> None:
    """A challenger that is twice as fast on a noisy machine wins, instead of losing for want of samples."""
    clock = Clock()
    noise = itertools.cycle([0.6, 1.7, 1.0, 1.5, 0.7, 1.1, 1.0])
    slow, fast = (lambda: clock.taking(2.0 * next(noise))), (lambda: clock.taking(1.0 * next(noise)))
    timings = interleave({"eager": slow, "fast": fast}, 30.0, clock)
    assert clock.now > 40, "the budget alone leaves it open"
    assert clock.now < 140, "patience ends"
    assert decide([Trial(n, "hash", t) for n, t in timings.items()])[0] == "fast"


def test_a_clear_answer_ends_at_the_budget_however_noisy() -> None:
    clock = Clock()
    noise = itertools.cycle([0.9, 1.1, 1.0])
    interleave(
        {"eager": lambda: clock.taking(next(noise)), "slow": lambda: clock.taking(3 * next(noise))},
        60.0,
        clock,
    )
    assert clock.now < 75


def test_an_incumbent_far_behind_is_measured_as_often_as_the_best() -> None:
    """Few samples have a wide spread, which would keep a hopeless incumbent in place."""
    clock = Clock()
    noise = itertools.cycle([0.7, 1.3, 1.0, 0.9, 1.1])
    timings = interleave(
        {"eager": lambda: clock.taking(4 * next(noise)), "fast": lambda: clock.taking(next(noise))},
        60.0,
        clock,
    )
    assert timings["eager"].samples == timings["fast"].samples
    assert decide([Trial(n, "hash", t) for n, t in timings.items()])[0] == "fast"


def test_measuring_the_limits_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    hardware.ceilings.__wrapped__("cpu")
    hardware.matmul_tflops.__wrapped__("cpu")
    assert torch.equal(before, torch.get_rng_state())
