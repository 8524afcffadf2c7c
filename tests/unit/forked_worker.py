"""Workers for contests that are forks of this process, in which all is imported: a fresh one takes 2 s of a
core for that. `tests/unit/test_select_worker.py` and `tests/unit/test_bench.py` start real ones, too.

::

    pytestmark = pytest.mark.usefixtures("forked_workers")
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bakeoff.select.contests import worker

__all__ = ["Fork"]


class Fork:
    """As much of `subprocess.Popen` as a `Worker` asks of its process."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        (descriptor,) = pass_fds
        requests, stdin = os.pipe()
        stderr, complaints = os.pipe()
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            _work(descriptor, requests, complaints, env)
        os.setpgid(self.pid, self.pid)  # whichever of the two is first: it may be killed at once, as a group
        os.close(requests)
        os.close(complaints)
        self.stdin, self.stderr = open(stdin, "wb"), open(stderr, "rb")  # noqa: SIM115

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        limit = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.002)
        return status


def _work(descriptor: int, requests: int, complaints: int, env: Mapping[str, str]) -> None:
    """What a new process does, from its group and descriptors on; never returns."""
    try:
        os.setpgid(0, 0)
        os.dup2(requests, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(complaints, 2)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        faulthandler.disable()
        sys.argv = [worker.__name__, str(descriptor)]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        worker.main(descriptor)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)
