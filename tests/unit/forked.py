"""Processes for tests that kill or signal one: forks of this one, which start in no time as all is imported.

The fork computes with one thread: those of this process don't exist there.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

LIMIT_S = 240  # for what takes seconds on a machine with nothing else to do


class Forked:
    """A fork that does `act` and ends with the status that it returns or raises SystemExit with; 99 after any
    other error. What it writes to standard output and error goes to `out`, a file or a descriptor."""

    def __init__(self, act: Callable[[], object], out: Path | int = Path(os.devnull)) -> None:
        self.out = out
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_status(act, out))

    def wait_for(self, sign: Callable[[], bool], pause_s: float = 0.002) -> None:
        """Returns once `sign` is seen; fails where the fork ends before."""
        limit = time.monotonic() + LIMIT_S
        while not sign():
            assert not self.ended(), f"ended with status {self.status}: {self.said()}"
            assert time.monotonic() < limit, "there was no sign"
            time.sleep(pause_s)

    def ended(self) -> bool:
        """Whether it has ended by now."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def end(self, number: int = 0) -> int:
        """Sends the signal, if one is given, and waits for the end; returns the exit status, or minus the
        signal's number."""
        if number and not self.ended():
            os.kill(self.pid, number)
        limit = time.monotonic() + LIMIT_S
        while not self.ended() and time.monotonic() < limit:
            time.sleep(0.002)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"did not end: {self.said()}")
        return self.status

    def said(self) -> str:
        """What it wrote so far."""
        return self.out.read_text() if isinstance(self.out, Path) and self.out.exists() else ""

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended():
            self.end(signal.SIGKILL)


class Started(Forked):
    """The same of a program in a process of its own, which may use CUDA though this one did."""

    def __init__(self, program: str, out: Path) -> None:
        self.out = out
        self.status = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [(os.POSIX_SPAWN_OPEN, 1, str(out), flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], paths, file_actions=files)


def said_by(program: str, folder: Path) -> str:
    """What a program says that runs in a fork and ends well, with a cache of its own in `folder`."""

    def act() -> None:
        os.environ["BAKEOFF_CACHE"] = str(folder / "cache")
        exec(program, {"__name__": "__main__"})

    with Forked(act, folder / "said") as process:
        assert process.end() == 0, process.said()
        return process.said()


def _status(act: Callable[[], object], out: Path | int) -> int:
    file = out if isinstance(out, int) else os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        returned = act()
        status = returned if isinstance(returned, int) else 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):  # as Python does
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 99
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:  # as Python does when a process ends
        sys.stdout.flush()
    except OSError:
        status = 120
    return status
