"""A run: steps, log points, measurements and checkpoints.

Between log points nothing waits for the device: losses and gradient norms add up in device tensors. Reading
them, evaluating and saving are the only points where host and device meet.
"""

import contextlib
import math
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from bakeoff import hardware
from bakeoff.apps.render import selection_table
from bakeoff.apps.train import checkpoint, selection
from bakeoff.apps.train.checkpoint import Checkpoint, CheckpointError, State
from bakeoff.apps.train.config import Config
from bakeoff.apps.train.data import Prefetcher
from bakeoff.apps.train.device import TrainError
from bakeoff.apps.train.metrics import MetricsLog, log, read_metrics
from bakeoff.apps.train.pace import Pace
from bakeoff.apps.train.signals import StopSignals
from bakeoff.apps.train.step import Stepper, learning_rate
from bakeoff.select import Explanation, using

__all__ = ["Result", "Run", "stopped_first"]

_HOPELESS = 50  # steps in a row without a finite gradient
_TIME_IS_UP = 128  # a wish to stop that is no signal


class Result(msgspec.Struct, frozen=True):
    """What a run did. Bits per byte are means over held-out rows; a byte drawn blindly costs 8; they are NaN
    where a signal came before they were measured."""

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
    signal: str = ""
    """The signal that came, also where the run was over by then."""

    @classmethod
    def unstarted(cls, run_dir: Path, start: Checkpoint | None, stopped: str) -> "Result":
        """The result of a run that the signal `stopped` ended while it prepared."""
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


def stopped_first(name: str, held: Path | None) -> str:
    """What to say of a run that the signal `name` ended before it made a step; `held` is the checkpoint that
    it was to go on from."""
    rest = f"{held} is still the last checkpoint" if held else "nothing to save"
    return f"{name}: stopped before the first step; {rest}"


class Run:
    """The state of one call of `train`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stepper: Stepper,
        feed: Prefetcher,
        evaluation: Tensor,
        metrics: MetricsLog,
        console: Console,
        clock: Callable[[], float],
        settings: contextlib.ExitStack,
        flops_per_token: int,
    ) -> None:
        self.config, self.run_dir, self.stepper, self.feed = config, run_dir, stepper, feed
        self.evaluation, self.metrics, self.console, self.settings = evaluation, metrics, console, settings
        self.device, self.world = stepper.device, stepper.world
        self.talks = self.world.first and config.metrics.console
        self.step = self.first_step = self.logged_step = 0
        self.before = self.after = 0.0
        self.pace = Pace(clock, self._synchronize)
        self.seconds = 0.0  # of the run, by rank 0's clock
        self.lr = 0.0
        self.skipped = 0
        self.saved: Path | None = None
        self.held: Path | None = None  # the checkpoint that this call goes on from
        self.selection: list[Explanation] = []
        self.flops_per_token = flops_per_token
        self.peak_flops = 0.0
        self.wants_graph = not stepper.uncaptured
        self.told_about_graph = False

    def prepare(self, start: Checkpoint | None) -> None:
        """Restores `start`, settles selection, and takes the first measurement."""
        self.stepper.seed(self.config.train.seed)
        corpus = self.feed.batches.corpus
        self._say(f"data: {corpus.name}, {len(corpus):,} bytes")
        if start is not None:
            self._restore(start)
        self._settle(tune=True)
        if self.wants_graph:
            self.stepper.capture()
        elif self.device.type == "cuda":
            self._say(f"steps are not captured: {self.stepper.uncaptured}")
        choices = selection.choices(self.selection)
        if start is not None and self.world.first:
            self._warn_of_other(choices, start)
        self.metrics.write(
            {
                "event": "start",
                "step": self.step,
                "time": time.time(),
                "recipe": self.config.recipe,
                "device": hardware.facts(self.device.type).device,
                "torch": str(torch.__version__),
                "ranks": self.world.size,
                "parallel": self.stepper.mode,
                "parameters": sum(p.numel() for p in self.stepper.model.parameters()),
                "data": corpus.name,
                "data_bytes": len(corpus),
                **choices,
            }
        )
        self.pace.begin()
        if start is None:
            self.before = self.evaluate()
            self.pace.begin()  # so that equal time is equal time for training
        self.pace.begin_loop()

    def _restore(self, start: Checkpoint) -> None:
        then = start.progress()
        try:
            self.stepper.restore(start.tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{start.folder / 'run.safetensors'} is of another version: {error}. Give another checkpoint"
            ) from error
        start.read_moments(self.stepper.moments(), self.world)
        self.step = self.first_step = start.step
        self.held = start.folder
        self.logged_step = then.logged_step
        self.before = then.before
        self.pace.before = self.seconds = then.elapsed
        if then.data_bytes != len(self.feed.batches.corpus):
            log.warning("the data changed since %s was saved, so losses will differ", start.folder)
        self.metrics.write({"event": "resume", "step": self.step})
        self._say(f"resumed from {start.folder} at step {self.step}")

    def _warn_of_other(self, choices: dict[str, str], start: Checkpoint) -> None:
        """Says which ops run by other candidates than in the run that saved `start`."""
        file = start.folder.parent.parent / "metrics.jsonl"
        rows = read_metrics(file) if file.exists() else []
        then: dict[str, object] = next((row for row in reversed(rows) if row.get("event") == "start"), {})
        changed = [
            f"{name}={choice}, was {then[name]}"
            for name, choice in choices.items()
            if then.get(name, choice) != choice
        ]
        if changed:
            log.warning("other candidates run now, so losses may differ by rounding: %s", "; ".join(changed))

    def _say(self, text: str) -> None:
        if self.talks:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _settle(self, *, tune: bool) -> None:
        """Selection for the steps to come, and the ceiling that their speed is compared with."""
        rows = self.feed.get(self.step)
        wanted = msgspec.structs.replace(self.config.select, tune=tune and self.config.select.tune)
        # Contests and measured ceilings draw random inputs, some of them only in a process's first run.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.selection = selection.settle(
                lambda: self.stepper.rehearse(rows),
                wanted,
                self.run_dir,
                self._say,
                self.world,
                compiled=self.stepper.compiled,
            )
            self.peak_flops = hardware.ceilings(str(self.device)).matmul_tflops * 1e12 * self.world.size
        if self.talks:
            self.console.print(selection_table(self.selection))

    @property
    def progress(self) -> float:
        """The share of the run that is done, which the learning rate follows."""
        train = self.config.train
        return min(1.0, self.step / train.steps if train.steps else self.seconds / train.max_seconds)

    def go(self, signals: StopSignals) -> Result:
        """Steps until the run is over or a signal comes; saves; measures."""
        signals.at_once = False
        stopped = self._steps(signals)
        made = self.step - self.first_step
        busy = self.pace.busy()
        if made:
            self.save(last=True)
        if made and self.step > self.logged_step:
            self.report()  # behind the checkpoint, so that a run that goes on makes the whole row
        early = stopped not in ("steps", "time")
        if early and made:
            self._say(f"{stopped}: stopped after step {self.step}, saved {self.saved}")
            self._say(f"go on with {shlex.quote(f'train.run_dir={self.run_dir}')}")
        elif early:
            self._say(stopped_first(stopped, self.held))
        self.after = math.nan if early and not made else self.evaluate()
        if signals.caught and not early:
            self._say(
                f"{signals.caught}: the run was over at step {self.step}, saved {self.saved or self.held}"
            )
        speed = made * self.config.train.batch_size * self.config.seq_len / busy if made and busy > 0 else 0.0
        self.metrics.write(
            {
                "event": "end",
                "step": self.step,
                "seconds": self.pace.elapsed,
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
            seconds=self.pace.elapsed,
            bits_per_byte_before=self.before,
            bits_per_byte_after=self.after,
            tokens_per_s=speed,
            skipped=self.skipped,
            stopped=stopped,
            selection=tuple(self.selection),
            signal=stopped if early else signals.caught,
        )

    def _steps(self, signals: StopSignals) -> str:
        """All steps of this call; returns what ended them."""
        train = self.config.train
        wish, self.seconds = self.world.post(self._wish(signals), self.pace.elapsed).read()
        stopped = self._over(wish)
        while not stopped:
            posted = self.world.post(self._wish(signals), self.pace.elapsed)
            self._step()
            if self.step % train.log_every == 0:
                self.report()
            self.world.doing(f"waiting at step {self.step}")
            # One rank alone hears itself at once; several hear what was said before the step.
            wish, self.seconds = (
                posted if self.world.size > 1 else self.world.post(self._wish(signals), self.pace.elapsed)
            ).read()
            stopped = self._over(wish)
            if train.eval_every and self.step % train.eval_every == 0 and not stopped:
                self.evaluate()
            if train.checkpoint_every and self.step % train.checkpoint_every == 0 and not stopped:
                self.save()
        return stopped

    def _wish(self, signals: StopSignals) -> int:
        """Why this rank would stop: a signal's number, the time, or 0."""
        if signals.caught:
            return int(signal.Signals[signals.caught])
        limit = self.config.train.max_seconds
        return _TIME_IS_UP if limit and self.world.first and self.pace.elapsed >= limit else 0

    def _over(self, wish: int) -> str:
        if self.config.train.steps and self.step >= self.config.train.steps:
            return "steps"
        if wish == _TIME_IS_UP:
            return "time"
        return signal.Signals(wish).name if wish else ""

    def _step(self) -> None:
        self.world.doing(f"at step {self.step + 1}")
        with self.pace.waiting():
            rows = self.feed.get(self.step)
        self.lr = learning_rate(self.config.optim, self.progress)
        self.stepper(rows, self.lr)
        self.step += 1
        if self.wants_graph and not self.told_about_graph:
            self._tell_about_graph()

    def _tell_about_graph(self) -> None:
        captured = self.stepper.captured
        if captured is not None and not captured.captured:
            return  # still warming up
        self.told_about_graph = True
        reason = self.stepper.uncaptured
        self.metrics.write(
            {"event": "capture", "step": self.step, "captured": not reason, "reason": reason}, self.progress
        )
        if not reason:
            self._say(
                f"steps are replayed from one CUDA graph, which holds {self.stepper.graph_bytes:,} bytes"
            )
            return
        if self.config.train.capture == "on":
            raise TrainError(
                f"the step can't be captured: {reason}. Set train.capture=auto or remove the cause"
            )
        self._say(f"steps are not captured: {reason}")
        self.settings.enter_context(using(regime="eager"))  # now the host's time counts
        with self.pace.pause():
            self._settle(tune=False)

    def report(self) -> None:
        """The metrics line of the steps since the last one."""
        found = self.stepper.read(self.step - self.logged_step)
        spent, waited = self.pace.window()
        # After a resume the window began in an earlier process; only steps made here have a time.
        timed = self.step - max(self.logged_step, self.first_step)
        speed = timed * self.config.train.batch_size * self.config.seq_len / spent if spent > 0 else 0.0
        self.skipped = int(found["skipped"])
        row = {
            "event": "train",
            "step": self.step,
            "steps": self.step - self.logged_step,
            "loss": found["loss"],
            "bits_per_byte": found["loss"] / math.log(2.0),
            "grad_norm": found["grad_norm"],
            "lr": self.lr,
            "tokens_per_s": speed,
            "share_of_peak": speed * self.flops_per_token / self.peak_flops,
            "peak_bytes": self._peak_bytes(),
            "graph_bytes": self.stepper.graph_bytes,
            "data_wait_s": waited,
            "skipped": self.skipped,
            "seconds": self.pace.elapsed,
        }
        self.metrics.write(row, self.progress)
        self.logged_step = self.step
        if found["skipped_in_a_row"] >= _HOPELESS:
            raise TrainError(
                f"the gradient has not been finite for {found['skipped_in_a_row']:.0f} steps, at step "
                f"{self.step}: lower optim.lr={self.config.optim.lr:g} and resume from an earlier checkpoint"
            )

    def evaluate(self) -> float:
        """Held-out bits per byte, also written as a row."""
        self.world.doing(f"measuring at step {self.step}")
        with self.pace.pause():
            bits = self.stepper.bits_per_byte(self.evaluation)
            row = {
                "event": "eval",
                "step": self.step,
                "held_out_bits_per_byte": bits,
                "seconds": self.pace.elapsed,
            }
            self.metrics.write(row, self.progress)
        return bits

    def save(self, *, last: bool = False) -> None:
        """Writes a checkpoint. A failure is a warning while training can go on, an error at the end."""
        self.world.doing(f"saving step {self.step}")
        numbers = {
            "step": self.step,
            "logged_step": self.logged_step,
            "elapsed": self.pace.elapsed,
            "before": self.before,
            "data_bytes": len(self.feed.batches.corpus),
        }
        with self.pace.pause():
            stepper = self.stepper
            state = State(numbers, stepper.weights(), stepper.state(), stepper.moments())
            try:
                self.saved = checkpoint.save(
                    self.run_dir, self.config, state, keep=self.config.train.keep, world=self.world
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
        """The largest share of memory that one rank has used."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
