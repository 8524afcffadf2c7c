"""Everything before the first step: data, run folder, model, leak check, selection, first measurement."""

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from bakeoff.apps.render import selection_table
from bakeoff.apps.train.checkpoint import Checkpoint
from bakeoff.apps.train.config import Config, Data
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.data import Batches, ByteCorpus, DataError, Prefetcher, held_out_rows, mix, open_parts
from bakeoff.apps.train.device import Placement, memory_errors
from bakeoff.apps.train.fp8 import to_fp8
from bakeoff.apps.train.leak import check_leaks
from bakeoff.apps.train.lock import RunLock
from bakeoff.apps.train.metrics import MetricsLog, Resumed, log, read_metrics
from bakeoff.apps.train.reporting import evaluate, peak_tokens_per_s, report_start, warn_of_other_candidates
from bakeoff.apps.train.result import Result
from bakeoff.apps.train.rundir import open_run
from bakeoff.apps.train.saving import restore
from bakeoff.apps.train.selection import select_candidates, summary
from bakeoff.apps.train.step import Stepper
from bakeoff.apps.train.timing import Timer
from bakeoff.models import build
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import LongNetLM
from bakeoff.models.titan_mac import TitanMAC

__all__ = ["Inputs", "finished", "open_inputs", "select", "set_up"]


@dataclass(frozen=True)
class Inputs:
    """What a run reads and where it writes."""

    batches: Batches
    held_out: Tensor
    run_dir: Path
    start: Checkpoint | None
    """The checkpoint to go on from."""
    digest: str
    """Of the data."""


def open_inputs(config: Config, placement: Placement, lock: RunLock) -> Inputs:
    """Opens the data and the run's folder, and locks that. Raises DataError, ConfigError, FolderInUse and
    CheckpointError."""
    world = placement.world
    corpus, training, held_out = open_parts(config.data, config.seq_len)
    batches = Batches(
        corpus,
        training,
        seq_len=config.seq_len,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        rank=world.rank // config.parallel.cp,  # ranks that share rows read the same
        world_size=world.size // config.parallel.cp,
    )
    rows = held_out_rows(corpus, held_out, config.seq_len, config.train.eval_rows).to(placement.device)
    run_dir, start = open_run(config, lock, world)
    digest = world.decide(corpus.digest)
    if start is not None:
        _compare_data(config, corpus, digest, start)
    return Inputs(batches, rows, run_dir, start, digest)


def _compare_data(config: Config, corpus: ByteCorpus, digest: str, start: Checkpoint) -> None:
    """Raises DataError where the data at the path that `start` was trained on are others now."""
    saved = start.progress()
    other_files = _order(config.data) != _order(start.config.data)
    if other_files or saved.data_digest in ("", digest):
        if saved.data_digest == digest and corpus.sampled and corpus.modified != saved.data_modified:
            log.warning("%s was written since %s; the bytes compared are equal", corpus.name, start.folder)
        return
    if not config.data.may_change:
        raise DataError(
            f"{corpus.name} is not what {start.folder} was trained on: restore it, or go on with what is "
            "there now by data.may_change=true"
        )
    log.warning("the data changed since %s was saved, so losses will differ", start.folder)


def _order(data: Data) -> tuple[str, float, float]:
    """What decides which files are read, and in which order: those that are held out whole come last."""
    return data.path, data.whole, data.validation if data.whole else 0.0


def over(config: Config, start: Checkpoint) -> str:
    """What ended the run that saved `start`: "steps" or "time"; "" where something is left to do."""
    if config.train.steps and start.step >= config.train.steps:
        return "steps"
    limit = config.train.max_seconds
    return "time" if limit and start.progress().elapsed >= limit else ""


def finished(config: Config, inputs: Inputs) -> Result | None:
    """The result of a run that is over and measured, as it stands in its metrics; else None."""
    start, file = inputs.start, inputs.run_dir / "metrics.jsonl"
    stopped = over(config, start) if start else ""
    if start is None or not stopped or not _own(inputs, start) or not file.exists():
        return None
    rows = read_metrics(file)
    end: dict[str, Any] = next((row for row in reversed(rows) if row.get("event") == "end"), {})
    if end.get("step") != start.step or end.get("held_out_bits_per_byte") is None:
        return None
    skipped = [row["skipped"] for row in rows if row.get("event") == "train"]
    return Result(
        run_dir=inputs.run_dir,
        checkpoint=None,
        steps=start.step,
        seconds=end["seconds"],
        bits_per_byte_before=start.progress().before,
        bits_per_byte_after=end["held_out_bits_per_byte"],
        tokens_per_s=0.0,
        skipped=skipped[-1] if skipped else 0,
        stopped=stopped,
        selection=(),
    )


def _resumed(config: Config, inputs: Inputs) -> Resumed | None:
    """Where the run goes on with the metrics in its folder; None where these are to begin anew."""
    start = inputs.start
    if start is None or not _own(inputs, start):
        return None
    return Resumed(start.step, start.progress().logged_step, over(config, start) != "")


def _own(inputs: Inputs, start: Checkpoint) -> bool:
    """Whether this run saved `start`."""
    return start.run_dir.resolve() == inputs.run_dir.resolve()


@contextlib.contextmanager
def set_up(
    config: Config,
    placement: Placement,
    inputs: Inputs,
    lock: RunLock,
    console: Console,
    clock: Callable[[], float],
) -> Iterator[Context]:
    """A run that is ready for its first step; closes what it opened."""
    device, world = placement.device, placement.world
    model, resumed = _model(config, inputs, device), _resumed(config, inputs)
    with (
        memory_errors(*_too_large_a_step(config)),
        MetricsLog(inputs.run_dir, config, console, first=world.first, resumed=resumed) as metrics,
        Prefetcher(inputs.batches, device, inputs.digest, may_change=config.data.may_change) as feed,
    ):
        stepper = Stepper(model, config, device, world, placement.mode)
        stepper.uncaptured = placement.no_graph
        context = Context(
            config, inputs.run_dir, lock, stepper, feed, inputs.held_out, metrics, Timer(clock, device)
        )
        _prepare(context, inputs.start)
        with stepper.ending():
            yield context


def _model(
    config: Config, inputs: Inputs, device: torch.device
) -> LLMMed | ByteSpectralLM | TitanMAC | LongNetLM:
    """The model on its device, fresh or with the checkpoint's weights, once it is known not to leak."""
    torch.manual_seed(config.train.seed)
    with memory_errors("while the model was built", "make model.d_model or model.layers smaller"):
        model = build(config.model) if inputs.start is None else inputs.start.model(config)
        model.to(device).train()
    if config.train.fp8:  # before the guard looks at it
        to_fp8(model, device)
    if config.train.leak_check:
        check_leaks(model, inputs.held_out, config, device)
    return model


def _too_large_a_step(config: Config) -> tuple[str, str]:
    """For running out of memory in a step: (where, the fix)."""
    rows, parts = config.train.batch_size, config.train.accumulate
    where = f"with train.batch_size={rows}, {config.seq_len} bytes a row, train.accumulate={parts}"
    half = f"set train.accumulate={2 * parts} for the same steps in about half the memory"
    return where, f"{half}, or lower train.batch_size"


def _prepare(context: Context, start: Checkpoint | None) -> None:
    """Restores `start`, selects candidates, and takes the first measurement."""
    config, stepper, corpus = context.config, context.stepper, context.feed.batches.corpus
    if not stepper.world.first:  # dropout differs from rank to rank; the first rank's is as if it were alone
        torch.manual_seed(mix(config.train.seed, stepper.world.rank))
    context.metrics.say(f"data: {corpus.name}, {len(corpus):,} bytes")
    if start is not None:
        restore(context, start)
    select(context, tune=config.select.tune, before=start.run_dir if start else None)
    if stepper.world.first:
        peak_tokens_per_s(context)  # measured here, so that no step waits for it
    if not stepper.uncaptured:
        stepper.capture()
    elif stepper.device.type == "cuda":
        context.metrics.say(f"steps are not captured: {stepper.uncaptured}")
    if start is not None and stepper.world.first:
        warn_of_other_candidates(context, start.run_dir)
    report_start(context)
    context.timer.begin()
    if start is None:
        context.progress.bits_before = evaluate(context)
        context.timer.begin()  # so that equal time is equal time for training
    context.timer.begin_loop()


def select(context: Context, *, tune: bool, before: Path | None = None) -> None:
    """Decides what each op of the steps to come runs: as the run in the folder `before` did, or after
    contests if `tune`."""
    stepper = context.stepper
    rows = context.feed.get(context.progress.step)
    # Contests draw random inputs, which must not change what the run draws.
    with torch.random.fork_rng(devices=[stepper.device] if stepper.device.type == "cuda" else []):
        context.selection = select_candidates(
            lambda: stepper.rehearse(rows),
            msgspec.structs.replace(context.config.select, tune=tune),
            context.run_dir,
            context.metrics.say,
            stepper.world,
            compiled=context.config.train.compile,
            before=before,
        )
    context.metrics.say(summary(context.selection, shlex.quote(str(context.run_dir))))
    if log.isEnabledFor(logging.INFO):
        context.metrics.show(selection_table(context.selection))
