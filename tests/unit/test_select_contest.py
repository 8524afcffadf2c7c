"""The contest as a whole, by fake clocks: who wins in which regime, what is kept, and what ends it."""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from bakeoff.errors import ContestError
from bakeoff.select import Candidate, Case, Op, TensorMeta
from bakeoff.select.contests.contest import contest, regimes_of
from bakeoff.select.contests.failure import DeviceLost
from bakeoff.select.contests.measure import HostTimer, Timer
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.installed import _distributions, package_version
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.compiler import needs_compiler


def trial(verdict: Verdict, name: str) -> Trial:
    return next(t for t in verdict.trials if t.candidate == name)


def timed(build: Callable[[zoo.FakeTime], Op], *regimes: str, for_the_record: bool = False) -> list[Verdict]:
    """A contest in which only the candidates' own costs move the clocks."""
    time = zoo.FakeTime()
    timers: dict[str, Timer] = {
        "eager": HostTimer("cpu", lambda: time.host),
        "graph": HostTimer("cpu", lambda: time.device),
    }
    return contest(
        build(time),
        zoo.case(grad=False),
        regimes or ("eager",),
        timers=timers,
        clock=lambda: time.host,
        budget_s=1.0,
        for_the_record=for_the_record,
    )


def against(host_us: object, device_us: float = 0.0, **declares: object) -> Callable[[zoo.FakeTime], Op]:
    """Eager, 100 us, against one challenger."""
    return lambda time: zoo.op(
        time.costing("challenger", host_us, device_us, **declares),  # type: ignore[arg-type]
        incumbent=time.costing("eager", 100.0),
    )


@pytest.mark.parametrize(
    ("host_us", "winner"),
    [
        (50.0, "challenger"),
        (99.0, "eager"),  # a tie
        (98.0, "eager"),
        (95.0, "challenger"),
        (200.0, "eager"),
        (lambda n: 1e6 if n < 4 else 50.0, "challenger"),  # compiles first: what counts is what comes after
        (lambda n: 50.0 if n < 200 else 300.0, "eager"),  # fast while sampled first
        (lambda n: 150.0 if n < 60 else 50.0, "challenger"),  # warms up slowly
    ],
    ids=["twice as fast", "1 %", "2 %", "5 %", "slow", "slow first call", "slow later", "fast later"],
)
def test_who_wins(host_us: object, winner: str) -> None:
    (verdict,) = timed(against(host_us))
    assert verdict.winner == winner, verdict.why


def test_each_regime_has_its_own_winner() -> None:
    eager, graph = timed(against(200.0, 50.0), "eager", "graph")
    assert (eager.winner, graph.winner) == ("eager", "challenger")
    assert eager.key.endswith(" cpu eager")
    assert graph.key.endswith(" cpu graph")
    assert trial(eager, "challenger").timing != trial(graph, "challenger").timing


def test_what_cannot_be_captured_has_no_time_in_a_graph() -> None:
    eager, graph = timed(against(50.0, capturable=False), "eager", "graph")
    assert eager.winner == "challenger"
    assert graph.winner == "eager"
    assert trial(graph, "challenger").rejected == "can't be captured in a CUDA graph"


def test_a_verdict_keeps_everything() -> None:
    bad = zoo.WRONG["wrong_dw"][0]
    (verdict,) = contest(zoo.op(zoo.GOOD, bad), zoo.case(30, 48), budget_s=0.01)
    assert [t.candidate for t in verdict.trials] == ["eager", "good", "wrong_dw"]
    assert verdict.key == "zoo(x=fp32[32,48]', w=fp32[48]') cpu eager"
    assert (verdict.op, verdict.regime, verdict.warning) == ("zoo", "eager", "")
    assert verdict.cost.bytes == 2 * 32 * 48 * 4
    for name in ("eager", "good"):
        kept = trial(verdict, name)
        assert kept.timing is not None
        assert kept.timing.samples >= 3
        assert kept.errors is not None
        assert len(kept.source_hash) == 12
    assert verdict.ranking()[0] == verdict.winner
    assert set(verdict.ranking()) == {"eager", "good"}
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_what_is_wrong_may_be_timed_for_the_record_and_never_wins() -> None:
    small, alien = zoo.WRONG["wrong_dw"][0], Candidate("alien", lambda *a: zoo.eager(*a).double())
    (verdict,) = contest(zoo.op(small, alien), zoo.case(30, 48), budget_s=0.01, for_the_record=True)
    assert trial(verdict, "wrong_dw").timing is not None
    assert trial(verdict, "wrong_dw").rejected is not None
    assert trial(verdict, "alien").timing is None, "what it returns is another thing altogether"
    assert (verdict.winner, set(verdict.timings)) == ("eager", {"eager"})


def test_the_key_of_a_bucket_is_the_key_of_its_members() -> None:
    op = zoo.op()
    assert len({key(op, zoo.case(rows), "eager") for rows in range(1025, 1281)}) == 1
    assert key(op, zoo.case(1281), "eager") != key(op, zoo.case(1280), "eager")
    assert key(op, zoo.case((4, 320)), "eager") == key(op, zoo.case(1280), "eager")
    assert key(op, zoo.case(8, grad=False), "eager") != key(op, zoo.case(8), "eager")
    assert key(op, zoo.case(8), "compiled") == key(op, zoo.case(80), "compiled")
    for regime in ("eager", "graph", "compiled"):
        bucketed = op.bucket(zoo.case((3, 1000)))
        assert key(op, bucketed, regime) == key(op, zoo.case((3, 1000)), regime)


def test_known_rejections_are_skipped_with_their_reason() -> None:
    def explodes(*_: object) -> None:
        raise AssertionError("must not run")

    op = zoo.op(Candidate("explodes", explodes))
    (verdict,) = contest(op, zoo.case(), budget_s=0.01, skip={"explodes": "crashed: killed by SIGSEGV"})
    assert trial(verdict, "explodes").rejected == "crashed: killed by SIGSEGV"


def test_failing_only_when_timed_rejects_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_until_timed", [0])
    op = zoo.op(Candidate("late", zoo.raises_when_timed), zoo.GOOD)
    (verdict,) = contest(op, zoo.case(), budget_s=0.05)
    assert trial(verdict, "late").rejected == "RuntimeError: out of launches"
    assert trial(verdict, "good").timing is not None


def test_running_out_of_memory_drops_the_candidate() -> None:
    (verdict,) = contest(zoo.op(zoo.WRONG["out_of_memory"][0]), zoo.case(), budget_s=0.01)
    assert trial(verdict, "out_of_memory").rejected == "CUDA out of memory"
    assert verdict.winner == "eager"


def test_no_memory_for_the_contest_itself_is_a_contest_error() -> None:
    with pytest.raises(ContestError, match=r"not enough GPU memory to hold a contest for zoo_full\("):
        contest(zoo.GPU_FULL, zoo.case(), budget_s=0.01)


def test_a_lost_device_is_not_a_mere_rejection() -> None:
    op = zoo.op(Candidate("loses", zoo.loses_the_device))
    with pytest.raises(DeviceLost, match="illegal memory access") as caught:
        contest(op, zoo.case(), budget_s=0.01)
    assert caught.value.candidate == "loses"


def test_bad_arguments_raise_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="w has shape"):
        contest(zoo.op(), zoo.case().replace(w=zoo.case(4, 9).w))


def test_reasons_are_one_printable_line() -> None:
    def hostile(*_: object) -> None:
        raise RuntimeError("\x1b[31mred\x07\tbell\nsecond line")

    (verdict,) = contest(zoo.op(Candidate("hostile", hostile)), zoo.case(), budget_s=0.01)
    reason = trial(verdict, "hostile").rejected
    assert reason == "RuntimeError:  [31mred  bell"


def test_stages_are_announced_with_the_candidate_at_work() -> None:
    heard: list[str] = []
    contest(zoo.op(zoo.GOOD), zoo.case(), budget_s=0.01, announce=heard.append)
    assert heard[0] == "prepare the reference"
    assert "good: compile and verify" in heard
    assert "good: measure (eager)" in heard
    assert heard.count("good") >= 3, "before each sample, so that a crash in it has a name"


def test_regimes_of_devices() -> None:
    assert regimes_of(zoo.case()) == ("eager",)
    assert regimes_of(msgspec.structs.replace(zoo.case(), device="cuda:1")) == ("eager", "graph")


@needs_compiler
def test_the_compiled_regime_is_measured_in_a_compiled_region() -> None:
    traced: list[bool] = []

    def spy(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return torch.tanh(x) * w

    op = zoo.op(
        Candidate("compiled", zoo.eager),
        Candidate("opaque", zoo.eager, traceable=False),
        incumbent=Candidate("eager", zoo.eager),
    )
    torch.compiler.reset()
    (verdict,) = contest(op, zoo.case(grad=False), ("compiled",), budget_s=0.01)
    assert verdict.winner == "eager"
    assert verdict.key == "zoo(x=fp32[*,48], w=fp32[48]) cpu compiled"
    assert trial(verdict, "compiled").rejected == "is the same as eager inside a compiled region"
    assert trial(verdict, "opaque").rejected == "can't be traced by torch.compile"


def test_source_hashes_follow_the_text_of_a_candidates_modules(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def load() -> Any:
        from zoo_kernel_text import call

        return call

    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "zoo_kernel_text.py"
    module.write_text("def call(x, w, flag=None): return x\n")
    first = Candidate("a", load=load).source_hash
    assert Candidate("b", load=load).source_hash == first
    assert Candidate("b", zoo.good).source_hash != first
    module.write_text("def call(x, w, flag=None): return x + 1\n")
    assert Candidate("a", load=load).source_hash != first


def test_a_candidate_defined_in_a_script_has_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: object) -> None: ...

    call.__module__ = "__main__"
    monkeypatch.setattr(
        "sys.modules", {**__import__("sys").modules, "__main__": type("M", (), {"__spec__": None})}
    )
    assert len(Candidate("a", call).source_hash) == 12


def test_the_version_of_what_is_not_installed_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> None:
        raise AssertionError

    monkeypatch.setattr("importlib.metadata.packages_distributions", search)
    _distributions.cache_clear()
    assert package_version("absent_from_here") == "?"
    assert len(Candidate("a", zoo.good, requires=("absent_from_here",)).source_hash) == 12


def test_an_exception_without_a_text_is_a_rejection_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def mute(*_: Any) -> Any:
        raise Mute

    op = zoo.op(Candidate("mute", mute), zoo.GOOD)
    (verdict,) = contest(op, zoo.case(), ("eager",), budget_s=0.01)
    reasons = {trial.candidate: trial.rejected for trial in verdict.trials}
    assert reasons["mute"] == "Mute: (its text can't be had: ValueError)"
    assert reasons[zoo.GOOD.name] is None


def test_a_baseline_is_measured_for_the_record_and_never_chosen() -> None:
    (verdict,) = timed(against(1.0, baseline=True), "eager", for_the_record=True)
    assert verdict.winner == "eager"
    assert all(trial.timing and not trial.rejected for trial in verdict.trials)
    (verdict,) = timed(against(1.0, baseline=True), "eager")
    assert verdict.winner == "eager"
    assert [bool(trial.timing) for trial in verdict.trials] == [True, False]
    assert "a baseline" in (verdict.trials[1].rejected or "")


def test_who_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be weighed is left out, and nobody is weighed on the CPU."""
    module = importlib.import_module("bakeoff.select.contests.contest")
    op, case, said = zoo.op(), zoo.case(4, 8), []
    assert module._peaks(op, case, op.by_name, said.append) == {}
    answers = {"eager": 512}

    def peak(_op: object, _case: object, candidate: Candidate) -> int:
        return answers[candidate.name]

    monkeypatch.setattr(module, "_peak", peak)
    monkeypatch.setattr(module, "release", lambda _: None)
    other = zoo.op(Candidate("other", zoo.good))
    on_gpu = Case(case.args, "cuda")
    assert module._peaks(other, on_gpu, other.by_name, said.append) == {"eager": 512}
    assert said == ["eager: weigh", "other: weigh"]


def test_a_reason_is_more_than_its_heading() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("backend='inductor' raised:\n\n  CppCompileError: no linker\nmore")

    (verdict,) = contest(zoo.op(Candidate("fails", fails)), zoo.case(), budget_s=0.01)
    reason = verdict.trials[1].rejected
    assert reason == "RuntimeError: backend='inductor' raised: CppCompileError: no linker"


def test_the_errors_of_a_verdict_are_the_worst_of_all_draws() -> None:
    """The first draw's here: the one candidate is off by 1e-7 of the first inputs alone."""
    calls = 0

    def off_at_first(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls <= 3:
            y[5] *= 1 + 2e-7

    off = Candidate("off", zoo.product(off_at_first))
    (verdict,) = contest(zoo.op(off, zoo.GOOD), zoo.case(grad=False), budget_s=0.01)
    found = {name: trial(verdict, name).errors for name in ("off", "good")}
    assert found["off"] is not None
    assert found["good"] is not None
    assert found["off"].max > 1.5e-7 > found["good"].max


def test_the_compiled_key_leaves_layouts_out() -> None:
    """While tracing they are unknown: a verdict under another key would never be found."""
    op, dense = zoo.op(), zoo.case(8)
    strided = dense.replace(x=TensorMeta((8, 48), torch.float32, (96, 1), True))
    assert key(op, strided, "compiled") == key(op, dense, "compiled")
    assert key(op, strided, "eager") != key(op, dense, "eager")
