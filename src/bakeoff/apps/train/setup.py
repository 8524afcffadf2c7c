"""Everything before the first step: data, run folder, model, leak check, selection, first measurement."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from bakeoff.apps.render import selection_table
from bakeoff.apps.train.checkpoint import Checkpoint
from bakeoff.apps.train.config import Config
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.data import Batches, ByteCorpus, Prefetcher, held_out_rows, mix, split
from bakeoff.apps.train.device import Placement, memory_errors
from bakeoff.apps.train.leak import check_leaks
from bakeoff.apps.train.metrics import MetricsLog
from bakeoff.apps.train.reporting import evaluate, peak_tokens_per_s, report_start, warn_of_other_candidates
from bakeoff.apps.train.rundir import open_run
from bakeoff.apps.train.saving import restore
from bakeoff.apps.train.selection import select_candidates
from bakeoff.apps.train.step import Stepper
from bakeoff.apps.train.timing import Timer
from bakeoff.models import build
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import LongNetLM
from bakeoff.models.titan_mac import TitanMAC

__all__ = ["Inputs", "open_inputs", "select", "set_up"]


@dataclass(frozen=True)
class Inputs:
    """What a run reads and where it writes."""

    batches: Batches
    held_out: Tensor
    run_dir: Path
    start: Checkpoint | None
    """The checkpoint to go on from."""


def open_inputs(config: Config, placement: Placement) -> Inputs:
    """Opens the data and the run's folder. Raises DataError, ConfigError and CheckpointError."""
    world = placement.world
    corpus = ByteCorpus.open(config.data.path)
    training, held_out = split(corpus, config.data.holdout, config.seq_len)
    batches = Batches(
        corpus,
        training,
        seq_len=config.seq_len,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        rank=world.rank,
        world_size=world.size,
    )
    rows = held_out_rows(corpus, held_out, config.seq_len, config.train.eval_rows).to(placement.device)
    run_dir, start = open_run(config, world)
    return Inputs(batches, rows, run_dir, start)


@contextlib.contextmanager
def set_up(
    config: Config, placement: Placement, inputs: Inputs, console: Console, clock: Callable[[], float]
) -> Iterator[Context]:
    """A run that is ready for its first step; closes what it opened."""
    device, world = placement.device, placement.world
    model = _model(config, inputs, device)
    with (
        memory_errors(*_too_large_a_step(config)),
        MetricsLog(inputs.run_dir, config, console, first=world.first) as metrics,
        Prefetcher(inputs.batches, device) as feed,
    ):
        stepper = Stepper(model, config, device, world, placement.mode)
        stepper.uncaptured = placement.no_graph
        context = Context(
            config, inputs.run_dir, stepper, feed, inputs.held_out, metrics, Timer(clock, device)
        )
        _prepare(context, inputs.start)
        yield context


def _model(
    config: Config, inputs: Inputs, device: torch.device
) -> LLMMed | ByteSpectralLM | TitanMAC | LongNetLM:
    """The model on its device, fresh or with the checkpoint's weights, once it is known not to leak."""
    torch.manual_seed(config.train.seed)
    with memory_errors("while the model was built", "make model.d_model or model.layers smaller"):
        model = build(config.model) if inputs.start is None else inputs.start.model()
        model.to(device).train()
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
    select(context, tune=config.select.tune)
    peak_tokens_per_s(context)  # measured here, so that no step waits for it
    if not stepper.uncaptured:
        stepper.capture()
    elif stepper.device.type == "cuda":
        context.metrics.say(f"steps are not captured: {stepper.uncaptured}")
    if start is not None and stepper.world.first:
        warn_of_other_candidates(context, start.folder)
    report_start(context)
    context.timer.begin()
    if start is None:
        context.progress.bits_before = evaluate(context)
        context.timer.begin()  # so that equal time is equal time for training
    context.timer.begin_loop()


def select(context: Context, *, tune: bool) -> None:
    """Decides what each op of the steps to come runs, after contests if `tune`."""
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
        )
    context.metrics.show(selection_table(context.selection))
