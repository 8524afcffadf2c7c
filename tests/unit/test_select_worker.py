"""Contests in a worker process: whatever candidates do to it is a rejection, and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace as replace_struct

from bakeoff.errors import ContestError
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.contests.wire import Request, unlike_asked
from bakeoff.select.contests.worker import Worker, home_of, op_at
from tests.unit import zoo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One worker for all the tests it survives."""
    with Worker() as made:
        yield made


def trial(verdict: Verdict, name: str) -> Trial:
    return next(t for t in verdict.trials if t.candidate == name)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.usefixtures("forked_workers")
def test_crashes_of_every_kind_are_rejections(worker: Worker) -> None:
    heard: list[str] = []
    worker.announce = heard.append
    (verdict,) = worker.contest(zoo.CRASHING, zoo.case(), ("eager",), 0.3)
    reasons = {t.candidate: t.rejected for t in verdict.trials}
    assert reasons == {
        "eager": None,
        "good": None,
        "aborts": "crashed: killed by SIGABRT (free(): invalid pointer)",
        "segfaults": "crashed: killed by SIGSEGV",
        "exits": f"crashed: exited with status 3 ({'x' * 200})",
        "interrupts": "crashed: exited with status 1 (KeyboardInterrupt: from within)",
        "loses_the_device": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "crashes_when_timed": "crashed: exited with status 9",
        "prints": None,
    }
    assert all(t.timing for t in verdict.trials if not t.rejected)
    assert "aborts: compile and verify" in heard
    assert "good" not in heard, "samples are not worth a line each"


def test_the_worker_of_the_last_contest_is_used_again(worker: Worker) -> None:
    worker.contest(zoo.CALM, zoo.case(), ("eager",), 0.01)
    assert worker.process is not None
    pid = worker.process.pid
    (verdict,) = worker.contest(zoo.CALM, zoo.case(17, 8, torch.bfloat16), ("eager",), 0.01)
    assert worker.process.pid == pid
    assert verdict.key == "zoo_calm(x=bf16[20,8]', w=bf16[8]') cpu eager"


@pytest.mark.usefixtures("forked_workers")
def test_who_meddles_with_the_worker_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakeoff.select.contests.worker._END_S", 0.5)
    with Worker() as worker:
        (verdict,) = worker.contest(zoo.MEDDLING, zoo.case(), ("eager",), 0.01)
    assert {t.candidate: t.rejected for t in verdict.trials} == {
        "eager": None,
        "good": None,
        "closes_the_pipe": "closes the pipe by which the worker answers",
        "writes_garbage": "writes to the pipe by which the worker answers",
        "forks": "forks the process (normal inputs, seed 0)",
        "answers_itself": "answers a contest that is over",
    }


def test_verdicts_that_were_not_asked_for_are_no_verdicts() -> None:
    (right,) = contest(zoo.CALM, zoo.case(), budget_s=0.01)
    request = Request(zoo.CALM.home, zoo.case(), ("eager",), 0.01, {}, False, False, False, 1, "high")
    assert unlike_asked(zoo.CALM, request, [right]) == ""
    for wrong, problem in (
        ([], "are about"),
        ([replace_struct(right, key="zoo_calm() cpu eager")], "are about"),
        ([replace_struct(right, trials=right.trials[:1])], "judge"),
        ([replace_struct(right, winner="no such")], "let 'no such' win"),
    ):
        assert unlike_asked(zoo.CALM, request, wrong).startswith(problem)


@pytest.mark.usefixtures("forked_workers")
def test_a_hang_is_ended_and_rejected() -> None:
    with Worker(stage_limit_s=3) as worker:
        (verdict,) = worker.contest(zoo.HANGING, zoo.case(), ("eager",), 0.01)
        assert trial(verdict, "hangs").rejected == "hangs: no answer for 3 s"
        assert trial(verdict, "good").rejected is None


@pytest.mark.usefixtures("forked_workers")
def test_a_contest_that_is_stopped_ends_at_once_with_the_reason() -> None:
    """In the middle of a candidate that would hang for long; no other process is started for the rest."""

    def announce(stage: str) -> None:
        if stage.startswith("hangs"):
            worker.stop("enough")

    with Worker(stage_limit_s=60, announce=announce) as worker:
        for _ in range(2):
            with pytest.raises(ContestError, match=r"^enough$"):
                worker.contest(zoo.HANGING, zoo.case(), ("eager",), 0.01)


@pytest.mark.usefixtures("forked_workers")
def test_an_incumbent_that_crashes_ends_the_contest_with_its_reason() -> None:
    with (
        Worker() as worker,
        pytest.raises(ContestError, match=r"failed while at 'prepare the reference': crashed: killed"),
    ):
        worker.contest(zoo.HOPELESS, zoo.case(), ("eager",), 0.01)


def test_errors_of_the_contest_come_back(worker: Worker) -> None:
    with pytest.raises(ContestError, match="not enough GPU memory"):
        worker.contest(zoo.GPU_FULL, zoo.case(), ("eager",), 0.01)
    with pytest.raises(ContestError, match="ValueError: zoo: w has shape"):
        worker.contest(zoo.CALM, zoo.case().replace(w=zoo.case(4, 9).w), ("eager",), 0.01)


def test_a_worker_found_dead_is_replaced(worker: Worker) -> None:
    worker.contest(zoo.CALM, zoo.case(), ("eager",), 0.01)
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    (verdict,) = worker.contest(zoo.CALM, zoo.case(), ("eager",), 0.01)
    assert trial(verdict, "good").rejected is None


def test_the_worker_takes_over_the_switches_of_its_parent(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(True)
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        with zoo.registered(zoo.SWITCHES):
            (verdict,) = worker.contest(zoo.SWITCHES, zoo.case(), ("eager",), 0.01)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert trial(verdict, "tells").rejected == "RuntimeError: deterministic True, threads 1, precision high"


def test_arguments_that_do_not_survive_the_way_are_refused(worker: Worker) -> None:
    with pytest.raises(ContestError, match="can't be sent to a worker"):
        worker.contest(zoo.CALM, zoo.case().replace(flag=float("inf")), ("eager",), 0.01)


def test_an_op_that_cannot_be_imported_is_refused(worker: Worker) -> None:
    lost = zoo.op(home="tests.unit.zoo:NOTHING")
    assert home_of(lost) is None
    with pytest.raises(ContestError, match=r"set Op.home"):
        worker.contest(lost, zoo.case(), ("eager",), 0.01)
    assert home_of(zoo.op(home="tests.unit.zoo:CALM")) is None, "another op lives there"
    assert op_at(home_of(zoo.CALM) or "") is zoo.CALM


def test_a_worker_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = descriptors()
    with pytest.raises(FileNotFoundError), Worker() as worker:
        worker.start()
    assert not descriptors() - before


def test_a_verdict_keeps_the_hash_of_the_source_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited after this process read it, and before the worker did."""
    text = """
        from bakeoff.select import Candidate
        from tests.unit import zoo
        def call(x, w, flag=None):
            return zoo.good(x, w)
        OP = zoo.op(Candidate("edited", call), home="zoo_edited_later:OP")
    """
    file = tmp_path / "zoo_edited_later.py"
    file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    op = op_at("zoo_edited_later:OP")
    before = op.by_name["edited"].source_hash
    file.write_text(file.read_text() + "CORRECTED = 1\n")
    with Worker() as worker:
        (verdict,) = worker.contest(op, zoo.case(), ("eager",), 0.01)
    assert trial(verdict, "edited").source_hash == replace(op.by_name["edited"]).source_hash
    assert trial(verdict, "edited").source_hash != before


def test_nothing_is_left_of_a_worker() -> None:
    before, threads = descriptors(), set(threading.enumerate())
    worker = Worker()
    worker.contest(zoo.CALM, zoo.case(), ("eager",), 0.01)
    assert worker.process is not None
    pid = worker.process.pid
    worker.close()
    assert not Path(f"/proc/{pid}").exists(), "not even a zombie"
    worker.close()
    assert not descriptors() - before
    assert not set(threading.enumerate()) - threads  # others' threads may have ended meanwhile


SCRIPT = """
    import sys, threading
    from bakeoff.select.contests.worker import Worker
    from tests.unit import zoo
    worker = Worker(announce=lambda stage: print(stage, worker.process.pid, flush=True))
    with worker:
        worker.contest(zoo.WAITING, zoo.case(), ("eager",), 0.01)
"""


class Disturbed(subprocess.Popen[bytes]):
    """A process whose start is followed at once by a signal to its parent."""

    number = signal.SIGINT
    started: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.started.append(self.pid)
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_worker_starts_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Disturbed, "number", number)
    monkeypatch.setattr(Disturbed, "started", [])
    monkeypatch.setattr(subprocess, "Popen", Disturbed)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt), Worker() as worker:
            worker.start()
        assert signal.getsignal(number) is stop, "the program's own handler is back"
    finally:
        signal.signal(number, before)
    assert len(Disturbed.started) == 1
    assert not alive(Disturbed.started[0])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_ends_with_its_parent(end: signal.Signals) -> None:
    """Ctrl-C, and a parent that had no time to clean up."""
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"},
    )
    assert script.stdout is not None
    pid = 0
    try:
        for line in script.stdout:
            pid = int(line.split()[-1])
            if line.startswith("waits: compile"):
                break
        assert alive(pid)
        script.send_signal(end)
        _, complaints = script.communicate(timeout=30)
        assert script.returncode != 0
        if end == signal.SIGINT:
            assert "KeyboardInterrupt" in complaints
        deadline = time.monotonic() + 20
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(pid)
    finally:
        script.kill()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        script.communicate()


def test_candidates_are_imported_where_they_run() -> None:
    far = zoo.WRONG["broken_import"][0]
    assert len(far.source_hash) == 12, "neither declaring nor hashing imports"
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        _ = far.implementation
