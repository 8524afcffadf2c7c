"""Wall time of calls that a device runs after they return."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bakeoff.device import synchronize

__all__ = ["Clock", "seconds_per_call"]

Clock = Callable[[], float]
"""Seconds since some fixed moment; tests pass a fake one."""


def seconds_per_call(
    calls: Iterable[Callable[[], Any]],
    count: int,
    device: str | torch.device,
    *,
    clock: Clock = time.perf_counter,
    host_only: bool = False,
) -> float:
    """Mean seconds of `count` calls made back to back, going through `calls` again and again.

    The device's queue is empty at the start. Its work counts too, unless `host_only`: then the clock stops
    when the last call returns.

    Example:
        >>> ticks = iter([10.0, 13.0])
        >>> seconds_per_call([lambda: None], 2, "cpu", clock=lambda: next(ticks))
        1.5
    """
    turns = itertools.islice(itertools.cycle(calls), count)
    synchronize(device)
    start = clock()
    for call in turns:
        call()
    if not host_only:
        synchronize(device)
    return (clock() - start) / count
