"""What the parts of a run share: set-up makes a Context; the loop, saving and reporting work on it."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from bakeoff.apps.train.config import Config
from bakeoff.apps.train.data import Prefetcher
from bakeoff.apps.train.lock import RunLock
from bakeoff.apps.train.metrics import MetricsLog
from bakeoff.apps.train.step import Stepper
from bakeoff.apps.train.timing import Timer
from bakeoff.select import Explanation

__all__ = ["Context", "Progress"]


@dataclass
class Progress:
    """How far a run has come. Steps and seconds count from its beginning, also where this call resumed it."""

    step: int = 0
    first_step: int = 0
    """The step that this call began at."""
    logged_step: int = 0
    """The step of the last train row."""
    lr: float = 0.0
    """The rate of the last step."""
    skipped: int = 0
    """Steps whose gradient was not finite, as of the last train row."""
    seconds: float = 0.0
    """By rank 0's clock, as of the last step."""
    bits_before: float = 0.0
    """Held-out bits per byte before the first step."""
    bits_best: float | None = None
    """The held-out bits per byte of the checkpoint that is kept as the best."""
    checkpoint: Path | None = None
    """The newest checkpoint: saved by this call, or the one it resumed from."""
    saved: Path | None = None
    """What this call saved last: the newest checkpoint, or one put aside while steps are skipped."""


@dataclass
class Context:
    """A run that is set up."""

    config: Config
    run_dir: Path
    lock: RunLock
    stepper: Stepper
    feed: Prefetcher
    held_out: Tensor
    """Rows [N, T + 1] that are measured and never trained on."""
    metrics: MetricsLog
    timer: Timer
    progress: Progress = field(default_factory=Progress)
    selection: list[Explanation] = field(default_factory=list)
    """What each op runs, and why."""

    @property
    def share_done(self) -> float:
        """The share of the run that is done, which the learning rate follows."""
        train, progress = self.config.train, self.progress
        share = progress.step / train.steps if train.steps else progress.seconds / train.max_seconds
        return min(1.0, share)
