"""Training both models on the same bytes, seed by seed."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from bakeoff.apps.compare.document import SIDES, Run, Side
from bakeoff.apps.compare.stage import clear
from bakeoff.apps.train import Config, Result, train
from bakeoff.apps.train.checkpoint import CheckpointError
from bakeoff.apps.train.metrics import read_metrics

__all__ = ["CURVE_POINTS", "compared", "order", "thinned", "trained"]

CURVE_POINTS = 200

Point = TypeVar("Point")


def order(seeds: int) -> list[tuple[Side, int]]:
    """Which model runs with which seed: in turns, so that a machine's drift hits both."""
    return [(side, seed) for seed in range(seeds) for side in SIDES]


def trained(
    config: Config,
    side: Side,
    seed: int,
    run_dir: Path,
    device: torch.device,
    *,
    resume: bool,
) -> Run:
    """One run in `run_dir`, begun anew, or with `resume` taken up where it was interrupted.

    Its clock starts behind compilation and selection; contests should have been held before, as runs with
    other seeds use the same verdicts.

    Raises KeyboardInterrupt where a signal came, after the run was saved; and what `train` raises.
    """
    settings = msgspec.structs.replace(
        config.train,
        seed=seed,
        run_dir=str(run_dir),
        resume="auto" if resume else "never",
        log_every=min(config.train.log_every, config.train.steps or config.train.log_every),
    )
    config = msgspec.structs.replace(
        config,
        train=settings,
        select=msgspec.structs.replace(config.select, tune=False),
        metrics=msgspec.structs.replace(config.metrics, console=False),
    )
    clear(device, compiled=config.train.compile)
    try:
        result = train(config)
    except CheckpointError as error:
        raise CheckpointError(
            f"the run in {run_dir} can't be taken up from its checkpoints: remove that folder, and --resume "
            "trains it anew"
        ) from error
    if result.signal:
        raise KeyboardInterrupt
    return compared(result, config, side, device)


def compared(result: Result, config: Config, side: Side, device: torch.device) -> Run:
    """What a comparison keeps of a run."""
    rows: Sequence[dict[str, Any]] = read_metrics(result.run_dir / "metrics.jsonl")
    windows = [row for row in rows if row.get("event") == "train"]
    timed = [row for row in windows if row["tokens_per_s"]]
    speed = result.tokens_per_s
    resumed = any(row.get("event") == "resume" for row in rows)
    if timed and (resumed or not speed):  # the result knows the last part only, or found the run finished
        steps = [row["steps"] for row in timed]
        speed = statistics.harmonic_mean([row["tokens_per_s"] for row in timed], weights=steps)
    tokens = result.steps * config.train.batch_size * config.seq_len
    peaks = [row["peak_bytes"] for row in windows]
    curve = [(row["seconds"], row["step"], row["bits_per_byte"]) for row in windows]
    return Run(
        side=side,
        seed=config.train.seed,
        steps=result.steps,
        seconds=tokens / speed if speed else 0.0,
        tokens_per_s=speed,
        bits_per_byte_before=_finite(result.bits_per_byte_before),
        bits_per_byte=_finite(result.bits_per_byte_after),
        peak_bytes=max(peaks) if peaks and device.type == "cuda" else None,
        stopped=result.stopped,
        curve=thinned(curve),
    )


def thinned(points: Sequence[Point], most: int = CURVE_POINTS) -> list[Point]:
    """At most `most` of `points`, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
