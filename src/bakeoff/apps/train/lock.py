"""The lock on a run's folder: one process at a time trains there; of several ranks the first holds it.

RUN/lock names the process. The system frees the lock when that process ends, however it ends, also on file
systems that several machines share, as far as they support flock(2).
"""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bakeoff.apps.train.metrics import log
from bakeoff.errors import BakeoffError

__all__ = ["FolderGone", "FolderInUse", "RunLock"]

_NAME = "lock"


class FolderInUse(BakeoffError, RuntimeError):
    """Another process trains in the run's folder."""


class FolderGone(BakeoffError, RuntimeError):
    """The run's folder was deleted or moved while the run went on."""


class Holder(msgspec.Struct):
    """Who holds a lock."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """The lock on one folder, from `take` to the end of the with-block."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file = -1

    def take(self, folder: Path) -> None:
        """Locks `folder`, which exists. Raises FolderInUse, which names the holder; OSError where no file can
        be written."""
        path = folder / _NAME
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(file) or "another process"
                os.close(file)
                raise FolderInUse(
                    f"{folder} is in use by {holder}: wait for that run or end it, or give another "
                    "train.run_dir"
                ) from None
            except OSError as error:
                log.warning(
                    "%s can't be locked (%s): see to it that no other process trains there",
                    folder,
                    error.strerror,
                )
            if _same(file, path):
                break
            os.close(file)  # its holder ended, and took the file away, between our opening and locking it
        before = _holder(file)
        if before is not None:
            log.warning("%s was left locked by %s, which has ended: this run takes over", folder, before)
        own = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
        os.truncate(file, 0)
        os.pwrite(file, msgspec.json.encode(own) + b"\n", 0)
        self.path, self._file = path, file

    def check(self) -> None:
        """Raises FolderGone where the locked folder is no longer at its place."""
        if self.path is not None and not _same(self._file, self.path):
            raise FolderGone(
                f"the run's folder {self.path.parent} was deleted or moved while training went on: put it "
                "back and resume, or train anew"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            if _same(self._file, self.path):
                self.path.unlink()
        os.close(self._file)
        self.path = None


def _holder(file: int) -> Holder | None:
    """Who is named in a lock; None where nobody is."""
    try:
        return msgspec.json.decode(os.pread(file, 4096, 0), type=Holder)
    except (msgspec.MsgspecError, OSError):
        return None


def _same(file: int, path: Path) -> bool:
    """Whether `path` still leads to the open `file`."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
