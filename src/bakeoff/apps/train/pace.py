"""Where the time of a run goes: training, measuring and saving, waiting for data."""

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Pace"]


class Pace:
    """The seconds of a run, by a clock that tests can fake.

    Attributes:
        before: seconds of the parts of the run before this process.
        waited: seconds spent waiting for data since the last window.
    """

    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        self.clock, self.synchronize = clock, synchronize
        self.before = self.waited = 0.0
        self._start = self._loop = self._window = clock()
        self._paused = self._window_paused = 0.0

    def begin(self) -> None:
        """The run starts; preparation before this does not count."""
        self._start = self.clock()

    def begin_loop(self) -> None:
        """The first step comes now."""
        self._paused = self._window_paused = 0.0
        self._loop = self._window = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, earlier parts included."""
        return self.before + self.clock() - self._start

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is not training time."""
        self.synchronize()
        begin = self.clock()
        yield
        spent = self.clock() - begin
        self._paused += spent
        self._window_paused += spent

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is spent waiting for data."""
        begin = self.clock()
        yield
        self.waited += self.clock() - begin

    def busy(self) -> float:
        """Seconds of steps since `begin_loop`, pauses left out; waits for the device."""
        self.synchronize()
        return self.clock() - self._loop - self._paused

    def window(self) -> tuple[float, float]:
        """(seconds of steps, seconds of waiting for data) since the last call; begins anew."""
        now = self.clock()
        found = now - self._window - self._window_paused, self.waited
        self._window, self._window_paused, self.waited = now, 0.0, 0.0
        return found
