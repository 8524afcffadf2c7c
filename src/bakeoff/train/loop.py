"""The training loop: `train(config)`.

Between log points nothing waits for the device: losses and gradient norms add up in device tensors. Reading
them, evaluating and saving are the only points where host and device meet.
"""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from bakeoff import hardware
from bakeoff.select.render import selection_table
from bakeoff.models.llm_med import LLMMed
from bakeoff.select import Explanation, using
from bakeoff.train import checkpoint, selection
from bakeoff.train.checkpoint import Checkpoint
from bakeoff.train.config import Config
from bakeoff.train.data import Batches, ByteCorpus, Prefetcher, held_out_rows, split
from bakeoff.train.device import TrainError, memory_errors, pick_device
from bakeoff.train.metrics import MetricsLog, log
from bakeoff.train.rundir import open_run
from bakeoff.train.signals import StopSignals
from bakeoff.train.step import Stepper, learning_rate

__all__ = ["Result", "TrainError", "train"]

_HOPELESS = 50  # steps in a row without a finite gradient


class Result(msgspec.Struct, frozen=True):
    """What a run did. Bits per byte are means over held-out rows; a byte drawn blindly costs 8."""

    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None when no step was made."""
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


def train(
    config: Config,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Trains the configured model, or goes on with an interrupted run.

    Ctrl-C or SIGTERM ends it after the step in hand, with a checkpoint. Everything is written below
    ``config.train.run_dir``: config.toml, metrics.jsonl, table.json (the verdicts used), checkpoints/.

    Args:
        config: from `recipe` and `resolve`.
        console: where progress goes; standard output by default.
        clock: seconds; tests give a false one.

    Raises:
        ConfigError, DataError, CheckpointError, PolicyError, Unsupported: before the first step.
        TrainError: out of memory, a gradient that stays not finite, or a last checkpoint that can't be saved.

    Example:
        >>> from bakeoff.train import recipe, resolve, train
        >>> quick = ["train.steps=20", "train.max_seconds=0", "select.tune=false"]
        >>> result = train(resolve(recipe("llm-med-tiny"), None, quick))  # doctest: +SKIP
    """
    device = pick_device(config.train.device)
    console = console or Console()
    corpus = ByteCorpus.open(config.data.path)
    training, held_out = split(corpus, config.data.holdout, config.seq_len)
    batches = Batches(
        corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=config.train.seed
    )
    evaluation = held_out_rows(corpus, held_out, config.seq_len, config.train.eval_rows)
    with using(config.select.policy or None, **config.select.ops):
        run_dir, start = open_run(config)
        torch.manual_seed(config.train.seed)
        model = LLMMed(config.model)
        if start is not None:
            model.load_state_dict(start.weights)
        model.to(device).train()
        with (
            memory_errors(config),
            MetricsLog(run_dir, config, console) as metrics,
            Prefetcher(batches, device) as feed,
        ):
            run = _Run(config, run_dir, model, feed, evaluation.to(device), metrics, console, clock)
            run.prepare(start)
            return run.go()


class _Run:
    """The state of one call of `train`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        model: LLMMed,
        feed: Prefetcher,
        evaluation: Tensor,
        metrics: MetricsLog,
        console: Console,
        clock: Callable[[], float],
    ) -> None:
        self.config, self.run_dir, self.model, self.feed = config, run_dir, model, feed
        self.evaluation, self.metrics, self.console, self.clock = evaluation, metrics, console, clock
        self.device = feed.device
        self.stepper = Stepper(model, config, self.device)
        self.step = self.first_step = self.logged_step = 0
        self.before = self.after = 0.0
        self.elapsed_before = 0.0  # seconds of the parts of the run before this call
        self.started = self.loop_start = self.window_start = 0.0
        self.paused = self.window_paused = self.waited = 0.0
        self.lr = 0.0
        self.skipped = 0
        self.saved: Path | None = None
        self.selection: list[Explanation] = []
        self.flops_per_token = model.flops_per_token(config.seq_len)
        self.peak_flops = 0.0

    def prepare(self, start: Checkpoint | None) -> None:
        """Restores `start`, settles selection, and takes the first measurement."""
        if start is not None:
            self._restore(start)
        # Contests and measured ceilings draw random inputs, some of them only in a process's first run.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._settle()
            self.peak_flops = hardware.ceilings(str(self.device)).matmul_tflops * 1e12
        corpus = self.feed.batches.corpus
        self.metrics.write(
            {
                "event": "start",
                "step": self.step,
                "time": time.time(),
                "recipe": self.config.recipe,
                "device": hardware.facts(self.device.type).device,
                "torch": str(torch.__version__),
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "data": corpus.name,
                "data_bytes": len(corpus),
                **selection.choices(self.selection),
            }
        )
        self.started = self.clock()
        if start is None:
            self.before = self.evaluate()
        self.paused = self.window_paused = 0.0
        self.window_start = self.loop_start = self.clock()

    def _restore(self, start: Checkpoint) -> None:
        state = start.state
        self.stepper.restore(state["stepper"])
        self.step = self.first_step = state["step"]
        self.logged_step = state["logged_step"]
        self.before = state["before"]
        self.elapsed_before = state["elapsed"]
        if state["data_bytes"] != len(self.feed.batches.corpus):
            log.warning("the data changed since %s was saved, so losses will differ", start.folder)
        self.metrics.write({"event": "resume", "step": self.step})
        self._say(f"resumed from {start.folder} at step {self.step}")

    def _say(self, text: str) -> None:
        if self.config.metrics.console:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _settle(self) -> None:
        rows = self.feed.get(self.step)
        self.selection = selection.settle(
            lambda: self.stepper.rehearse(rows), self.config.select, self.run_dir, self._say
        )
        if self.config.metrics.console:
            self.console.print(selection_table(self.selection))

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + self.clock() - self.started

    @property
    def progress(self) -> float:
        """The share of the run that is done, which the learning rate follows."""
        train = self.config.train
        return min(1.0, self.step / train.steps if train.steps else self.elapsed / train.max_seconds)

    def go(self) -> Result:
        """Steps until the run is over or a signal comes; saves; measures."""
        train = self.config.train
        with StopSignals() as signals:
            stopped = self._over()
            while not stopped:
                self._step()
                if self.step % train.log_every == 0:
                    self.report()
                stopped = signals.caught or self._over()
                if train.eval_every and self.step % train.eval_every == 0 and not stopped:
                    self.evaluate()
                if train.checkpoint_every and self.step % train.checkpoint_every == 0 and not stopped:
                    self.save()
            made = self.step - self.first_step
            self._synchronize()
            busy = self.clock() - self.loop_start - self.paused
            if made:
                self.save(last=True)
        if signals.caught:
            self._say(f"{signals.caught}: stopped after step {self.step}, saved {self.saved}")
            self._say(f"go on with train.run_dir={self.run_dir}")
        self.after = self.evaluate()
        speed = made * self.config.train.batch_size * self.config.seq_len / busy if made and busy > 0 else 0.0
        self.metrics.write(
            {
                "event": "end",
                "step": self.step,
                "seconds": self.elapsed,
                "tokens_per_s": speed,
                "held_out_bits_per_byte": self.after,
                "stopped": stopped,
            },
            1.0,
        )
        return Result(
            run_dir=self.run_dir,
            checkpoint=self.saved,
            steps=self.step,
            seconds=self.elapsed,
            bits_per_byte_before=self.before,
            bits_per_byte_after=self.after,
            tokens_per_s=speed,
            skipped=self.skipped,
            stopped=stopped,
            selection=tuple(self.selection),
        )

    def _over(self) -> str:
        train = self.config.train
        if train.steps and self.step >= train.steps:
            return "steps"
        if train.max_seconds and self.elapsed >= train.max_seconds:
            return "time"
        return ""

    def _step(self) -> None:
        begin = self.clock()
        rows = self.feed.get(self.step)
        self.waited += self.clock() - begin
        self.lr = learning_rate(self.config.optim, self.progress)
        self.stepper(rows, self.lr)
        self.step += 1

    def report(self) -> None:
        """The metrics line of the steps since the last one."""
        found = self.stepper.read(self.step - self.logged_step)
        now = self.clock()
        spent = now - self.window_start - self.window_paused
        # After a resume the window began in an earlier process; only steps made here have a time.
        timed = self.step - max(self.logged_step, self.first_step)
        speed = timed * self.config.train.batch_size * self.config.seq_len / spent if spent > 0 else 0.0
        self.skipped = int(found["skipped"])
        row = {
            "event": "train",
            "step": self.step,
            "loss": found["loss"],
            "bits_per_byte": found["loss"] / math.log(2.0),
            "grad_norm": found["grad_norm"],
            "lr": self.lr,
            "tokens_per_s": speed,
            "share_of_peak": speed * self.flops_per_token / self.peak_flops,
            "peak_bytes": self._peak_bytes(),
            "data_wait_s": self.waited,
            "skipped": self.skipped,
            "seconds": self.elapsed,
        }
        self.metrics.write(row, self.progress)
        self.window_start, self.window_paused, self.waited = now, 0.0, 0.0
        self.logged_step = self.step
        if found["skipped_in_a_row"] >= _HOPELESS:
            raise TrainError(
                f"the gradient has not been finite for {found['skipped_in_a_row']:.0f} steps, at step "
                f"{self.step}: lower optim.lr={self.config.optim.lr:g} and resume from an earlier checkpoint"
            )

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Time in here is not training time."""
        self._synchronize()
        begin = self.clock()
        yield
        spent = self.clock() - begin
        self.paused += spent
        self.window_paused += spent

    def evaluate(self) -> float:
        """Held-out bits per byte, also written as a row."""
        with self._pause():
            bits = self.stepper.bits_per_byte(self.evaluation)
            row = {
                "event": "eval",
                "step": self.step,
                "held_out_bits_per_byte": bits,
                "seconds": self.elapsed,
            }
            self.metrics.write(row, self.progress)
        return bits

    def save(self, *, last: bool = False) -> None:
        """Writes a checkpoint. A failure is a warning while training can go on, an error at the end."""
        state: dict[str, Any] = {
            "step": self.step,
            "logged_step": self.logged_step,
            "elapsed": self.elapsed,
            "before": self.before,
            "data_bytes": len(self.feed.batches.corpus),
            "stepper": self.stepper.state(),
        }
        with self._pause():
            try:
                self.saved = checkpoint.save(
                    self.run_dir, self.model, self.config, state, keep=self.config.train.keep
                )
            except OSError as error:
                held = f"the last one saved is {self.saved}" if self.saved else "none has been saved yet"
                text = f"can't save step {self.step} below {self.run_dir} ({error.strerror or error}); {held}"
                if last:
                    raise TrainError(
                        f"{text}. Free space or set train.run_dir elsewhere, and resume"
                    ) from error
                log.warning("%s; training goes on", text)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
