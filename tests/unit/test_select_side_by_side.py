"""Rounds of contests: nothing is measured while anything else is at work, and nobody waits for ever."""

import _thread
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bakeoff import hardware
from bakeoff.errors import ContestError
from bakeoff.select.contests import side_by_side
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.side_by_side import Wanted, Workers, fitting
from bakeoff.select.contests.worker import compilers
from bakeoff.select.contests.yardstick import REFERENCE
from tests.unit import zoo

Ready = Callable[[], None]


class Fake:
    """A worker whose contests do what their case's rows say, and note when they are at work."""

    noted: list[str]
    acts: dict[int, Callable[[Any, Ready], Any]]
    others: int

    def __init__(self, **_: object) -> None:
        self.closed = 0

    def contest(self, op: Any, case: Any, *_: Any, ready: Ready = lambda: None) -> Any:
        return self.acts[case.x.shape[0]](self, ready)

    def stop(self, why: str) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    class Mine(Fake):
        noted: list[str] = []  # noqa: RUF012
        acts: dict[int, Any] = {}  # noqa: RUF012

    monkeypatch.setattr(side_by_side, "Worker", Mine)
    return Mine


def wanted(*rows: int) -> list[Wanted]:
    return [Wanted(zoo.CALM, zoo.case(n, 8), ("eager",), 0.01) for n in rows]


def hold(workers: Workers, *rows: int) -> list[Any]:
    found = dict(workers.hold(wanted(*rows)))
    assert sorted(found) == list(range(len(rows)))
    return [found[i] for i in range(len(rows))]


def good() -> list[Any]:
    return contest(zoo.CALM, zoo.case(), ("eager",), budget_s=0.001)


def test_what_is_measured_is_measured_alone_and_after_all_have_compiled(fake: type[Fake]) -> None:
    verdicts = good()

    def act(number: int) -> Callable[[Any, Ready], Any]:
        def run(_: Any, ready: Ready) -> Any:
            fake.noted.append("compiles")
            time.sleep(0.02 * number)
            fake.noted.append("compiled")
            ready()
            fake.noted.append(f"{number} measures")
            time.sleep(0.02)
            fake.noted.append(f"{number} done")
            return verdicts

        return run

    fake.acts = {n: act(n) for n in (1, 2, 3, 4)}
    with Workers(4) as workers:
        assert hold(workers, 1, 2, 3, 4) == [verdicts] * 4
    assert sorted(fake.noted[:8]) == ["compiled"] * 4 + ["compiles"] * 4
    assert fake.noted[8:] == [f"{n} {what}" for n in (1, 2, 3, 4) for what in ("measures", "done")]


def test_the_next_is_measured_when_the_last_has_been_dealt_with(fake: type[Fake]) -> None:
    def act(_: Any, ready: Ready) -> Any:
        ready()
        fake.noted.append("measures")
        return verdicts

    verdicts = good()
    fake.acts = {1: act, 2: act}
    with Workers(2) as workers:
        for _ in workers.hold(wanted(1, 2)):
            time.sleep(0.1)
            fake.noted.append("dealt with")
    assert fake.noted == ["measures", "dealt with"] * 2


def test_who_fails_or_begins_again_holds_nobody_up(fake: type[Fake]) -> None:
    verdicts = good()
    order: list[str] = []

    def again(_: Any, ready: Ready) -> Any:
        ready()
        order.append("again: first")
        ready()  # its candidate took the process down
        order.append("again: second")
        return verdicts

    def fails(_: Any, ready: Ready) -> Any:
        raise ContestError("no")

    def waits(_: Any, ready: Ready) -> Any:
        ready()
        order.append("waits")
        return verdicts

    fake.acts = {1: fails, 2: again, 3: waits}
    with Workers(3) as workers:
        first, second, third = hold(workers, 1, 2, 3)
    assert isinstance(first, ContestError)
    assert second == third == verdicts
    assert order == ["again: first", "again: second", "waits"]


@pytest.mark.parametrize("way", ["rejected", "contest", "killed", "library", "late"])
def test_what_ran_short_of_memory_or_time_is_held_again_alone(fake: type[Fake], way: str) -> None:
    verdicts = good()
    tries: list[list[int]] = []

    def short(me: Any, ready: Ready) -> Any:
        tries.append([worker.closed for worker in workers.workers])  # type: ignore[attr-defined]
        ready()
        if len(tries) > 1:
            return verdicts
        if way == "contest":
            with pytest.raises(ContestError) as caught:
                contest(zoo.GPU_FULL, zoo.case(), ("eager",), budget_s=0.001)
            return _raise(caught.value)
        if way == "library":
            handle = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            return _raise(ContestError(f"eager: RuntimeError: {handle}"))
        if way == "late":
            return _raise(ContestError(f"the contest failed while at '{REFERENCE}': hangs: no answer"))
        if way == "killed":
            reason = "crashed: killed by SIGKILL"
            trial = msgspec.structs.replace(verdicts[0].trials[0], rejected=reason)
            return [msgspec.structs.replace(verdicts[0], trials=(trial,))]
        return contest(zoo.op(zoo.WRONG["out_of_memory"][0]), zoo.case(), ("eager",), budget_s=0.001)

    def calm(_: Any, ready: Ready) -> Any:
        ready()
        return verdicts

    fake.acts = {1: calm, 2: short}
    with Workers(2) as workers:
        assert hold(workers, 1, 2) == [verdicts, verdicts]
        assert tries == [[0, 0], [1, 1]], "the other process has given its memory back"
        tries.clear()
        (outcome,) = hold(workers, 2)
        assert len(tries) == 1, "alone it was short, too"
        assert outcome != verdicts


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [OSError("no process"), SystemExit("enough")])
def test_an_error_that_is_no_contests_own_is_raised_after_the_others(
    fake: type[Fake], error: BaseException
) -> None:
    verdicts = good()

    def calm(_: Any, ready: Ready) -> Any:
        ready()
        return verdicts

    fake.acts = {1: lambda me, ready: _raise(error), 2: calm}
    found: list[Any] = []
    with Workers(2) as workers, pytest.raises(type(error), match=str(error)):
        found.extend(workers.hold(wanted(1, 2)))
    assert found == [(1, verdicts)]


def test_a_round_is_no_larger_than_there_are_processes() -> None:
    with Workers(0) as workers:
        assert workers.jobs == 1
        with pytest.raises(ValueError, match="2 contests in a round of 1"):
            hold(workers, 1, 2)
        assert hold(workers) == []


def test_real_contests_side_by_side_as_alone() -> None:
    heard: list[str] = []
    with Workers(2, heard.append) as workers:
        workers.start()
        (first, second) = hold(workers, 3, 5)
        assert isinstance(first, list)
        assert isinstance(second, list)
        assert ["[3,8]" in first[0].key, "[5,8]" in second[0].key] == [True, True]
        assert all(v.timings for v in (*first, *second))
        pids = [worker.process.pid for worker in workers.workers if worker.process]
    measured = [i for i, stage in enumerate(heard) if "measure" in stage]
    compiled = [i for i, stage in enumerate(heard) if "verify" in stage]
    assert max(compiled) < min(measured)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_interrupted_round_leaves_no_process_and_no_thread() -> None:
    """Ctrl-C comes while one contest measures and the other waits for its turn."""
    pids: list[int] = []
    before = set(threading.enumerate())

    def announce(stage: str) -> None:
        if "measure" in stage:
            pids.extend(w.process.pid for w in workers.workers if w.process)
            os.kill(os.getpid(), 2)

    with pytest.raises(KeyboardInterrupt), Workers(2, announce) as workers:
        hold(workers, 3, 5)
    assert pids
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and set(threading.enumerate()) - before:
        time.sleep(0.05)
    left = set(threading.enumerate()) - before  # others' threads may have ended meanwhile
    for thread in left:  # a reader ends once the system has closed its process's pipe
        thread.join(10)
    assert not {thread for thread in left if thread.is_alive()}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ContestError, match="interrupted"):
        workers.workers[0].start()


def test_ctrl_c_is_heard_though_the_signal_woke_another_thread(fake: type[Fake]) -> None:
    """`interrupt_main` notes a signal and, like one that another thread got, wakes nobody."""
    over = threading.Event()

    def act(_: Any, ready: Ready) -> None:
        time.sleep(0.1)  # by now the main thread waits
        _thread.interrupt_main()
        fake.noted.append("waited for" if over.wait(5) else "nobody came")

    fake.acts = {1: act}
    workers = Workers(1)
    with pytest.raises(KeyboardInterrupt):
        list(workers.hold(wanted(1)))
    assert fake.noted == []
    over.set()


def test_an_interrupt_while_a_round_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = set(threading.enumerate()), threading.Thread.start
    begun: list[str] = []

    def start(self: threading.Thread) -> None:
        real(self)
        if "work" in self.name:
            begun.append(self.name)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), Workers(3) as workers:
        hold(workers, 3, 5, 7)
    assert len(begun) == 1
    left = set(threading.enumerate()) - before  # others' threads may have ended meanwhile
    for thread in left:  # a reader ends once the system has closed its process's pipe
        thread.join(10)
    assert not {thread for thread in left if thread.is_alive()}
    assert not any(worker.process for worker in workers.workers)


def test_a_contest_that_was_left_in_the_middle_is_nobody_s_answer() -> None:
    """Whoever hears of a stage may raise; what the process was at must not come out as the next one's."""
    left: list[str] = []

    def announce(stage: str) -> None:
        if not left and "verify" in stage and threading.current_thread() is workers.threads[1]:
            left.append(stage)
            raise ContestError("enough")

    with Workers(2, announce) as workers:
        first, second = hold(workers, 3, 5)
        assert "[3,8]" in first[0].key
        assert str(second) == "enough"
        third, fourth = hold(workers, 6, 7)
    assert "[6,8]" in third[0].key
    assert "[7,8]" in fourth[0].key


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(1, 64, 1), (2, 64, 1), (4, 64, 2), (16, 64, 4), (16, 16, 2), (16, 4, 1)]
)
def test_as_many_at_a_time_as_suit_the_machine(
    cores: int, gib: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = msgspec.structs.replace(hardware.facts("cpu"), memory=gib << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(hardware, "facts", lambda device: facts)
    assert fitting("cpu") == jobs


def test_processes_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile starts a process for every core, in each of them."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert name not in compilers(1)
    assert [compilers(jobs)[name] for jobs in (2, 4, 12)] == ["4", "2", "1"]
    monkeypatch.setenv(name, "3")
    assert [compilers(jobs)[name] for jobs in (1, 12)] == ["3", "3"]
    assert [worker.beside for worker in Workers(3).workers] == [3] * 3
