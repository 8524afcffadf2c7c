"""Standard output that may go away under a run: a pipe without a reader, a full disk, a closed terminal."""

import contextlib
import os
import sys
from typing import IO, Any, cast

from rich.console import Console

from bakeoff.train.metrics import log

__all__ = ["Outlet", "lasting"]


class Outlet:
    """A text file that is dropped, with one warning, when it can't be written: what follows is lost."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self.file.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self.file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.lost = True
        log.warning(
            "can't print (%s): training goes on in silence; metrics.jsonl has its rows",
            error.strerror or error,
        )
        if self.file is sys.__stdout__:  # what it still holds would fail again when Python ends
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def lasting(console: Console) -> Console:
    """`console`, from now on through an `Outlet`; on its own, rich ends the process at a broken pipe."""
    if not isinstance(console.file, Outlet):
        console.file = cast("IO[str]", Outlet(console.file))
    return console
