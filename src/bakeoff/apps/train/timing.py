"""Where the time of a run goes: training, measuring and saving, waiting for data."""

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["Timer"]


class Timer:
    """The seconds of a run, by a clock that tests can fake.

    Attributes:
        before: seconds of the parts of the run before this process.
        waited: seconds spent waiting for data since the last window.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock, self.device = clock, device
        self.before = self.waited = 0.0
        self._paused = 0.0
        self._start = self._loop = self._window = clock()  # the last two by `_active`

    def begin(self) -> None:
        """The run starts; preparation before this does not count."""
        self._start = self.clock()

    def begin_loop(self) -> None:
        """The first step comes now."""
        self._loop = self._window = self._active()

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
        self._paused += self.clock() - begin

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is spent waiting for data."""
        begin = self.clock()
        yield
        self.waited += self.clock() - begin

    def busy(self) -> float:
        """Seconds of steps since `begin_loop`, pauses left out; waits for the device."""
        self.synchronize()
        return self._active() - self._loop

    def window(self) -> tuple[float, float]:
        """(seconds of steps, seconds of waiting for data) since the last call."""
        now = self._active()
        spent, waited = now - self._window, self.waited
        self._window, self.waited = now, 0.0
        return spent, waited

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _active(self) -> float:
        """The clock, which stands still in pauses."""
        return self.clock() - self._paused
