"""Variants: launch configurations of one candidate, tried, verified, stored and used."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bakeoff import hardware
from bakeoff.select import Candidate, Case, Op, call, find_op, registry
from bakeoff.select.choose import policy, traced
from bakeoff.select.choose.dispatch import choose
from bakeoff.select.choose.explain import explain_case
from bakeoff.select.choose.policy import Settings
from bakeoff.select.choose.table import Found, Table, read, write
from bakeoff.select.choose.tune import tune
from bakeoff.select.contests import screening
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.measure import HostTimer
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.contests.worker import Worker
from bakeoff.select.declare import variants
from bakeoff.select.declare.key import key
from tests.unit import verdicts, zoo
from tests.unit.compiler import needs_compiler
from tests.unit.zoo import text_of

pytestmark = pytest.mark.usefixtures("forked_workers")

Cost = Callable[[int, int], float]
find_op("rms_norm")  # declares all
OPS = tuple(registry.values())


def trial(verdict: Verdict, name: str = "tiled") -> Trial:
    return next(t for t in verdict.trials if t.candidate == name)


def held(
    build: Callable[[zoo.FakeTime], Candidate],
    *,
    grad: bool = True,
    **options: Any,
) -> Verdict:
    """A contest of eager, 100 us, and what `build` makes, in which only their costs move the clocks."""
    time = zoo.FakeTime()
    op = zoo.op(build(time), incumbent=time.costing("eager", 100.0))
    timers = {"eager": HostTimer("cpu", lambda: time.host)}
    options = {"budget_s": 1.0, **options}
    (verdict,) = contest(
        op, zoo.case(grad=grad), ("eager",), timers=timers, clock=lambda: time.host, **options
    )
    return verdict


def tiles(us: Cost, *axes: Any, **declares: Any) -> Callable[[zoo.FakeTime], Candidate]:
    return lambda time: time.tiled("tiled", us, *axes, **declares)


def by_rows(us: Mapping[int, float]) -> Cost:
    return lambda forward, backward: us[forward]


# ------------------------------------------------------------------------------------------------ text
@pytest.mark.parametrize("text", ["", text_of(4), text_of(0, 4), text_of(4, 2), "backward(LEFT=-2,a_1=0)"])
def test_a_text_falls_into_its_axes(text: str) -> None:
    axes = variants.parts(text)
    assert variants.joined(axes) == text
    assert all(part.startswith(f"{axis}(") for axis, part in axes.items())


@pytest.mark.parametrize(
    "text",
    [
        "forward", "forward()", "forward(rows)", "forward(rows=)", "forward(rows=4.0)", "forward(rows=4,)",
        "forward(rows=4) forward(rows=4)", "backward(rows=4) forward(rows=4)", "forward(rows=4", "*", " ",
        "forward(rows=4)  backward(rows=4)", " forward(rows=4)", "forward(rows=4)\n", "sideways(rows=4)",
        "FORWARD(rows=4)", "forward(rows=9999999999)", "forward(rows=4);import os", "forward(__class__=4)",
        "forward(rows=\u0664)", "forward(" + ",".join(f"a{i}=1" for i in range(200)) + ")",
    ],
)  # fmt: skip
def test_anything_else_is_no_variant(text: str) -> None:
    with pytest.raises(ValueError, match="is no variant"):
        variants.parts(text)


def test_variants_of_a_candidate_leave_out_the_default_and_repetitions() -> None:
    tiled = Candidate("tiled", zoo.Tiled(lambda f, b: zoo.good, [1, 2, 2, 4], [8, 4]))
    assert variants.variants_of(tiled, zoo.case()) == {
        "forward": (text_of(2), text_of(4)),
        "backward": (text_of(0, 4),),
    }
    assert variants.variants_of(tiled, zoo.case(grad=False)) == {"forward": (text_of(2), text_of(4))}
    assert variants.variants_of(zoo.GOOD, zoo.case()) == {}, "a plain function has none"
    many = Candidate("many", zoo.Tiled(lambda f, b: zoo.good, range(1, 500)))
    assert len(variants.variants_of(many, zoo.case())["forward"]) == variants.MOST - 1


def test_a_label_names_candidate_and_variant() -> None:
    for name, text in [
        ("tiled", ""),
        ("tiled", text_of(2, 4)),
        ("a b", text_of(0, 4)),
        ("tiled", variants.EVERY),
    ]:
        assert variants.named(variants.label(name, text)) == (name, text)


def test_a_candidate_at_a_variant() -> None:
    tiled = zoo.Tiled(lambda f, b: zoo.product(), [1, 2])
    candidate = Candidate("tiled", tiled)
    assert variants.bound(candidate, "") is tiled
    assert variants.at(candidate, "") is candidate
    there = variants.at(candidate, text_of(2))
    assert (there.name, there.call) == ("tiled", tiled.bound[text_of(2)])


@pytest.mark.parametrize("name", sorted(o.name for o in OPS))
def test_kernels_of_the_package_speak_this_language(name: str) -> None:
    """Every variant that a kernel lists can be stored, read back and bound."""
    op = find_op(name)
    for candidate in op.candidates:
        if not candidate.launches or candidate.absent:
            continue
        for case in {repr(case): case for case in map(op.bucket, op.cases()[::4])}.values():
            axes = variants.variants_of(candidate, case)
            for combination in itertools.zip_longest(*axes.values()):
                text = " ".join(filter(None, combination))
                assert variants.unusable(candidate, case, text) is None
                there = variants.bound(candidate, text)
                assert there is variants.bound(candidate, text), "torch.compile guards on it"


# --------------------------------------------------------------------------------------------- contests
def test_the_best_variant_is_chosen_and_stored() -> None:
    verdict = held(tiles(by_rows({1: 90, 2: 70, 4: 50}), [1, 2, 4]), grad=False)
    assert (verdict.winner, verdict.thorough) == ("tiled", False)
    kept = trial(verdict)
    assert kept.variant == text_of(4)
    assert verdict.variant("tiled") == text_of(4)
    assert verdict.variant("eager") == ""
    assert kept.timing is not None
    assert kept.timing.us == pytest.approx(50)
    assert kept.errors is not None
    assert kept.variants == {
        "": pytest.approx(90),
        text_of(2): pytest.approx(70),
        text_of(4): pytest.approx(50),
    }
    assert trial(verdict, "eager").variants == {}
    assert verdict.why == "2.00 times as fast as eager"


def test_a_variant_within_the_noise_is_not_chosen() -> None:
    kept = trial(held(tiles(by_rows({1: 50, 2: 49, 4: 51}), [1, 2, 4]), grad=False))
    assert kept.variant == ""
    assert kept.timing is not None
    assert kept.timing.us == pytest.approx(50)
    assert kept.variants.keys() == {"", text_of(2), text_of(4)}


def test_a_variant_can_win_where_the_default_would_lose() -> None:
    verdict = held(tiles(by_rows({1: 120, 2: 60}), [1, 2]), grad=False)
    assert (verdict.winner, trial(verdict).variant) == ("tiled", text_of(2))


def test_the_best_of_each_axis_compete_together() -> None:
    us: Cost = lambda forward, backward: {1: 50, 2: 40}[forward] + {1: 40, 8: 10}[backward]  # noqa: E731
    kept = trial(held(tiles(us, [1, 2], [1, 8])))
    assert kept.variant == text_of(2, 8)
    assert kept.variants == {
        "": pytest.approx(90),
        text_of(2): pytest.approx(80),
        text_of(0, 8): pytest.approx(60),
        text_of(2, 8): pytest.approx(50),
    }


def test_an_axis_at_its_best_alone_may_beat_the_two_together() -> None:
    us = {(1, 1): 90.0, (2, 1): 80.0, (1, 8): 60.0, (2, 8): 85.0}
    assert trial(held(tiles(lambda f, b: us[f, b], [1, 2], [1, 8]))).variant == text_of(0, 8)


def _wrong_at(time: zoo.FakeTime, wrong: Callable[[int, int], bool], us: Cost, *axes: Any) -> Candidate:
    def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
        call = time.costing("tiled", us(forward.rows, backward.rows)).call
        return (lambda *a: call(*a) * 1.01) if wrong(forward.rows, backward.rows) else call

    return Candidate("tiled", zoo.Tiled(run, *axes))


def test_a_wrong_variant_is_out_and_its_candidate_stays() -> None:
    us = by_rows({1: 50, 2: 10, 4: 40})
    verdict = held(lambda time: _wrong_at(time, lambda f, b: f == 2, us, [1, 2, 4]), grad=False)
    kept = trial(verdict)
    assert (verdict.winner, kept.variant, kept.rejected) == ("tiled", text_of(4), None)
    assert "output is wrong" in str(kept.variants[text_of(2)])


def test_a_combination_that_is_wrong_falls_back_to_one_axis() -> None:
    us: Cost = lambda forward, backward: {1: 50, 2: 40}[forward] + {1: 40, 8: 10}[backward]  # noqa: E731
    kept = trial(held(lambda time: _wrong_at(time, lambda f, b: (f, b) == (2, 8), us, [1, 2], [1, 8])))
    assert kept.variant == text_of(0, 8)
    assert kept.rejected is None
    assert "output is wrong" in str(kept.variants[text_of(2, 8)])


def test_a_variant_right_on_one_draw_alone_is_out() -> None:
    def build(time: zoo.FakeTime) -> Candidate:
        def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
            call = time.costing("tiled", 100.0 / forward.rows).implementation
            return (lambda *a: _whole_tiles(call(*a))) if forward.rows == 2 else call

        return Candidate("tiled", zoo.Tiled(run, [1, 2]))

    kept = trial(held(build, grad=False))
    assert (kept.rejected, kept.variant) == (None, "")
    assert "output is wrong" in str(kept.variants[text_of(2)])
    assert "x [3, 9, 48]" in str(kept.variants[text_of(2)]), "a relative has an odd number of rows"


def _whole_tiles(y: torch.Tensor) -> torch.Tensor:
    """`y` without the rows that fill no tile of 16."""
    y[y.shape[0] // 16 * 16 :] = 0
    return y


def test_a_variant_that_turns_wrong_while_it_is_timed_leaves_the_default() -> None:
    last: list[str] = []

    def hear(stage: str) -> None:
        last.extend([stage] if stage == f"tiled {text_of(2)}: measure (eager)" else [])

    def build(time: zoo.FakeTime) -> Candidate:
        fast, slow = time.costing("tiled", 20.0).call, time.costing("tiled", 80.0).call

        def turning(*args: Any) -> Any:
            return fast(*args) * (2 if last else 1)

        return Candidate("tiled", zoo.Tiled(lambda f, b: turning if f.rows == 2 else slow, [1, 2]))

    verdict = held(build, grad=False, announce=hear)
    kept = trial(verdict)
    assert (verdict.winner, kept.variant, kept.rejected) == ("tiled", "", None)
    assert str(kept.variants[text_of(2)]).startswith(
        f"after tiled {text_of(2)} had been timed: output is wrong"
    )
    assert kept.timing is not None
    assert kept.timing.us == pytest.approx(80)


def test_a_variant_that_fails_when_it_is_timed_is_out() -> None:
    def build(time: zoo.FakeTime) -> Candidate:
        call, calls = time.costing("tiled", 50.0).call, [0]

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] > 6:
                raise RuntimeError("out of launches")
            return call(*args)

        return Candidate("tiled", zoo.Tiled(lambda f, b: failing if f.rows == 2 else call, [1, 2, 4]))

    kept = trial(held(build, grad=False))
    assert kept.rejected is None
    assert kept.variants[text_of(2)] == "RuntimeError: out of launches"
    assert isinstance(kept.variants[text_of(4)], float)


def test_a_candidate_that_fails_to_list_its_variants_stays() -> None:
    class Broken(zoo.Tiled):
        def variants(self, case: Case) -> Any:
            raise KeyError("sms")

    verdict = held(
        lambda time: Candidate("tiled", Broken(lambda f, b: time.costing("tiled", 50.0).call, [1, 2]))
    )
    assert verdict.winner == "tiled"
    assert trial(verdict).variants == {"*": "variants() fails: KeyError: 'sms'"}


def test_what_is_out_is_not_asked_for_its_variants() -> None:
    tiled = zoo.Tiled(lambda f, b: zoo.product(lambda x, w, y: y * 2), [1, 2])
    (verdict,) = contest(zoo.op(Candidate("tiled", tiled)), zoo.case(), budget_s=0.01)
    assert trial(verdict).rejected
    assert not tiled.asked
    assert not tiled.bound


# ---------------------------------------------------------------------------------------- how many, how long
def test_an_ordinary_contest_tries_two_of_an_axis_and_a_thorough_one_all() -> None:
    us: Cost = lambda forward, backward: 100 - 3 * forward - 2 * backward  # noqa: E731
    ordinary, thorough = (
        held(tiles(us, range(1, 21), range(1, 11)), thorough=thorough, for_the_record=True)
        for thorough in (False, True)
    )
    assert trial(ordinary).variants.keys() == {
        "",
        *map(text_of, (2, 3)),
        text_of(0, 2),
        text_of(0, 3),
        text_of(3, 3),
    }
    singles = {*map(text_of, range(2, 21)), *(text_of(0, rows) for rows in range(2, 11))}
    assert trial(thorough).variants.keys() == {"", *singles, text_of(20, 10)}
    assert (trial(ordinary).variant, trial(thorough).variant) == (text_of(3, 3), text_of(20, 10))
    assert (ordinary.thorough, thorough.thorough) == (False, True)


def test_a_thorough_contest_tries_at_most_64_of_an_axis() -> None:
    verdict = held(tiles(lambda f, b: 50 + f, range(1, 300)), grad=False, thorough=True, for_the_record=True)
    assert len(trial(verdict).variants) == variants.MOST


def test_a_table_records_the_best_and_some_failures() -> None:
    us: Cost = lambda forward, backward: 90 - forward  # noqa: E731
    build = lambda time: _wrong_at(time, lambda f, b: f > 20, us, range(1, 41))  # noqa: E731
    record = trial(held(build, grad=False, thorough=True)).variants
    times = [text for text, value in record.items() if isinstance(value, float)]
    assert {"", *map(text_of, (17, 18, 19, 20))} == {*times}
    assert len(record) - len(times) == 4


@pytest.mark.parametrize(("budget_s", "compiled"), [(1.0, 1), (3.0, 2), (8.0, 4), (0.0, 0)])
def test_compiling_variants_takes_a_share_of_the_budget(budget_s: float, compiled: int) -> None:
    """Each takes a second to compile; the most promising of each axis come first."""

    def build(time: zoo.FakeTime) -> Candidate:
        def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
            first = iter([1e6] if (forward.rows, backward.rows) != (1, 1) else [])
            return time.costing("tiled", lambda n: next(first, 50.0)).call

        return Candidate("tiled", zoo.Tiled(run, [1, 2, 3], [1, 2, 3]))

    record = trial(held(build, budget_s=budget_s)).variants
    order = [text_of(2), text_of(0, 2), text_of(3), text_of(0, 3)]
    assert record.keys() - {""} == {*order[:compiled]}


def test_screening_takes_a_share_of_the_budget() -> None:
    """With the measurement after it it takes no longer than the measurement alone would."""
    took = []
    for axes in ([1], [1, 2, 3]):
        time = zoo.FakeTime()
        op = zoo.op(
            time.tiled("tiled", by_rows({1: 5e3, 2: 4.9e3, 3: 5.1e3}), axes),
            incumbent=time.costing("eager", 9e3),
        )
        begun: list[float] = []
        timers = {"eager": HostTimer("cpu", lambda time=time: time.host)}
        contest(
            op, zoo.case(grad=False), ("eager",), budget_s=4.0, timers=timers,
            clock=lambda time=time: time.host, ready=lambda time=time, begun=begun: begun.append(time.host),
        )  # fmt: skip
        took.append(time.host - begun[0])
    assert took[1] < took[0] + 1.5


def test_variants_compile_before_the_device_is_asked_for_and_are_timed_after() -> None:
    heard: list[str] = []
    held(
        tiles(by_rows({1: 90, 2: 50}), [1, 2]),
        grad=False,
        announce=heard.append,
        ready=lambda: heard.append("READY"),
    )
    ready = heard.index("READY")
    assert f"tiled {text_of(2)}: compile and verify" in heard[:ready]
    assert f"tiled {text_of(2)}" not in heard[:ready]
    assert "tiled: time 1 variants" in heard[ready:]
    assert f"tiled {text_of(2)}: verify" in heard[ready:]
    assert f"tiled {text_of(2)}: measure (eager)" in heard[ready:]


def test_few_variants_are_timed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold a CUDA graph with memory of its own."""
    most = []
    timed = screening.timed
    monkeypatch.setattr(
        screening, "timed", lambda works, *rest: (most.append(len(works)), timed(works, *rest))[1]
    )
    verdict = held(tiles(lambda f, b: 50 + (f - 30) ** 2 / 100, range(1, 60)), grad=False, thorough=True)
    assert trial(verdict).variant == text_of(30)
    assert max(most) <= 6


def test_variants_are_screened_by_device_time() -> None:
    """A tiling shows there; what the host takes decides in its own regime, and there the default stays."""
    time = zoo.FakeTime()

    def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
        return time.costing("tiled", 50.0, {1: 40.0, 2: 20.0}[forward.rows]).call

    op = zoo.op(Candidate("tiled", zoo.Tiled(run, [1, 2])), incumbent=time.costing("eager", 100.0))
    timers = {"eager": HostTimer("cpu", lambda: time.host), "graph": HostTimer("cpu", lambda: time.device)}
    eager, graph = contest(
        op, zoo.case(grad=False), ("eager", "graph"), timers=timers, clock=lambda: time.host, budget_s=1.0
    )
    assert (trial(eager).variant, trial(graph).variant) == ("", text_of(2))
    assert trial(eager).variants == trial(graph).variants
    assert trial(graph).variants[text_of(2)] == pytest.approx(20)


# -------------------------------------------------------------------------------------------- in a worker
@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(stage_limit_s=3) as made:
        yield made


def test_a_variant_that_crashes_or_hangs_is_out_and_its_candidate_stays(worker: Worker) -> None:
    (verdict,) = worker.contest(zoo.TILES, zoo.case(), ("eager",), 1.0)
    crashing, hanging = trial(verdict, "crashing_tiles"), trial(verdict, "hanging_tiles")
    assert crashing.rejected is hanging.rejected is None
    assert crashing.variants[text_of(2)] == "crashed: killed by SIGABRT (free(): invalid pointer)"
    assert isinstance(crashing.variants[text_of(4)], float)
    assert hanging.variants[text_of(4)] == "hangs: no answer for 3 s"
    assert isinstance(hanging.variants[text_of(2)], float)


def test_after_some_deaths_no_variant_of_a_candidate_is_tried(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bakeoff.select.contests.worker._MOST_DEATHS", 2)
    (verdict,) = worker.contest(zoo.DEADLY_TILES, zoo.case(), ("eager",), 1.0, thorough=True)
    kept = trial(verdict, "deadly_tiles")
    assert kept.rejected is None
    assert kept.variants.keys() == {text_of(2), text_of(3), variants.EVERY}
    assert kept.variants[variants.EVERY] == "2 of its variants ended the process they ran in"
    assert verdict.thorough


# ------------------------------------------------------------------------------------------ tables and use
CASE = zoo.case(8, 16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with verdicts.no_verdicts(tmp_path, monkeypatch) as folder:
        yield folder


def runs_as(said: list[str]) -> Op:
    """An op whose candidate says in which configuration it runs."""

    def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
        def says(*args: Any) -> Any:
            said.append(f"{forward.rows}/{backward.rows}")
            return zoo.good(*args)

        return says

    return zoo.op(Candidate("tiled", zoo.Tiled(run, [1, 2, 4], [1, 8])), name="zoo_tiled")


def stored(op: Op, variant: str, **changes: Any) -> Verdict:
    verdict = verdicts.made(op, CASE, {"eager": 100.0, "tiled": 40.0}, "tiled")
    eager, tiled = verdict.trials
    record = {"": 50.0, variant: 40.0, text_of(4): "hangs: no answer for 3 s"}
    tiled = msgspec.structs.replace(tiled, **{"variant": variant, "variants": record, **changes})
    return msgspec.structs.replace(verdict, trials=(eager, tiled))


def called(op: Op, **options: Any) -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    call(op, x, w, None, **options)


def test_calls_run_the_variant_of_the_verdict(cache: Path) -> None:
    said: list[str] = []
    op = runs_as(said)
    policy.store.add([stored(op, text_of(2, 8))], "cpu")
    for _ in range(3):
        called(op)
    assert said == ["2/8"] * 3
    tiled: Any = op.by_name["tiled"].call
    assert list(tiled.bound) == [text_of(2, 8)], "the memo holds what was bound"
    found = explain_case(op, CASE)
    assert (found.choice, found.variant) == ("tiled", text_of(2, 8))
    assert f"choice: tiled {text_of(2, 8)} (made to win" in str(found)
    assert found.rows[1].why == f"made to win; as {text_of(2, 8)} (1.25 times as fast as its default)"


def test_a_table_keeps_variants(cache: Path) -> None:
    op = runs_as([])
    verdict = stored(op, text_of(2, 8))
    policy.store.add([verdict], "cpu")
    assert read(policy.store.path("cpu")).rows[verdict.key] == verdict


def test_tables_from_before_variants_are_read(cache: Path) -> None:
    said: list[str] = []
    op = runs_as(said)
    policy.store.add([stored(op, "")], "cpu")
    path = policy.store.path("cpu")
    table = msgspec.json.decode(path.read_bytes())
    for row in table["rows"].values():
        del row["thorough"]
        for old in row["trials"]:
            del old["variant"], old["variants"]
    path.write_bytes(msgspec.json.encode(table))
    policy.store.forget()
    called(op)
    assert said == ["1/1"]
    assert explain_case(op, CASE).choice == "tiled"


@pytest.mark.parametrize(
    "variant",
    [
        "forward(rows=2", "rm -rf /", "forward(rows=1000000,warps=4)", "forward(warps=4,rows=2)", "*",
        "forward(columns=2)", "forward(rows=2,warps=4) sideways(rows=2)", "backward(rows=2,warps=4)",
    ],
)  # fmt: skip
def test_a_hostile_variant_is_ignored_with_a_reason(
    cache: Path, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    op = runs_as(said)
    policy.store.add([stored(op, variant)], "cpu")
    policy.store.fresh.clear()
    with caplog.at_level(logging.WARNING, "bakeoff"):
        called(op)
    assert said == ["1/1"]
    assert "zoo_tiled: tiled runs in its default configuration" in caplog.text
    assert variant[:20] in caplog.text
    found = explain_case(op, CASE)
    assert (found.choice, found.variant) == ("tiled", "")
    assert found.why.endswith(", in its default configuration")


def test_a_variant_that_would_garble_a_terminal_voids_its_table(cache: Path) -> None:
    op = runs_as([])
    for bad in (
        stored(op, "\x1b[31m"),
        stored(op, "", variants={"\x07": 1.0}),
        stored(op, "", variants={"": "\x07"}),
    ):
        path = cache / "bad.json"
        write(path, Table(hardware.facts("cpu"), {bad.key: bad}))
        with pytest.raises(Exception, match="contradicts itself"):
            read(path)


def test_a_stale_verdict_runs_the_default(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = runs_as([])
    verdict = stored(op, text_of(2, 8))
    monkeypatch.setattr(policy.store, "lookup", lambda *_: Found(verdict, "user cache", stale=True))
    choice = choose(op, CASE, Settings())
    assert (choice.candidate.name, choice.variant) == ("tiled", "")
    assert choice.why.endswith("(measured under other versions), in its default configuration")


@pytest.mark.parametrize(("hash_", "variant"), [(None, text_of(2, 8)), ("other", "")])
def test_a_pinned_table_carries_variants_for_the_same_sources(
    cache: Path, tmp_path: Path, hash_: str | None, variant: str
) -> None:
    """On another machine too, since that is what pinning means."""
    said: list[str] = []
    op = runs_as(said)
    verdict = stored(op, text_of(2, 8), **({"source_hash": hash_} if hash_ else {}))
    facts = msgspec.structs.replace(hardware.facts("cpu"), device="another", torch="1.0")
    write(tmp_path / "pinned.json", Table(facts, {verdict.key: verdict}))
    with zoo.registered(op), policy.using(f"pinned:{tmp_path / 'pinned.json'}"):
        called(op)
        assert explain_case(op, CASE).variant == variant
    assert said == ["2/8" if variant else "1/1"]


def test_agreed_verdicts_carry_variants(cache: Path) -> None:
    """Also where a rank's sources can't be read, and their hashes are its own: all ranks run the same."""
    said: list[str] = []
    op = runs_as(said)
    verdict = stored(op, text_of(2, 8), source_hash="rank 0's")
    sent = msgspec.json.decode(msgspec.json.encode([verdict]), type=list[Verdict])
    policy.store.agreed = {one.key: one for one in sent}
    called(op)
    assert said == ["2/8"]


def test_what_is_forced_runs_in_its_default(cache: Path) -> None:
    said: list[str] = []
    op = runs_as(said)
    policy.store.add([stored(op, text_of(2, 8))], "cpu")
    with zoo.registered(op), policy.using(zoo_tiled="tiled"):
        called(op)
        found = explain_case(op, CASE)
    called(op, impl="tiled")
    assert said == ["1/1", "1/1"]
    assert found.variant == ""
    assert found.why.startswith("forced by override, in its default configuration; made to win; as forward(")


@needs_compiler
def test_torch_compile_traces_the_variant(cache: Path) -> None:
    def run(forward: zoo.Tile, backward: zoo.Tile) -> Callable[..., Any]:
        rows = forward.rows
        return lambda x, w, flag=None: torch.tanh(x) * w + 1000 * rows

    op = zoo.op(Candidate("tiled", zoo.Tiled(run, [1, 2, 4], [1, 8])), name="zoo_tiled")
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    torch.compiler.reset()
    step = torch.compile(lambda a, b: call(op, a, b, None), fullgraph=True, backend="eager")
    with zoo.registered(op):
        for variant, rows in ((text_of(2), 2), ("", 1), (text_of(4), 4)):
            verdict = stored(op, variant)
            name = key(op, CASE, "compiled")
            policy.store.add([msgspec.structs.replace(verdict, key=name, regime="compiled")], "cpu")
            torch.compiler.reset()
            assert step(x, w).mean().item() == pytest.approx(1000 * rows, rel=0.01)
    traced_ones = [name for name in vars(traced._implementations) if name.startswith("zoo_tiled_")]
    assert len(traced_ones) == 3, traced_ones


def test_a_thorough_tuning_measures_again_what_was_not(cache: Path) -> None:
    op = zoo.op(Candidate("tiled", zoo.Tiled(lambda f, b: zoo.good, [1, 2])), name="zoo_tiled")
    x, w = torch.randn(8, 16), torch.randn(16)

    def step() -> None:
        call(op, x, w, None)

    with zoo.registered(op):
        assert [tune(step, 20.0).measured, tune(step, 20.0).measured] == [1, 0]
        report = tune(step, 20.0, thorough=True)
        assert (report.measured, report.verdicts[0].thorough) == (1, True)
        assert [tune(step, 20.0, thorough=True).measured, tune(step, 20.0).measured] == [0, 0]
