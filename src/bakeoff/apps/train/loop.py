"""`train(config)`: from a configuration to a run."""

import contextlib
import time
from collections.abc import Callable

import torch
from rich.console import Console

from bakeoff.apps.outlet import lasting
from bakeoff.apps.train.config import Config, ConfigError
from bakeoff.apps.train.data import Batches, ByteCorpus, Prefetcher, held_out_rows, split
from bakeoff.apps.train.device import deterministic, memory_errors, pick_device, spread_mode
from bakeoff.apps.train.leak import check_leaks
from bakeoff.apps.train.metrics import MetricsLog
from bakeoff.apps.train.run import Result, Run, stopped_first
from bakeoff.apps.train.rundir import open_run
from bakeoff.apps.train.signals import Stopped, StopSignals
from bakeoff.apps.train.step import Stepper
from bakeoff.models import build
from bakeoff.parallel import World, joined
from bakeoff.select import using

__all__ = ["train"]


def train(
    config: Config,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Trains the configured model, or goes on with an interrupted run.

    Ctrl-C, SIGTERM or SIGHUP ends it after the step in hand, with a checkpoint; before the first step at
    once, with nothing to save; while it makes its last measurement, behind that. Everything is written below
    ``config.train.run_dir``: config.toml, metrics.jsonl, table.json (the verdicts used), checkpoints/.
    Under torchrun the ranks share the work as ``config.parallel`` says; the first writes and prints.

    Args:
        config: from `recipe` and `resolve`.
        console: where progress goes; standard output by default. If it can't be written any more, it is
            warned of and left alone, and the run goes on.
        clock: seconds; tests give a false one.

    Raises:
        ConfigError, DataError, CheckpointError, PolicyError, Unsupported: before the first step.
        CausalityError: before the first step, where an output sees its own future.
        TrainError: out of memory, a gradient that stays not finite, or a last checkpoint that can't be saved.
        RankError: another rank died or failed.

    Example:
        >>> from bakeoff.apps.train import recipe, resolve, train
        >>> quick = ["train.steps=20", "train.max_seconds=0", "select.tune=false"]
        >>> result = train(resolve(recipe("llm-med-tiny"), None, quick))  # doctest: +SKIP
    """
    device = pick_device(config.train.device)
    with (
        deterministic(config.train.deterministic),
        joined(device, config.parallel.dead_after_s) as world,
        contextlib.ExitStack() as settings,
    ):
        mode = spread_mode(config, world.size)
        reason = _why_no_graph(config, device, world)
        settings.enter_context(
            using(
                config.select.policy or None,
                regime="eager" if reason else "graph",
                **config.select.ops,
            )
        )
        out = settings.enter_context(lasting(console or Console()))
        return _train(config, device, world, mode, reason, settings, out, clock)


def _train(
    config: Config,
    device: torch.device,
    world: World,
    mode: str,
    no_graph: str,
    settings: contextlib.ExitStack,
    console: Console,
    clock: Callable[[], float],
) -> Result:
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
    evaluation = held_out_rows(corpus, held_out, config.seq_len, config.train.eval_rows).to(device)
    run_dir, start = open_run(config, world)
    # A rank that left at once would leave the others waiting; they hear of it before the first step.
    with StopSignals(at_once=world.size == 1) as signals:
        try:
            torch.manual_seed(config.train.seed)
            with memory_errors("while the model was built", "make model.d_model or model.layers smaller"):
                model = build(config.model) if start is None else start.model()
                model.to(device).train()
            if config.train.leak_check:
                check_leaks(model, evaluation, config, device)
            with (
                memory_errors(*_too_large_a_step(config)),
                MetricsLog(run_dir, config, console, first=world.first) as metrics,
                Prefetcher(batches, device) as feed,
            ):
                stepper = Stepper(model, config, device, world, mode)
                stepper.uncaptured = no_graph
                flops = model.flops_per_token(config.seq_len)
                run = Run(
                    config, run_dir, stepper, feed, evaluation, metrics, console, clock, settings, flops
                )
                run.prepare(start)
                return run.go(signals)
        except Stopped:
            if config.metrics.console:
                told = stopped_first(signals.caught, start.folder if start else None)
                console.print(told, highlight=False, markup=False, soft_wrap=True)
            return Result.unstarted(run_dir, start, signals.caught)


def _too_large_a_step(config: Config) -> tuple[str, str]:
    rows, parts = config.train.batch_size, config.train.accumulate
    where = f"with train.batch_size={rows}, {config.seq_len} bytes a row, train.accumulate={parts}"
    half = f"set train.accumulate={2 * parts} for the same steps in about half the memory"
    return where, f"{half}, or lower train.batch_size"


def _why_no_graph(config: Config, device: torch.device, world: World) -> str:
    """Why steps are not to be captured; "" where they are."""
    if config.train.capture == "off":
        return "train.capture is off"
    if device.type != "cuda":
        if config.train.capture == "on":
            raise ConfigError("train.capture='on' needs a CUDA device: use auto or off")
        return "only CUDA has graphs"
    return "" if world.size == 1 else "a step of several ranks is not captured"
