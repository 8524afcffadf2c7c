"""Saving a run and restoring it: what of the stepper and the run goes into a checkpoint, and comes back."""

import hashlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bakeoff.apps.train import checkpoint
from bakeoff.apps.train.checkpoint import Checkpoint, CheckpointError, State
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.metrics import log
from bakeoff.apps.train.result import TrainError
from bakeoff.apps.train.step import Stepper
from bakeoff.optim import DeepNestedOptimizer
from bakeoff.parallel import full

__all__ = ["holds_newest", "optimizer_state", "restore", "save", "save_best"]


def save(context: Context, *, last: bool = False) -> None:
    """Writes a checkpoint, after which older ones are removed. A failure is a warning while training can go
    on, and a TrainError at the end. All ranks must call it.

    While steps are skipped nothing is saved: the training has diverged or is about to, and what was saved
    before is the way back. The last checkpoint of such a run is put aside.
    """
    progress, stepper = context.progress, context.stepper
    stepper.world.doing(f"saving step {progress.step}")
    with context.timer.pause():
        skipped = stepper.skipped_in_a_row
        if skipped and not last:
            log.warning("step %d is not saved: no finite gradient for %d steps", progress.step, skipped)
            return
        aside = skipped > 0 and holds_newest(context)
        try:
            progress.saved = _write(context, "spare" if aside else "newest")
            if aside:
                text = "no finite gradient for %d steps: step %d is put aside, and %s stays the newest"
                log.warning(text, skipped, progress.step, progress.checkpoint)
            else:
                progress.checkpoint = progress.saved
        except OSError as error:
            context.lock.check()
            newest = progress.checkpoint
            held = f"the last one saved is {newest}" if newest else "none has been saved yet"
            text = (
                f"can't save step {progress.step} below {context.run_dir} ({error.strerror or error}); {held}"
            )
            if last:
                raise TrainError(f"{text}. Free space or set train.run_dir elsewhere, and resume") from error
            log.warning("%s; training goes on", text)


def holds_newest(context: Context) -> bool:
    """Whether the newest checkpoint lies in the run's own folder, not in that of a run it goes on from."""
    newest = context.progress.checkpoint
    return newest is not None and context.run_dir.resolve() in newest.resolve().parents


def save_best(context: Context, bits: float) -> None:
    """Keeps this step as the best where `train.keep_best` asks for it and no measurement was below `bits`.
    All ranks must call it."""
    progress, before = context.progress, context.progress.bits_best
    if not context.config.train.keep_best or not (before is None or bits < before):
        return
    progress.bits_best = bits
    with context.timer.pause():
        try:
            _write(context, "best")
        except OSError as error:
            context.lock.check()
            progress.bits_best = before
            reason = error.strerror or error
            log.warning("can't keep step %d as the best (%s); training goes on", progress.step, reason)


def _best_before(context: Context) -> float | None:
    """What the run's checkpoint that is kept as the best measured; None where there is none, or where that
    was measured on other rows, so that nothing can be compared with it. All ranks must ask."""
    saved = context.stepper.world.decide(lambda: checkpoint.best(context.run_dir))
    return saved.best if saved is not None and saved.measured in ("", _measured(context)) else None


def _measured(context: Context) -> str:
    """A digest of the held-out rows."""
    return hashlib.sha256(context.held_out.cpu().numpy().tobytes()).hexdigest()


def _write(context: Context, place: Literal["newest", "spare", "best"]) -> Path:
    """Writes the run's state as a checkpoint. Raises OSError, on every rank."""
    config, progress, stepper, feed = context.config, context.progress, context.stepper, context.feed
    numbers = {
        "step": progress.step,
        "logged_step": progress.logged_step,
        "elapsed": context.timer.elapsed,
        "before": progress.bits_before,
        "best": progress.bits_best,
        "measured": _measured(context),
        "data_digest": feed.digest,
        "data_modified": feed.batches.corpus.modified,
    }
    state = State(numbers, _weights(stepper), _rank_state(stepper), optimizer_state(stepper))
    return checkpoint.save(
        context.run_dir, config, state, keep=config.train.keep, place=place, world=stepper.world
    )


def restore(context: Context, start: Checkpoint) -> None:
    """Goes on with the run that saved `start`; the model has its weights. Raises CheckpointError."""
    progress, stepper = context.progress, context.stepper
    saved = start.progress()
    try:
        _restore_rank_state(stepper, start.tensors)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{start.folder / 'run.safetensors'} is of another version: {error}. Give another checkpoint"
        ) from error
    start.read_moments(optimizer_state(stepper), stepper.world)
    progress.step = progress.first_step = start.step
    progress.checkpoint = start.folder
    progress.logged_step = saved.logged_step
    progress.bits_before = saved.before
    progress.bits_best = _best_before(context)
    context.timer.before = progress.seconds = saved.elapsed
    context.metrics.write({"event": "resume", "step": progress.step})
    context.metrics.say(f"resumed from {start.folder} at step {progress.step}")


def _weights(stepper: Stepper) -> dict[str, Tensor]:
    """The whole model on the CPU, by name, on the first rank; empty on the others. All must ask."""
    weights = {}
    for name, tensor in stepper.model.state_dict().items():
        whole = full(tensor.detach())
        if stepper.world.first:
            weights[name] = whole.cpu().contiguous()
    return weights


def optimizer_state(stepper: Stepper) -> dict[str, Tensor]:
    """The optimizer's state by name, sharded as the model is; created where there is none yet."""
    optimizer = stepper.optimizer
    fresh = [p for p in stepper.parameters if not optimizer.state[p]]
    if fresh:
        for p in fresh:
            p.grad = torch.zeros_like(p)
        optimizer.found_inf = torch.ones((), device=stepper.device)  # so that the step changes nothing
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = {
        f"{name}/{key}": value
        for name, p in stepper.model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    if isinstance(optimizer, DeepNestedOptimizer):
        found |= {f"optimizer/{name}": value for name, value in optimizer.buffers().items()}
    return {name: value.view(1) if value.ndim == 0 else value for name, value in found.items()}


def _rank_state(stepper: Stepper) -> dict[str, Tensor]:
    """This rank's own small state: sums since the last log point, and random generators."""
    rank, device = stepper.world.rank, stepper.device
    state = {"window": stepper.window.cpu(), f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rank_state(stepper: Stepper, state: dict[str, Tensor]) -> None:
    """Restores from the `_rank_state` of all ranks, possibly of another world or device."""
    rank, device = stepper.world.rank, stepper.device
    stepper.window.copy_(state["window"])
    cpu, cuda = state.get(f"random.{rank}.cpu"), state.get(f"random.{rank}.cuda")
    if cpu is not None:
        torch.set_rng_state(cpu)
    if device.type == "cuda" and cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
