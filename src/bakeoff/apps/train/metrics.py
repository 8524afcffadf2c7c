"""Where the numbers of a run go: metrics.jsonl always, the terminal, TensorBoard and W&B on request.

A row is a flat dictionary. ``event`` says what it is:
    start   what the run is, and ``select/OP``, the candidate chosen for each op
    train   step, steps (so many up to this one are what the row is about), loss (nats), bits_per_byte,
            grad_norm, lr, tokens_per_s, share_of_peak, peak_bytes, data_wait_s, seconds,
            skipped (steps so far with a gradient that was not finite)
            graph_bytes (device memory held by a captured step)
    eval    step, held_out_bits_per_byte
    capture step, captured, reason: whether steps are replayed from a CUDA graph, once that is known
    resume  step: another process goes on from here; rows of later steps were taken back and come again
    end     step, seconds, tokens_per_s, held_out_bits_per_byte, stopped
"""

import contextlib
import importlib
import logging
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bakeoff.apps.train.config import Config, to_tree
from bakeoff.errors import BakeoffError
from bakeoff.paths import write_whole

__all__ = [
    "JsonLines",
    "MetricsError",
    "MetricsLog",
    "Resumed",
    "Row",
    "Sink",
    "line",
    "log",
    "read_metrics",
    "say",
    "take_back",
]

log = logging.getLogger("bakeoff")

Row = Mapping[str, Any]


class MetricsError(BakeoffError, RuntimeError):
    """A sink was asked for whose package is not installed, or which can't start."""


class Sink(Protocol):
    """Takes rows."""

    def write(self, row: Row, progress: float) -> None:
        """One row; `progress` is the share of the run that is done."""

    def close(self) -> None:
        """Nothing comes after this."""


class JsonLines:
    """Appends rows to a file, each at once. A full or read-only disk is warned of once; rows that can't be
    written are lost and the run goes on. Numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        self._torn = _ends_torn(path)

    def write(self, row: Row, progress: float) -> None:
        data = (b"\n" if self._torn else b"") + msgspec.json.encode(row) + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                self._torn = True
                if file.write(data) == len(data):
                    self._torn = False
                    return
                problem = "the disk is full"
        except OSError as error:
            problem = error.strerror or str(error)
        if not self._warned:
            log.warning(
                "can't write %s (%s): training goes on, its rows are lost until there is room",
                self.path,
                problem,
            )
            self._warned = True

    def close(self) -> None:
        """Nothing is held open."""


def _ends_torn(path: Path) -> bool:
    """Whether the last line has no end, because the process died while writing it."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on with its own metrics."""

    step: int
    logged_step: int
    """The step of the last train row as of `step`: the rows of later steps come again."""
    measures_again: bool = False
    """Whether the next row is the measurement of `step`, which may stand there already."""

    def keeps(self, row: Row) -> bool:
        """Whether a row of before stays."""
        event, step = row.get("event"), int(row.get("step", 0))
        if event == "train":
            return step <= self.logged_step
        comes_again = event == "eval" and self.measures_again
        return event != "end" and (step < self.step or (step == self.step and not comes_again))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a line torn by a kill or a full disk."""
    rows = []
    for text in Path(path).read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            rows.append(msgspec.json.decode(text, type=dict[str, Any]))
    return rows


def take_back(path: Path, resumed: Resumed | None) -> list[dict[str, Any]]:
    """Leaves in a metrics.jsonl what a run keeps that goes on from there, or nothing where it begins anew;
    returns the rows that stay. The file is replaced whole."""
    if not path.exists() or not path.stat().st_size:
        return []
    rows = [row for row in read_metrics(path) if resumed.keeps(row)] if resumed else []
    try:
        write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        log.warning("can't take back rows of %s (%s): some steps will stand there twice", path, error)
    return rows


def line(row: Row) -> str:
    """A train or eval row as one line for people."""
    if row["event"] == "eval":
        return f"step {row['step']:>6}  held-out {row['held_out_bits_per_byte']:.3f} bits/byte"
    text = f"step {row['step']:>6}  {row['bits_per_byte']:.3f} bits/byte  |grad| {row['grad_norm']:.2f}"
    text += f"  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} bytes/s"
    return text + (f"  {row['skipped']} skipped" if row["skipped"] else "")


class Lines:
    """Plain lines, where there is no terminal: a log file, a pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def write(self, row: Row, progress: float) -> None:
        if row["event"] in ("train", "eval"):
            self.console.print(line(row), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held open."""


_WIDE = 120  # columns of a terminal that hold the bar and a whole line


class Bar:
    """A progress bar on a terminal, with held-out measurements as lines above it."""

    def __init__(self, console: Console) -> None:
        self.width = console.width
        bar = BarColumn(24 if self.width >= _WIDE else 8)
        columns = (bar, TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
        self.progress = Progress(*columns, TextColumn("{task.description}"), console=console)
        self.task = self.progress.add_task("starting", total=1.0)
        self.progress.start()

    def write(self, row: Row, progress: float) -> None:
        if row["event"] == "eval":
            self.progress.console.print(line(row), highlight=False)
        elif row["event"] == "train":
            self.progress.update(self.task, completed=progress, description=self._description(row))

    def _description(self, row: Row) -> str:
        """The row in one line beside the bar, however narrow the terminal."""
        if self.width >= _WIDE:
            return line(row)
        speed = f"  {row['tokens_per_s']:,.0f} bytes/s" if self.width >= 80 else ""
        return f"step {row['step']}  {row['bits_per_byte']:.3f} bits/byte{speed}"

    def close(self) -> None:
        self.progress.stop()


class TensorBoard:
    """Event files in the run's folder: train and eval rows as scalars, choices as text. A full disk ends them
    with a warning, not the run.

    What earlier processes wrote of steps from `since` on is purged, but for the `kept` rows.
    """

    def __init__(self, run_dir: Path, since: int, kept: Sequence[Row]) -> None:
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise MetricsError(
                "metrics.tensorboard=true needs TensorBoard: pip install 'bakeoff[tensorboard]'"
            ) from None
        self.writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=since)
        self._broken = False
        for row in kept:
            if row.get("step", 0) >= since:
                self.write(row, 0.0)

    def write(self, row: Row, progress: float) -> None:
        if self._broken:
            return
        try:
            for name, value in row.items():
                if name.startswith("select/"):
                    self.writer.add_text(name, str(value), row.get("step", 0))
                elif row["event"] in ("train", "eval") and isinstance(value, numbers.Real) and name != "step":
                    self.writer.add_scalar(name, value, row["step"])
        except OSError as error:  # its writer thread failed, and stays so
            self._give_up(error)

    def close(self) -> None:
        try:
            self.writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            log.warning(
                "can't write TensorBoard's files (%s): training goes on without them; metrics.jsonl has all",
                error.strerror or error,
            )
        self._broken = True


class WandB:
    """A Weights & Biases run, named after the run's folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            module = importlib.import_module("wandb")
        except ImportError:
            raise MetricsError(
                "metrics.wandb=true needs Weights & Biases: pip install 'bakeoff[wandb]'"
            ) from None
        try:
            self.run = module.init(
                project=config.metrics.wandb_project,
                name=run_dir.name,
                dir=str(run_dir),
                config=to_tree(config),
            )
        except (module.Error, OSError) as error:
            raise MetricsError(
                f"metrics.wandb=true: Weights & Biases can't start ({error}). Run wandb login, or set "
                "WANDB_MODE=offline to keep the run on this machine"
            ) from error

    def write(self, row: Row, progress: float) -> None:
        numeric = {name: value for name, value in row.items() if isinstance(value, numbers.Real)}
        texts = {name: value for name, value in row.items() if isinstance(value, str) and name != "event"}
        if row["event"] in ("train", "eval"):
            self.run.log({name: value for name, value in numeric.items() if name != "step"}, step=row["step"])
        else:
            self.run.summary.update({**numeric, **texts})

    def close(self) -> None:
        self.run.finish()


class MetricsLog:
    """All sinks of a run, and the console for words. Of several ranks only the first has any."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        console: Console | None = None,
        *,
        first: bool = True,
        resumed: Resumed | None = None,
    ) -> None:
        settings = config.metrics
        self.sinks: list[Sink] = []
        self.console: Console | None = None
        if not first:
            return
        kept = take_back(run_dir / "metrics.jsonl", resumed)
        self.sinks.append(JsonLines(run_dir / "metrics.jsonl"))
        if settings.tensorboard:
            self.sinks.append(TensorBoard(run_dir, resumed.logged_step if resumed else 0, kept))
        if settings.wandb:
            self.sinks.append(WandB(run_dir, config))
        if settings.console:
            self.console = console or Console()
            self.sinks.append(Bar(self.console) if self.console.is_terminal else Lines(self.console))

    def write(self, row: Row, progress: float = 0.0) -> None:
        """`row` to every sink; `progress` is the share of the run that is done."""
        for sink in self.sinks:
            sink.write(row, progress)

    def say(self, text: str) -> None:
        """A line for people, where the configuration asks for progress on the terminal."""
        if self.console is not None:
            say(self.console, text)

    def show(self, table: RenderableType) -> None:
        """A table for people, likewise."""
        if self.console is not None:
            self.console.print(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()


def say(console: Console, text: str) -> None:
    """Prints `text` as it is, on a line that is not broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
