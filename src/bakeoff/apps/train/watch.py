"""The sentinel in a run: now and then one of the selected calls is verified on the run's own values."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from bakeoff.apps.train.config import ConfigError
from bakeoff.apps.train.context import Context
from bakeoff.select import sentinel

__all__ = ["watching"]

log = logging.getLogger("bakeoff")


@contextlib.contextmanager
def watching(context: Context) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step. After each `train.sentinel`-th one it rehearses the next step,
    call by call, also where steps are replayed from a CUDA graph, and verifies one kind of calls, each in its
    turn. Where one fails, the graph is captured anew, with plain PyTorch in its place.

    Weights, optimizer state and random numbers stay as they were, so that a run goes as it does unwatched.
    """
    every, stepper = context.config.train.sentinel, context.stepper
    if not every:
        yield lambda: None
        return
    if stepper.world.size > 1:
        raise ConfigError("train.sentinel watches runs of one process: leave it at 0 under torchrun")
    with sentinel(every=1, folder=context.run_dir / "reproducers") as guard:

        def look() -> None:
            if context.progress.step % every:
                return
            before = len(guard.failed)
            devices = [stepper.device] if stepper.device.type == "cuda" else []
            guard.step()
            with context.timer.pause(), torch.random.fork_rng(devices=devices):
                stepper.rehearse(context.feed.get(context.progress.step))
            guard.rest()
            for place, file in list(guard.failed.items())[before:]:
                context.metrics.say(
                    f"step {context.progress.step}: {place} is wrong and runs no more; {file} repeats it"
                )
            if len(guard.failed) > before and stepper.captured is not None:
                stepper.capture()

        yield look
