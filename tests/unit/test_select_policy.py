"""Policies: what each does, who sets it, and in which order the settings count."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import bakeoff
from bakeoff import hardware
from bakeoff.errors import PolicyError, TableError, Unsupported
from bakeoff.select import Candidate, Op, call
from bakeoff.select.choose import hot, policy
from bakeoff.select.choose.policy import Settings, configure, current, using
from bakeoff.select.choose.table import Table, read, write
from bakeoff.select.contests.measure import Timing
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.key import key
from tests.unit import zoo

ran: list[str] = []


def noting(name: str, **declares: object) -> Candidate:
    def call(x: torch.Tensor, w: torch.Tensor, flag: object = None) -> torch.Tensor:
        ran.append(name)
        return torch.tanh(x) * w

    return Candidate(name, call, **declares)  # type: ignore[arg-type]


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """eager, one and two; the heuristic takes one. An empty store, settings as at start."""
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(policy, "_base", Settings())
    policy.store.forget()
    policy.forget()
    ran.clear()
    made = zoo.op(
        noting("one"),
        noting("two"),
        incumbent=noting("eager"),
        heuristic=lambda case, regime: "one",
        name="zoo_noting",
    )
    with zoo.registered(made):
        yield made
    policy.store.forget()
    policy.forget()
    monkeypatch.undo()
    policy._follow()


def verdict(op: Op, winner: str, rows: int = 4, regime: str = "eager") -> Verdict:
    name = key(op, zoo.case(rows, 8, grad=False), regime)
    trials = tuple(
        Trial(c.name, c.source_hash, Timing(us, us, us, 0.0, 9), None)
        for c, us in zip(
            op.candidates, (9.0, *(1.0 if c.name == winner else 5.0 for c in op.candidates[1:])), strict=True
        )
    )
    return Verdict(name, op.name, regime, winner, "because", trials, op.cost(zoo.case(rows, 8)), "2026-01-01")


def who_runs(op: Op, rows: int = 4, **keywords: str) -> str:
    """Which candidate a call runs; called twice, the second time by the memo."""
    x, w = torch.ones(rows, 8), torch.ones(8)
    ran.clear()
    call(op, x, w, None, **keywords)
    call(op, x, w, None, **keywords)
    assert len(ran) == 2
    assert ran[0] == ran[1]
    return ran[0]


def learn(op: Op, winner: str, **where: object) -> Verdict:
    made = verdict(op, winner, **where)  # type: ignore[arg-type]
    policy.store.add([made], "cpu")
    policy.forget()
    return made


def test_table_is_the_default_and_takes_the_heuristic_on_a_miss(op: Op) -> None:
    assert current().policy == "table"
    assert who_runs(op) == "one"
    learn(op, "two")
    assert who_runs(op) == "two"
    assert who_runs(op, rows=5) == "one"


def test_off_is_eager_always(op: Op) -> None:
    learn(op, "two")
    with using("off"):
        assert who_runs(op) == "eager"


def test_heuristic_ignores_the_table(op: Op) -> None:
    learn(op, "two")
    with using("heuristic"):
        assert who_runs(op) == "one"


def test_strict_raises_on_a_miss_and_says_what_to_do(op: Op) -> None:
    with using("strict"):
        with pytest.raises(
            PolicyError, match=r"no verdict for zoo_noting\(.*policy is strict. Run bakeoff.tune"
        ):
            who_runs(op)
        learn(op, "two")
        assert who_runs(op) == "two"


def test_tune_holds_a_contest_on_a_miss_and_once(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    def settle(op: Op, case: object, regime: str) -> None:
        held.append(regime)
        policy.store.add([verdict(op, "two")], "cpu")

    monkeypatch.setattr("bakeoff.select.choose.dispatch.settle", settle)
    with using("tune"):
        assert who_runs(op) == "two"
        assert who_runs(op) == "two"
    assert held == ["eager"]


def pinned(op: Op, path: Path, winner: str) -> Path:
    made = verdict(op, winner)
    write(path, Table(hardware.facts("cpu"), {made.key: made}))
    return path


@pytest.mark.parametrize("form", ["pinned:{}", "pinned({})"])
def test_pinned_is_that_table_and_nothing_else(op: Op, tmp_path: Path, form: str) -> None:
    learn(op, "one")
    learn(op, "two", rows=5)
    with using(form.format(pinned(op, tmp_path / "mine.json", "two"))):
        assert who_runs(op) == "two"
        assert who_runs(op, rows=5) == "eager", "not in that table: plain PyTorch"


def test_a_pinned_path_means_the_file_in_the_folder_of_now(
    op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for winner in ("one", "two"):
        folder = tmp_path / winner
        folder.mkdir()
        pinned(op, folder / "mine.json", winner)
        monkeypatch.chdir(folder)
        with using("pinned:mine.json"):
            assert who_runs(op) == winner


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("device", "NVIDIA H100", r"on another machine \(NVIDIA H100\)"),
        ("torch", "1.0", r"under other versions \(torch 1.0, "),
    ],
)
def test_a_pinned_table_from_elsewhere_is_obeyed_and_said_once(
    op: Op, tmp_path: Path, caplog: pytest.LogCaptureFixture, fact: str, value: str, said: str
) -> None:
    path = pinned(op, tmp_path / f"{fact}.json", "two")
    table = read(path)
    write(path, Table(msgspec.structs.replace(table.facts, **{fact: value}), table.rows))
    with using(f"pinned:{path}"):
        assert who_runs(op) == "two"
        policy.forget()
        assert who_runs(op) == "two"
        assert re.search(
            rf"\(measured {said}", bakeoff.explain(op, torch.ones(4, 8), torch.ones(8), None).why
        )
    assert len(re.findall(f"was measured {said}.*; its choices hold, pinned", caplog.text)) == 1


def test_a_pinned_verdict_of_other_sources_is_obeyed_and_said(
    op: Op, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = pinned(op, tmp_path / "sources.json", "two")
    path.write_text(re.sub(r'"source_hash": "\w+"', '"source_hash": "0"', path.read_text()))
    with using(f"pinned:{path}"):
        assert who_runs(op) == "two"
    assert "with other sources of zoo_noting" in caplog.text


def test_a_pinned_table_that_cannot_be_read_is_an_error_at_once(op: Op, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="can't be read"), using(f"pinned:{tmp_path / 'none.json'}"):
        pass
    with pytest.raises(TableError, match=r"can't be read.*write the path out"), using("pinned:~nosuchuser/x"):
        pass
    (tmp_path / "torn.json").write_text('{"facts":')
    with pytest.raises(TableError, match="not a table"), using(f"pinned:{tmp_path / 'torn.json'}"):
        pass
    assert current() == Settings()


def test_an_argument_counts_before_a_block_before_configure(op: Op) -> None:
    learn(op, "two")
    configure("off")
    assert who_runs(op) == "eager"
    with using("table"):
        assert who_runs(op) == "two"
        assert who_runs(op, impl="one") == "one"
        configure("heuristic")
        assert who_runs(op) == "two", "the block keeps its own"
    assert who_runs(op) == "one", "what was configured inside holds after it"
    configure("table", zoo_noting="eager")
    assert who_runs(op) == "eager"


def test_the_environment_sets_the_policy_and_everything_else_overrides_it() -> None:
    code = (
        "import bakeoff\nfrom bakeoff.select.choose.policy import current\nprint(current().policy)\n"
        "bakeoff.configure('off')\nprint(current().policy)\n"
        "with bakeoff.using('heuristic'): print(current().policy)"
    )
    done = _python(code, "strict")
    assert done.stdout.split() == ["strict", "off", "heuristic"], done.stderr


def _python(code: str, setting: str) -> subprocess.CompletedProcess[str]:
    source = Path(bakeoff.__file__).parents[1]
    environment = {**os.environ, "BAKEOFF_POLICY": setting, "PYTHONPATH": str(source)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_an_unknown_policy_in_the_environment_is_named() -> None:
    done = _python("import bakeoff; bakeoff.using('off').__enter__()", "tabel")
    assert done.returncode != 0
    assert "there is no policy 'tabel'; did you mean 'table'?" in done.stderr


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"policy": "tuned"}, PolicyError, "no policy 'tuned'; did you mean 'tune'?"),
        ({"policy": "zzz"}, PolicyError, "The policies are off, heuristic, table, tune, pinned, strict"),
        ({"policy": "pinned"}, PolicyError, "'pinned:FILE'"),
        ({"policy": "table:x.json"}, PolicyError, "other policies take no file"),
        ({"policy": True}, PolicyError, "a policy is a word or 'pinned:FILE', got True"),
        ({"regime": "compiled"}, PolicyError, "use 'eager' or 'graph'"),
        ({"rms_nrom": "eager"}, PolicyError, "no op 'rms_nrom'; did you mean 'rms_norm'?"),
        ({"rms_norm": "tritn"}, Unsupported, "rms_norm has no candidate 'tritn'; it has eager"),
    ],
)
@pytest.mark.parametrize("way", ["using", "configure"])
def test_unknown_names_are_errors_that_help(
    op: Op, way: str, settings: dict[str, str], error: type[Exception], text: str
) -> None:
    before = current()
    enter = configure if way == "configure" else lambda **settings: using(**settings).__enter__()
    with pytest.raises(error) as caught:
        enter(**settings)
    assert text in str(caught.value)
    assert current() == before


def test_blocks_nest_and_merge_overrides(op: Op) -> None:
    with using("off"):
        with using(zoo_noting="two"):
            assert current().policy == "off"
            assert who_runs(op) == "two"
            with using("table"):
                assert who_runs(op) == "two"
        assert who_runs(op) == "eager"
    assert who_runs(op) == "one"


def test_an_exception_ends_a_block_too(op: Op) -> None:
    with pytest.raises(KeyError), using("off"):
        raise KeyError
    assert current() == Settings()
    assert who_runs(op) == "one"


def test_an_override_that_cannot_run_raises_every_reason(op: Op) -> None:
    bad = zoo.with_candidates(
        op, noting("picky", supports=lambda case: "wants even rows", has_backward=False)
    )
    x = torch.ones(3, 8, requires_grad=True)
    with zoo.registered(bad), using(zoo_noting="picky"), pytest.raises(Unsupported) as caught:
        call(bad, x, torch.ones(8), None)
    assert "has no backward; wants even rows" in str(caught.value)


def test_regime_counts_on_a_gpu_only(op: Op) -> None:
    learn(op, "two")
    with using(regime="graph"):
        assert who_runs(op) == "two", "the CPU has no graphs: its eager verdict counts"
        assert current().on("cuda:0") == "graph"
        assert current().on("cpu") == "eager"


def in_thread(body: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 (raised below, in the test's thread)
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_a_thread_without_settings_follows_the_process(op: Op) -> None:
    """Autograd's threads are such: what they recompute must select as forward did."""
    with using("off"):
        in_thread(lambda: _expect(who_runs(op), "eager"))
    in_thread(lambda: _expect(who_runs(op), "one"))


def _expect(found: str, wanted: str) -> None:
    assert found == wanted


def test_a_thread_keeps_its_own_settings(op: Op) -> None:
    def body() -> None:
        with using(zoo_noting="two"):
            assert who_runs(op) == "two"

    with using("off"):
        in_thread(body)
        assert who_runs(op) == "eager"


def test_blocks_that_overlap_across_threads_leave_nothing_behind(op: Op) -> None:
    inside, leave = threading.Event(), threading.Event()

    def body() -> None:
        with using("heuristic"):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=body)
    with using("off"):
        thread.start()
        assert inside.wait(20)
        assert who_runs(op) == "eager"
    in_thread(lambda: _expect(current().policy, "heuristic"))
    leave.set()
    thread.join(20)
    assert current() == Settings()
    in_thread(lambda: _expect(current().policy, "table"))
    assert hot.process_memo is policy.memo(Settings())
