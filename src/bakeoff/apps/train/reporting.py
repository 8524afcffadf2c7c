"""What a run tells: the rows of its metrics, held-out measurements, and why it stopped.

Reading the sums of losses and gradient norms, and measuring, wait for the device; nothing else here does.
"""

import math
import resource
import shlex
import sys
import time
from pathlib import Path

import torch

from bakeoff import hardware
from bakeoff.apps.train.config import Config
from bakeoff.apps.train.context import Context
from bakeoff.apps.train.metrics import log, read_metrics
from bakeoff.apps.train.result import Result, TrainError
from bakeoff.apps.train.selection import choices

__all__ = [
    "evaluate",
    "finished_before",
    "report_end",
    "report_graph",
    "report_start",
    "report_steps",
    "say_stopped",
    "stopped_first",
    "warn_of_other_candidates",
]

_HOPELESS = 50  # steps in a row whose gradient is not finite, after which the run gives up


def report_start(context: Context) -> None:
    """The row that says what the run is."""
    stepper, corpus = context.stepper, context.feed.batches.corpus
    context.metrics.write(
        {
            "event": "start",
            "step": context.progress.step,
            "time": time.time(),
            "recipe": context.config.recipe,
            "device": hardware.facts(stepper.device.type).device,
            "torch": str(torch.__version__),
            "ranks": stepper.world.size,
            "parallel": stepper.mode,
            "parameters": sum(p.numel() for p in stepper.model.parameters()),
            "data": corpus.name,
            "data_bytes": len(corpus),
            **choices(context.selection),
        }
    )


def warn_of_other_candidates(context: Context, run_dir: Path) -> None:
    """Warns of ops that run by other candidates than in the run in `run_dir`, which this one goes on with."""
    file = run_dir / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    before: dict[str, object] = next((row for row in reversed(rows) if row.get("event") == "start"), {})
    changed = [
        f"{name}={choice}, was {before[name]}"
        for name, choice in choices(context.selection).items()
        if before.get(name, choice) != choice
    ]
    if changed:
        log.warning("other candidates run now, so losses may differ by rounding: %s", "; ".join(changed))


def report_graph(context: Context) -> None:
    """Whether steps are replayed from a CUDA graph, once that is known. Raises TrainError where they must be
    and can't."""
    reason = context.stepper.uncaptured
    context.metrics.write(
        {"event": "capture", "step": context.progress.step, "captured": not reason, "reason": reason},
        context.share_done,
    )
    if not reason:
        held = context.stepper.graph_bytes
        context.metrics.say(f"steps are replayed from one CUDA graph, which holds {held:,} bytes")
        return
    if context.config.train.capture == "on":
        raise TrainError(f"the step can't be captured: {reason}. Set train.capture=auto or remove the cause")
    context.metrics.say(f"steps are not captured: {reason}")


def report_steps(context: Context) -> None:
    """The metrics row of the steps since the last one. Raises TrainError where the gradient has not been
    finite for long."""
    config, progress = context.config, context.progress
    context.lock.check()
    sums = context.stepper.read(progress.step - progress.logged_step)
    spent, waited = context.timer.window()
    # After a resume the row is also about steps of an earlier process; only those made here were timed.
    timed = progress.step - max(progress.logged_step, progress.first_step)
    speed = tokens_per_s(context, timed, spent)
    progress.skipped = int(sums["skipped"])
    row = {
        "event": "train",
        "step": progress.step,
        "steps": progress.step - progress.logged_step,
        "loss": sums["loss"],
        "bits_per_byte": sums["loss"] / math.log(2.0),
        "grad_norm": sums["grad_norm"],
        "lr": progress.lr,
        "tokens_per_s": speed,
        # Only the first rank writes rows, so only it has measured the peak.
        "share_of_peak": speed / peak_tokens_per_s(context) if context.stepper.world.first else None,
        "peak_bytes": _peak_bytes(context.stepper.device),
        "graph_bytes": context.stepper.graph_bytes,
        "data_wait_s": waited,
        "skipped": progress.skipped,
        "seconds": context.timer.elapsed,
    }
    context.metrics.write(row, context.share_done)
    progress.logged_step = progress.step
    if sums["skipped_in_a_row"] >= _HOPELESS:
        raise TrainError(
            f"the gradient has not been finite for {sums['skipped_in_a_row']:.0f} steps, at step "
            f"{progress.step}: lower optim.lr={config.optim.lr:g} and {_way_back(context)}"
        )


def _way_back(context: Context) -> str:
    """What to resume from once a run has diverged: nothing was saved since steps are skipped."""
    newest = context.progress.checkpoint
    if newest is None:
        return "train anew; no checkpoint was saved before"
    return f"resume from an earlier checkpoint, such as train.resume={newest}"


def evaluate(context: Context) -> float:
    """Held-out bits per byte, also written as a row."""
    step = context.progress.step
    context.stepper.world.doing(f"measuring at step {step}")
    with context.timer.pause():
        bits = context.stepper.bits_per_byte(context.held_out)
        row = {
            "event": "eval",
            "step": step,
            "held_out_bits_per_byte": bits,
            "seconds": context.timer.elapsed,
        }
        context.metrics.write(row, context.share_done)
    return bits


def report_end(context: Context, speed: float, bits_after: float, stopped: str) -> None:
    """The row that sums up the run."""
    row = {
        "event": "end",
        "step": context.progress.step,
        "seconds": context.timer.elapsed,
        "tokens_per_s": speed,
        "held_out_bits_per_byte": bits_after,
        "stopped": stopped,
    }
    context.metrics.write(row, 1.0)


def say_stopped(context: Context, signal_name: str) -> None:
    """Why the run ends early, and how to go on."""
    progress = context.progress
    if progress.step == progress.first_step:
        context.metrics.say(stopped_first(signal_name, progress.checkpoint))
        return
    context.metrics.say(f"{signal_name}: stopped after step {progress.step}, saved {progress.saved}")
    context.metrics.say(f"go on with {shlex.quote(f'train.run_dir={context.run_dir}')}")


def stopped_first(signal_name: str, checkpoint: Path | None) -> str:
    """What to say of a run that a signal ended before it made a step; `checkpoint` is the one that it was to
    go on from."""
    rest = f"{checkpoint} is still the last checkpoint" if checkpoint else "nothing to save"
    return f"{signal_name}: stopped before the first step; {rest}"


def finished_before(config: Config, result: Result) -> str:
    """That there is nothing to do for a run, and what would give it something to do."""
    limit = f"{config.train.steps} steps" if result.stopped == "steps" else f"{config.train.max_seconds:g} s"
    key = "train.steps" if result.stopped == "steps" else "train.max_seconds"
    return (
        f"{result.run_dir} is finished: all its {limit} are over. To train on, raise {key}; to train anew, "
        "give another train.run_dir"
    )


def tokens_per_s(context: Context, steps: int, seconds: float) -> float:
    """The speed of `steps` steps made in `seconds`, over all ranks; 0 where there were none."""
    tokens = steps * context.config.train.batch_size * context.config.seq_len
    return tokens / seconds if seconds > 0 else 0.0


def peak_tokens_per_s(context: Context) -> float:
    """The speed at which matrix products as fast as the fastest measured here would take all the time. The
    first call in a process measures that, in about a second."""
    stepper = context.stepper
    flops_per_s = hardware.matmul_tflops(str(stepper.device)) * 1e12 * stepper.world.size
    return flops_per_s / stepper.model.flops_per_token(context.config.seq_len)


def _peak_bytes(device: torch.device) -> int:
    """The most memory that this rank has used."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
