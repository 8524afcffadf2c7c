"""Contests in a process of their own.

The parent writes one request a line; the worker answers with stages as they begin and with the verdicts.
Before it measures, it says that it is ready and waits for a line.
A crash, a hang or a lost CUDA context ends the worker: the candidate at work is rejected with the reason,
and a new worker holds the contest again without it. Of a candidate whose variant was at work that alone is
rejected. So is one that closes the pipe by which answers come, or writes to it; of one that forks, the copy
ends when it would answer. An answer counts only if it belongs to the request. No wait is without a limit.
"""

import contextlib
import importlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from bakeoff.errors import ContestError
from bakeoff.select.contests.conduct import use_deterministic
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.failure import DeviceLost
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.contests.wire import (
    GARBAGE,
    Answer,
    Request,
    answers_in,
    read_request,
    unlike_asked,
    written,
)
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.variants import EVERY, label, named

__all__ = ["STAGE_LIMIT_S", "Worker", "compilers", "home_of", "op_at"]

STAGE_LIMIT_S = 120.0
"""What a candidate may take to compile and be verified, or to be measured once."""
_CONTEST_LIMIT_S = 3 * 3600.0  # a thorough contest of many variants takes minutes
_END_S = 10.0  # what a process may take to end once it is told to, or has closed its pipe
_MOST_DEATHS = 3  # by variants of one candidate, before the others are left out: the contest begins anew
STAGE_MARK = b"\0"
"""What the worker writes to its standard error as a stage begins: complaints before it were about another."""


def home_of(op: Op) -> str | None:
    """Where another process can import `op`, or None."""
    try:
        return op.home if op_at(op.home) is op else None
    except (ImportError, AttributeError):
        return None


def op_at(home: str) -> Op:
    """The op that stands at ``"module:attribute"``."""
    module, _, attribute = home.partition(":")
    op: Op = getattr(importlib.import_module(module), attribute)
    return op


def compilers(processes: int) -> dict[str, str]:
    """The environment of one of so many processes that compile at the same time.

    torch.compile starts a process for every core. Those of all together are half as many as the cores, or one
    each, unless the user has said how many.
    """
    if processes < 2:
        return {**os.environ}
    each = max(1, (os.cpu_count() or 1) // (2 * processes))
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(each), **os.environ}


class Worker:
    """A process that holds contests; started on first use, replaced when it dies. `beside`: of so many."""

    def __init__(
        self,
        stage_limit_s: float = STAGE_LIMIT_S,
        announce: Callable[[str], None] = lambda stage: None,
        beside: int = 1,
    ) -> None:
        self.stage_limit_s = stage_limit_s
        self.announce = announce
        self.beside = beside
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = ""
        """Why no process is started any more."""
        self.answers: queue.Queue[Answer | None] = queue.Queue()
        self.asked = 0
        """How many contests it was asked for."""
        self.complaints = b""
        """The end of what the worker wrote to its standard error."""
        self.readers: list[threading.Thread] = []

    def contest(
        self,
        op: Op,
        case: Case,
        regimes: tuple[str, ...],
        budget_s: float,
        skip: Mapping[str, str] | None = None,
        for_the_record: bool = False,
        thorough: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> list[Verdict]:
        """As `bakeoff.select.contests.contest.contest`, whatever the candidates do to their process."""
        home = home_of(op)
        if home is None:
            raise ContestError(f"{op.name} can't be imported by a worker process; set Op.home")
        out = dict(skip or {})
        while True:
            self.asked += 1
            request = Request(
                home, case, regimes, budget_s, out, for_the_record, thorough, *_numerics(), self.asked
            )
            self._send(request)
            try:
                at_work, reason, verdicts = self._listen(ready)
            except BaseException:  # of those who hear: it is in the middle of a contest
                self.close()
                raise
            if verdicts is not None:
                problem = unlike_asked(op, request, verdicts)
                if problem:
                    self.close()
                    raise ContestError(f"{op.name}: the worker's verdicts {problem}")
                return [_by_our_hashes(op, verdict) for verdict in verdicts]
            if self.ended:
                raise ContestError(self.ended)
            if not at_work:
                raise ContestError(reason)
            self.close()
            name, variant = named(at_work)
            if name not in op.by_name or name == op.incumbent.name or at_work in out:
                raise ContestError(f"{op.name}: the contest failed while at '{at_work}': {reason}")
            out[at_work] = reason
            if variant and sum(named(other)[0] == name for other in out) >= _MOST_DEATHS:
                out[label(name, EVERY)] = f"{_MOST_DEATHS} of its variants ended the process they ran in"

    def close(self) -> None:
        """End the process, at once, with everything it started."""
        process = self.process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing can be done
                process.wait(_END_S)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            self._join()
            self.process = None

    def stop(self, why: str) -> None:
        """End the process at once, from any thread; the contest in hand fails with this reason, as all later
        ones do."""
        self.ended = why
        process = self.process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _join(self) -> None:
        for reader in filter(threading.Thread.is_alive, self.readers):  # one may not have begun
            reader.join(timeout=1)  # longer only where a grandchild left its group and holds the pipe

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, ready: Callable[[], None]) -> tuple[str, str, list[Verdict] | None]:
        """Follow one contest: (stage or candidate at work, why it failed, verdicts); nothing is at work where
        the worker itself says why."""
        stage, begun = "start", time.monotonic()
        while True:
            try:
                limit = max(self.stage_limit_s, STAGE_LIMIT_S) if stage == "start" else self.stage_limit_s
                answer = self.answers.get(timeout=limit)
            except queue.Empty:
                return _candidate(stage), f"hangs: no answer for {limit:.0f} s", None
            if answer is None:
                return _candidate(stage), self._death(), None
            if strange := self._strange(answer):
                return _candidate(stage), strange, None
            if answer.ready:
                ready()
                self._write(b"go")
                continue
            if answer.verdicts is not None:
                return "", "", answer.verdicts
            if answer.lost:
                return answer.lost, answer.error, None
            if answer.error:
                return "", answer.error, None
            stage = answer.stage
            if time.monotonic() - begun > _CONTEST_LIMIT_S:
                return _candidate(stage), f"no verdict within {_CONTEST_LIMIT_S / 3600:.0f} h", None
            if stage != _candidate(stage):  # a bare name is the next sample, not worth a line
                self.announce(stage)

    def _strange(self, answer: Answer) -> str:
        """Why an answer is not believed, or ""."""
        if answer is GARBAGE:
            return "writes to the pipe by which the worker answers"
        return "" if answer.number == self.asked else "answers a contest that is over"

    def _death(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closes the pipe by which the worker answers"
        self._join()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        lines = self.complaints.rpartition(STAGE_MARK)[2].decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"crashed: {how}" + (f" ({last[:200]})" if last else "")

    def _send(self, request: Request) -> None:
        line = written(request)
        if line is None:
            raise ContestError(f"{request.op}: an argument of {request.case.args} can't be sent to a worker")
        self.start()
        self._write(line)

    def _write(self, line: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        left = memoryview(line + b"\n")
        with contextlib.suppress(BrokenPipeError):  # its death is reported by the reader
            while left and select.select([], [self.process.stdin], [], self.stage_limit_s)[1]:
                left = left[os.write(self.process.stdin.fileno(), left[: select.PIPE_BUF]) :]

    def start(self) -> None:
        """Make sure that a process is there. Started ahead of its first contest, it loads meanwhile."""
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is not None:
            return
        if self.ended:
            raise ContestError(self.ended)
        reader, writer = os.pipe()
        environment = {**compilers(self.beside), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("BAKEOFF_POLICY", None)
        self.answers = queue.Queue()
        self.complaints = b""
        with _signals_later():
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "bakeoff.select.contests.worker", str(writer)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(writer,),
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends the worker
                )
            except OSError:
                os.close(reader)
                raise
            finally:
                os.close(writer)
            self.readers = [
                threading.Thread(target=self._read, args=(reader, self.answers), daemon=True),
                threading.Thread(target=self._drain, args=(self.process.stderr,), daemon=True),
            ]
            for thread in self.readers:
                thread.start()
        self._stop_late()

    def _stop_late(self) -> None:
        """End a process that began while `stop` was called."""
        if self.ended:
            self.stop(self.ended)

    def _read(self, reader: int, answers: "queue.Queue[Answer | None]") -> None:
        with open(reader, "rb") as lines:
            for answer in answers_in(lines):
                answers.put(answer)
        answers.put(None)

    def _drain(self, errors: Any) -> None:
        with errors:
            while piece := errors.read1(4096):
                self.complaints = (self.complaints + piece)[-4096:]


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Hold back signals whose handlers may raise: a process that has begun must have got its name, and what
    it writes its readers."""
    before: dict[int, Any] = {}
    held: list[tuple[int, Any]] = []
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(lambda: [before[number](number, frame) for number, frame in held])
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(handler := signal.getsignal(number)):
                    before[number] = handler
                    at_the_end.callback(signal.signal, number, handler)
                    signal.signal(number, lambda *came: held.append(came))
        yield


def _numerics() -> tuple[bool, int, str]:
    """The switches of this process that change what candidates compute or how fast."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


def _by_our_hashes(op: Op, verdict: Verdict) -> Verdict:
    """`verdict` with this process's hashes of sources that can't be read, of which the worker has others."""
    ours = {c.name: c.source_hash for c in op.candidates if not c.modules}
    trials = tuple(
        msgspec.structs.replace(trial, source_hash=ours.get(trial.candidate, trial.source_hash))
        for trial in verdict.trials
    )
    return msgspec.structs.replace(verdict, trials=trials)


def _candidate(stage: str) -> str:
    return stage.split(":", 1)[0]


def main(descriptor: int) -> None:
    """The worker's side: hold one contest per request line until the parent closes its end."""
    requests: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)  # the parent is gone, also in the middle of a hanging kernel

    threading.Thread(target=read, daemon=True).start()
    with open(descriptor, "wb", buffering=0) as out:
        number, me = 0, os.getpid()

        def say(answer: Answer) -> None:
            if os.getpid() != me:  # a candidate forked, and this is the copy
                os._exit(0)
            sys.stderr.flush()
            os.write(2, STAGE_MARK)
            answer.number = number
            out.write(msgspec.json.encode(answer) + b"\n")

        def ready() -> None:
            say(Answer(ready=True))
            requests.get()

        while True:
            request = read_request(requests.get())
            number = request.number
            use_deterministic(request.deterministic)
            torch.set_num_threads(request.threads)
            torch.set_float32_matmul_precision(request.matmul_precision)
            try:
                verdicts = contest(
                    op_at(request.op),
                    request.case,
                    request.regimes,
                    budget_s=request.budget_s,
                    skip=request.skip,
                    for_the_record=request.for_the_record,
                    thorough=request.thorough,
                    announce=lambda stage: say(Answer(stage=stage)),
                    ready=ready,
                )
                say(Answer(verdicts=verdicts))
            except DeviceLost as error:
                say(Answer(error=error.reason, lost=error.candidate))
                os._exit(1)
            except SystemExit as end:  # a proper exit would wait for the thread that reads
                sys.stderr.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)
            except Exception as error:  # the parent raises it as a ContestError
                say(Answer(error=f"{type(error).__name__}: {error}"))
            except BaseException as end:
                print(f"{type(end).__name__}: {end}", file=sys.stderr, flush=True)
                os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
