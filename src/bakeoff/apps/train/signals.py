"""Ctrl-C, SIGTERM and SIGHUP: obeyed at once before the first step, after the step in hand from then on."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals", "Stopped"]

_IMPATIENT = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal came while it was to be obeyed at once. Nothing that catches errors catches this."""


class StopSignals:
    """While open, the first SIGINT, SIGTERM or SIGHUP is noted in `caught`; a second SIGINT or SIGTERM acts
    as usual.

    A second SIGHUP does nothing, since a terminal that closes may send two. Where SIGHUP was ignored, as
    under nohup, it stays so.

    While `at_once` is set, the first also raises `Stopped` wherever the main thread is.

    Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.caught = ""
        self.at_once = at_once
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_IMPATIENT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            return
        self.caught = signal.Signals(number).name
        self._restore(_IMPATIENT)
        if self.at_once:
            raise Stopped(self.caught)

    def _restore(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(list(self._before))
