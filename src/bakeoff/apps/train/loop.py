"""`train(config)` and its loop: steps until the run is over or a signal comes.

Between log points nothing waits for the device: losses and gradient norms add up in device tensors. Host and
device meet only where those are read, where held-out data are measured, and where a checkpoint is saved.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable

from rich.console import Console

from bakeoff.apps.outlet import lasting
from bakeoff.apps.train.config import Config
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.device import placed
from bakeoff.apps.train.lock import RunLock
from bakeoff.apps.train.metrics import say
from bakeoff.apps.train.reporting import (
    evaluate,
    finished_before,
    report_end,
    report_graph,
    report_steps,
    say_stopped,
    stopped_first,
    tokens_per_s,
)
from bakeoff.apps.train.result import Result
from bakeoff.apps.train.rundir import claim
from bakeoff.apps.train.saving import holds_newest, save, save_best
from bakeoff.apps.train.selection import own_table_ends
from bakeoff.apps.train.setup import finished, open_inputs, select, set_up
from bakeoff.apps.train.signals import Stopped, StopSignals
from bakeoff.apps.train.step import learning_rate
from bakeoff.apps.train.watch import watching
from bakeoff.select import using

__all__ = ["train"]

_TIME_IS_UP = 128  # a reason to stop, beside the numbers of signals


def train(
    config: Config,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Trains the configured model, or goes on with an interrupted run.

    Ctrl-C, SIGTERM or SIGHUP ends it after the step in hand, with a checkpoint; before the first step at
    once, with nothing to save; during the last measurement, once that is made. Everything is written below
    ``config.train.run_dir``: config.toml, metrics.jsonl, table.json (the verdicts used), checkpoints/.
    Under torchrun the ranks share the work as ``config.parallel`` says; the first writes and prints. A run
    that is over is left as it is: its result is read from its metrics.

    Args:
        config: from `recipe` and `resolve`.
        console: where progress goes; standard output by default. If it can't be written any more, it is
            warned of and left alone, and the run goes on.
        clock: seconds; tests pass a fake.

    Raises:
        ConfigError, DataError, CheckpointError, PolicyError, Unsupported: before the first step.
        FolderInUse: another process trains in ``train.run_dir``.
        CausalityError: before the first step, where an output sees its own future.
        DataError: later, where a file shrinks or is changed under the run.
        FolderGone: the run's folder was deleted or moved.
        TrainError: out of memory, a gradient that stays not finite, or a last checkpoint that can't be saved.
        RankError: another rank died or failed.

    Example:
        >>> from bakeoff.apps.train import recipe, resolve, train
        >>> quick = ["train.steps=20", "train.max_seconds=0", "select.tune=false"]
        >>> result = train(resolve(recipe("llm-med-tiny"), None, quick))  # doctest: +SKIP
    """
    with contextlib.ExitStack() as stack:
        placement = stack.enter_context(placed(config))
        regime = "eager" if placement.no_graph else "graph"
        stack.enter_context(using(config.select.policy or None, regime=regime, **config.select.forced()))
        stack.enter_context(own_table_ends())
        out = stack.enter_context(lasting(console or Console()))
        lock = stack.enter_context(RunLock())
        inputs = open_inputs(config, placement, lock)
        if (result := placement.world.decide(lambda: finished(config, inputs))) is not None:
            if config.metrics.console and placement.world.first:
                say(out, finished_before(config, result))
            return result
        placement.world.decide(lambda: claim(config, inputs.run_dir, inputs.start))
        # A rank that left at once would leave the others waiting; they hear of it before the first step.
        signals = stack.enter_context(StopSignals(at_once=placement.world.size == 1))
        try:
            with set_up(config, placement, inputs, lock, out, clock) as context:
                return _run(context, signals)
        except Stopped:
            if config.metrics.console:
                say(out, stopped_first(signals.caught, inputs.start.folder if inputs.start else None))
            return Result.unstarted(inputs.run_dir, inputs.start, signals.caught)


def _run(context: Context, signals: StopSignals) -> Result:
    """From the first step to the result."""
    signals.at_once = False
    with contextlib.ExitStack() as changed_regime:
        with watching(context) as look:
            stopped = _steps(context, signals, changed_regime, look)
        return _finish(context, signals, stopped)


def _steps(
    context: Context,
    signals: StopSignals,
    changed_regime: contextlib.ExitStack,
    look: Callable[[], None],
) -> str:
    """Makes all steps of this call, with a `look` after each; returns what ended them."""
    train, progress, world = context.config.train, context.progress, context.stepper.world
    graph_pending = not context.stepper.uncaptured  # whether steps are captured is not known yet
    reason, progress.seconds = world.post(_reason(context, signals), context.timer.elapsed).read()
    stopped = _ended_by(context, reason)
    while not stopped:
        posted = world.post(_reason(context, signals), context.timer.elapsed)
        _step(context)
        if graph_pending:
            graph_pending = not _graph_known(context, changed_regime)
        look()
        if progress.step % train.log_every == 0:
            report_steps(context)
        world.doing(f"waiting at step {progress.step}")
        if world.size == 1:  # one rank alone hears itself at once; several hear what was said before the step
            posted = world.post(_reason(context, signals), context.timer.elapsed)
        reason, progress.seconds = posted.read()
        stopped = _ended_by(context, reason)
        if train.eval_every and progress.step % train.eval_every == 0 and not stopped:
            save_best(context, evaluate(context))
        if train.checkpoint_every and progress.step % train.checkpoint_every == 0 and not stopped:
            save(context)
    return stopped


def _step(context: Context) -> None:
    progress = context.progress
    context.stepper.world.doing(f"at step {progress.step + 1}")
    with context.timer.waiting():
        rows = context.feed.get(progress.step)
    progress.lr = learning_rate(context.config.optim, context.share_done)
    context.stepper(rows, progress.lr)
    progress.step += 1


def _graph_known(context: Context, changed_regime: contextlib.ExitStack) -> bool:
    """Reports whether steps are replayed from a graph, if that is known by now; where they are not, on every
    rank, selects anew, as the host's time counts from here on."""
    stepper = context.stepper
    warming = stepper.captured is not None and not stepper.captured.captured
    told = stepper.world.gather(None if warming else stepper.uncaptured)
    refused = [(rank, why) for rank, why in enumerate(told) if why]
    if refused and not stepper.uncaptured:
        rank, why = refused[0]
        stepper.give_up(f"rank {rank}: {why}")
    if not refused and None in told:
        return False
    report_graph(context)
    if stepper.uncaptured:
        changed_regime.enter_context(using(regime="eager"))
        with context.timer.pause():
            select(context, tune=False)
    return True


def _reason(context: Context, signals: StopSignals) -> int:
    """Why this rank would stop: a signal's number, that the time is up, or 0."""
    if signals.caught:
        return int(signal.Signals[signals.caught])
    limit, first = context.config.train.max_seconds, context.stepper.world.first
    return _TIME_IS_UP if limit and first and context.timer.elapsed >= limit else 0


def _ended_by(context: Context, reason: int) -> str:
    """What ends the run now: "steps", "time" or a signal's name; "" where nothing does."""
    steps = context.config.train.steps
    if steps and context.progress.step >= steps:
        return "steps"
    if reason == _TIME_IS_UP:
        return "time"
    return signal.Signals(reason).name if reason else ""


def _finish(context: Context, signals: StopSignals, stopped: str) -> Result:
    """Saves, reports what is not reported yet, and measures."""
    progress = context.progress
    early = stopped not in ("steps", "time")
    steps_made = progress.step - progress.first_step
    busy_s = context.timer.busy()
    if steps_made or not (early or holds_newest(context)):  # also of a finished run in a folder of its own
        save(context, last=True)
    if steps_made and progress.step > progress.logged_step:
        report_steps(context)  # after the checkpoint, so that a run that goes on writes the whole row
    if early:
        say_stopped(context, stopped)
    bits_after = math.nan if early and not steps_made else evaluate(context)
    if steps_made:
        save_best(context, bits_after)
    if signals.caught and not early:
        context.metrics.say(
            f"{signals.caught}: the run was over at step {progress.step}, saved {progress.saved}"
        )
    speed = tokens_per_s(context, steps_made, busy_s)
    report_end(context, speed, bits_after, stopped)
    return Result(
        run_dir=context.run_dir,
        checkpoint=progress.checkpoint if progress.saved else None,
        steps=progress.step,
        seconds=context.timer.elapsed,
        bits_per_byte_before=progress.bits_before,
        bits_per_byte_after=bits_after,
        tokens_per_s=speed,
        skipped=progress.skipped,
        stopped=stopped,
        selection=tuple(context.selection),
        signal=stopped if early else signals.caught,
    )
