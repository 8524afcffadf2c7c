"""Several processes at one plan, such as one for each GPU: which of them makes which run.

A process holds OUT/claims/KEY while it makes the run KEY. The system gives the lock back however the process
ends, so a run whose process died is made by another.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bakeoff.apps.compare.equal import CompareError

__all__ = ["first_free"]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def first_free(out: Path, keys: Iterable[str]) -> Iterator[str | None]:
    """The first of `keys` that no other process has, this one's until the end of the with-block; None where
    all are taken."""
    for key in keys:
        with _claimed(out / "claims" / key) as mine:
            if mine:
                yield key
                return
    yield None


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CompareError(f"can't write {path} ({error.strerror or error}): give a writable --out") from None
    mine = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mine = False
    except OSError as error:
        log.warning(
            "%s can't be locked (%s): let one process alone make this plan's runs", path, error.strerror
        )
    try:
        yield mine
    finally:
        os.close(file)  # and with it the lock
