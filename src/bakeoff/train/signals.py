"""Ctrl-C and SIGTERM: before the first step at once, then behind the step in hand."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals", "Stopped"]


class Stopped(KeyboardInterrupt):
    """A signal came while it was to be obeyed at once. Nothing that catches errors catches this."""


class StopSignals:
    """While open, the first SIGINT or SIGTERM is noted in `caught`; the second acts as usual.

    While `at_once` is set, the first also raises `Stopped` wherever the main thread is.

    Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.caught = ""
        self.at_once = at_once
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name
        self._restore()
        if self.at_once:
            raise Stopped(self.caught)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
