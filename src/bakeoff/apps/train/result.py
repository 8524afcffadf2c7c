"""What `train` returns, and the error that ends it once it has begun."""

import math
from pathlib import Path

import msgspec

from bakeoff.apps.train.checkpoint import Checkpoint
from bakeoff.errors import BakeoffError
from bakeoff.select import Explanation

__all__ = ["Result", "TrainError"]


class TrainError(BakeoffError, RuntimeError):
    """Training can't go on; the message says what to change."""


class Result(msgspec.Struct, frozen=True):
    """What a run did. Bits per byte are means over held-out rows; a byte drawn blindly costs 8; they are NaN
    where a signal came before they were measured."""

    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None where nothing was saved."""
    steps: int
    seconds: float
    bits_per_byte_before: float
    bits_per_byte_after: float
    tokens_per_s: float
    """Over the steps made by this call, without evaluation and saving."""
    skipped: int
    stopped: str
    """"steps", "time", or the signal that ended the run early."""
    selection: tuple[Explanation, ...]
    """What each op ran, and why."""
    signal: str = ""
    """The signal that came, also where the run was over by then."""

    @classmethod
    def unstarted(cls, run_dir: Path, start: Checkpoint | None, stopped: str) -> "Result":
        """The result of a run that the signal `stopped` ended while it was set up."""
        return cls(
            run_dir=run_dir,
            checkpoint=None,
            steps=start.step if start else 0,
            seconds=start.progress().elapsed if start else 0.0,
            bits_per_byte_before=start.progress().before if start else math.nan,
            bits_per_byte_after=math.nan,
            tokens_per_s=0.0,
            skipped=0,
            stopped=stopped,
            selection=(),
            signal=stopped,
        )
