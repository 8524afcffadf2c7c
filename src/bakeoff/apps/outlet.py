"""Standard output that may go away under a run: a pipe without a reader, a full disk, a closed terminal."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, cast

from rich.console import Console

__all__ = ["Outlet", "lasting"]

log = logging.getLogger("bakeoff")


class Outlet:
    """A text file that is dropped, with one warning, when it can't be written: what follows is lost.

    With `last`, nothing else in this process needs it: standard output then goes nowhere, so that Python's
    own last flush of it doesn't fail again.
    """

    def __init__(self, file: IO[str], *, last: bool = False) -> None:
        self.file = file
        self.last = last
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self.file.write(text)
            except (OSError, ValueError) as error:  # a ValueError where it is closed
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self.file.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        if isinstance(error, UnicodeError):
            raise error
        self.lost = True
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        log.warning("can't print (%s): training goes on in silence; metrics.jsonl has its rows", why)
        if self.last and self.file is sys.__stdout__:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextlib.contextmanager
def lasting(console: Console, *, last: bool = False) -> Iterator[Console]:
    """`console`, through an `Outlet` while the context lasts; on its own, rich ends the process at a broken
    pipe."""
    before = console.file
    if isinstance(before, Outlet):
        yield console
        return
    console.file = cast("IO[str]", Outlet(before, last=last))
    try:
        yield console
    finally:
        follows = before is (sys.stderr if console.stderr else sys.stdout)
        console.file = cast("IO[str]", None if follows else before)  # with None it goes on following
