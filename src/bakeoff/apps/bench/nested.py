"""Suite "nested": what learned multipliers of the learning rate are worth.

AdamW at several rates says which is best, and what a rate ten times lower and one five times higher cost;
then the same three rates again with `DeepNestedOptimizer`. Every run of a seed starts from the same weights
and takes the same steps on the same bytes.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, open_file
from bakeoff.apps.bench.step import source_hash
from bakeoff.apps.train import Config, recipe, resolve
from bakeoff.apps.train.data import Batches, ByteCorpus, held_out_rows, split
from bakeoff.apps.train.step import Stepper, learning_rate
from bakeoff.device import synchronize
from bakeoff.models import build
from bakeoff.optim import DeepNestedOptimizer
from bakeoff.select import using
from bakeoff.timing import seconds_per_call

__all__ = ["HIGH", "LOW", "NestedRow", "Plan", "plan_for", "run_nested", "summarised"]

LOW, HIGH = 0.1, 5.0
"""The badly chosen rates, as multiples of the best one."""
_PARTS = 10
_TIMED = 20


class NestedRow(msgspec.Struct, kw_only=True):
    """A run. `bits_per_byte` is of held-out bytes after the last step, `loss` the mean of the last tenth in
    nats, `step_us` the median over blocks of steps at the end. `multipliers` holds each group's at the end of
    every tenth of the run; without a controller it is empty."""

    model: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    batch: int
    seq: int
    bits_per_byte: float
    loss: float
    losses: list[float]
    """Mean loss of every tenth of the run."""
    multipliers: dict[str, list[float]]
    step_us: float
    skipped: int
    captured: bool
    source_hash: str = ""
    date: str = ""


Hear = Callable[[NestedRow], None]


class Plan(msgspec.Struct, frozen=True):
    """What is run: the configuration, the rates that AdamW is tried at, and the seeds."""

    config: Config
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


def plan_for(device: str) -> Plan:
    """On a GPU llm-med with 16 rows of 512 bytes, in a minute; on the CPU a model of 2 layers, in several."""
    if device.startswith("cuda"):
        given = ["train.batch_size=16", "train.seq_len=512", "train.steps=400", "optim.warmup=0.05"]
        return Plan(resolve(recipe("llm-med-published"), None, given), (5e-4, 1e-3, 2e-3), (0, 1))
    given = [
        "model.qk_norm=false", "model.d_model=64", "model.layers=2", "model.heads=4", "train.seq_len=64",
        "train.batch_size=16", "train.steps=400", "train.max_seconds=0", "train.eval_rows=256",
        "optim.warmup=0.05",
    ]  # fmt: skip
    return Plan(resolve(recipe("llm-med-tiny"), None, given), (2.5e-3, 5e-3, 1e-2), (0, 1))


def run_nested(
    device: str,
    out: Path,
    plan: Plan,
    *,
    resume: bool = False,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Make every run of `plan` and write each to `out` at once, the summary with the last.

    With `resume` a run that `out` holds from today's sources is not made again.

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    env = results.environment(device)
    file = open_file(out, env)
    place = torch.device(device)

    def made(optimizer: str, lr: float, seed: int) -> NestedRow:
        nonlocal file
        for held in file.rows:
            row = msgspec.convert(held, NestedRow)
            if resume and row.source_hash == source_hash() and _same(row, plan.config, optimizer, lr, seed):
                return row
        announce(f"{optimizer} at {lr:g}, seed {seed}")
        row = measured(plan.config, place, optimizer, lr, seed)
        file = results.changed(out, env, functools.partial(_put, row=row))
        hear(row)
        return row

    fixed = [made("adamw", lr, seed) for lr in plan.rates for seed in plan.seeds]
    best = _best(fixed)
    wrong = [made("adamw", scale * best, seed) for scale in (LOW, HIGH) for seed in plan.seeds]
    learned = [made("deep-nested", scale * best, seed) for scale in (1.0, LOW, HIGH) for seed in plan.seeds]
    summary = summarised([*fixed, *wrong, *learned], best)

    def conclude(file: File) -> None:
        file.summary = summary

    return results.changed(out, env, conclude)


def measured(config: Config, device: torch.device, optimizer: str, lr: float, seed: int) -> NestedRow:
    """One run: training, held-out bytes, and the time of a step."""
    replace = msgspec.structs.replace
    config = replace(config, optim=replace(config.optim, name=optimizer, lr=lr))
    corpus = ByteCorpus.open(config.data.path)
    training, held = split(corpus, config.data.holdout, config.seq_len)
    batches = Batches(corpus, training, seq_len=config.seq_len, batch_size=config.train.batch_size, seed=seed)
    rows = held_out_rows(corpus, held, config.seq_len, config.train.eval_rows).to(device)
    steps = config.train.steps
    with using("heuristic", regime="graph" if device.type == "cuda" else "eager"):
        torch.manual_seed(seed)
        stepper = Stepper(build(config.model).to(device).train(), config, device)
        if device.type == "cuda":
            stepper.capture()
        losses, skipped, multipliers = [], 0, []
        for start, end in _parts(steps):
            for number in range(start, end):
                stepper(_placed(batches.batch(number), device), learning_rate(config.optim, number / steps))
            window = stepper.read(end - start)
            losses.append(window["loss"])
            skipped = int(window["skipped"])
            multipliers.append(_multipliers(stepper))
        bits = stepper.bits_per_byte(rows)
        last = _placed(batches.batch(steps), device)
        times = [seconds_per_call([lambda: stepper(last, 0.0)], _TIMED, device) for _ in range(5)]
        synchronize(device)
    return NestedRow(
        model=config.recipe, optimizer=optimizer, lr=lr, seed=seed, steps=steps,
        batch=config.train.batch_size, seq=config.seq_len, bits_per_byte=bits, loss=losses[-1],
        losses=losses, multipliers={name: [part[name] for part in multipliers] for name in multipliers[0]},
        step_us=1e6 * statistics.median(times), skipped=skipped, captured=stepper.captured is not None,
        source_hash=source_hash(), date=results.now(),
    )  # fmt: skip


def summarised(rows: Sequence[NestedRow], best: float) -> dict[str, Any]:
    """Of the runs of one plan, whose best fixed rate is `best`: the share of the gap to it that is recovered
    at badly chosen rates (1: all of it), and what the multipliers cost at the best rate, as shares."""

    def mean(optimizer: str, scale: float) -> float:
        found = [row.bits_per_byte for row in rows if row.optimizer == optimizer and row.lr == scale * best]
        return statistics.mean(found)

    def time(optimizer: str) -> float:
        return statistics.median(row.step_us for row in rows if row.optimizer == optimizer)

    tuned = mean("adamw", 1.0)
    seeds = [row.bits_per_byte for row in rows if row.optimizer == "adamw" and row.lr == best]
    return {
        "best_lr": best,
        "bits_per_byte": {
            f"{optimizer} x{scale:g}": mean(optimizer, scale)
            for optimizer in ("adamw", "deep-nested")
            for scale in (LOW, 1.0, HIGH)
        },
        "recovered": {
            f"x{scale:g}": (mean("adamw", scale) - mean("deep-nested", scale))
            / (mean("adamw", scale) - tuned)
            for scale in (LOW, HIGH)
        },
        "cost_at_best_lr": mean("deep-nested", 1.0) / tuned - 1.0,
        "seed_spread": max(seeds) / min(seeds) - 1.0,
        "step_time": time("deep-nested") / time("adamw") - 1.0,
    }


def _best(rows: Sequence[NestedRow]) -> float:
    """The rate whose held-out bits are fewest in the mean over seeds."""
    rates = {row.lr for row in rows}
    return min(rates, key=lambda lr: statistics.mean(row.bits_per_byte for row in rows if row.lr == lr))


def _multipliers(stepper: Stepper) -> dict[str, float]:
    optimizer = stepper.optimizer
    if not isinstance(optimizer, DeepNestedOptimizer) or optimizer.controller is None:
        return {}
    names = [group["name"] for group in optimizer.param_groups]
    return dict(zip(names, optimizer.controller.multipliers.tolist(), strict=True))


def _parts(steps: int) -> Iterator[tuple[int, int]]:
    parts = min(_PARTS, steps)
    for part in range(parts):
        yield part * steps // parts, (part + 1) * steps // parts


def _placed(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def _same(row: NestedRow, config: Config, optimizer: str, lr: float, seed: int) -> bool:
    train = config.train
    wanted = (config.recipe, optimizer, lr, seed, train.steps, train.batch_size, config.seq_len)
    return (row.model, row.optimizer, row.lr, row.seed, row.steps, row.batch, row.seq) == wanted


def _put(file: File, row: NestedRow) -> None:
    key = ("model", "optimizer", "lr", "seed")
    own = msgspec.to_builtins(row)
    others = [other for other in file.rows if [other.get(k) for k in key] != [own[k] for k in key]]
    file.rows = [*others, own]
