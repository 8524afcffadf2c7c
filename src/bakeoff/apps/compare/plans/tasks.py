"""Runs on synthetic tasks: associative recall, and copying. Every step draws fresh rows."""

import math
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from bakeoff.apps.bench import copying, recall
from bakeoff.apps.bench.trainee import Trainee
from bakeoff.apps.compare.lengths import sized
from bakeoff.apps.compare.plans.plan import Planned
from bakeoff.apps.compare.quality import CURVE_POINTS, thinned
from bakeoff.apps.compare.stage import selecting
from bakeoff.apps.train import Config
from bakeoff.apps.train.data import mix
from bakeoff.apps.train.step import optimizer
from bakeoff.device import synchronize
from bakeoff.models import build

__all__ = ["Learnt", "learnt"]

_LOOKS = 20
_SEEN, _VALIDATED, _JUDGED, _LOOKED = range(4)
"""Kinds of rows: trained on; that choose the rate; that models are judged by; of curves."""
_MANY = 8
"""Times as many rows as in a step are judged by."""


class Learnt(msgspec.Struct, frozen=True):
    """Shares of wrong answers behind a run, which lasted `seconds`, and on its way."""

    validation: float
    score: float
    farther: float
    seconds: float
    reason: str
    curve: list[tuple[float, int, float | None]]


def draw(task: str, seed: int, *, farther: bool = False, rows: int = 32) -> tuple[Tensor, Tensor]:
    """(ids, targets) [rows, T] of fresh rows. Of recall, `farther` means three times as much noise between
    pairs and questions; of copying, twice as many symbols."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    if task == "recall":
        shape = recall.Task(rows=rows)
        return recall.draw(shape, generator, 3 * shape.noise if farther else None)
    symbols = copying.Copying(rows=rows)
    return copying.draw(symbols, generator, 2 * symbols.length if farther else None)


def learnt(run: Planned, device: torch.device, announce: Callable[[int], None]) -> Learnt:
    """Trains the model of `run` on its task for its steps, then asks it rows that it has not seen."""
    task, steps, rows = run.setting.task, run.config.train.steps, run.config.train.batch_size
    config = _reaching(run.config, draw(task, 0, farther=True, rows=1)[0].shape[1])
    graph = device.type == "cuda" and config.train.capture != "off"
    with selecting(config, "graph" if graph else "eager"):
        torch.manual_seed(run.seed)
        model = build(config.model).to(device).train()
        trainee = Trainee(model, optimizer(model, config.optim, device), device)
        curve: list[tuple[float, int, float | None]] = []
        synchronize(device)
        seconds, began = 0.0, time.monotonic()
        for step in range(steps):
            ids, targets = draw(task, mix(run.seed, step, _SEEN), rows=rows)
            if device.type == "cuda":
                ids, targets = ids.pin_memory(), targets.pin_memory()
            trainee(ids, targets, recall.scheduled(run.rate, step, steps))
            if (step + 1) % max(1, steps // _LOOKS) == 0 or step + 1 == steps:
                synchronize(device)
                seconds += time.monotonic() - began
                curve.append((seconds, step + 1, wrong(trainee, task, _LOOKED)))
                announce(step + 1)
                began = time.monotonic()
        return Learnt(
            validation=wrong(trainee, task, _VALIDATED),
            score=wrong(trainee, task, _JUDGED),
            farther=wrong(trainee, task, _JUDGED, farther=True),
            seconds=seconds,
            reason=trainee.reason,
            curve=thinned(curve, CURVE_POINTS),
        )


def wrong(trainee: Trainee, task: str, kind: int, *, farther: bool = False) -> float:
    """The share of wrong answers in rows of this kind; 1 where the model's numbers are not finite."""
    trainee.model.eval()
    parts = []
    with trainee.apart(), trainee.precision():
        for part in range(_MANY):
            ids, targets = draw(task, mix(0, part, kind), farther=farther)
            parts.append(1.0 - recall.right(trainee.model, ids, targets))
    trainee.model.train()
    mean = sum(parts) / len(parts)
    return mean if math.isfinite(mean) else 1.0


def _reaching(config: Config, length: int) -> Config:
    """`config` with a model that takes rows of `length`, its filters as long as before."""
    return msgspec.structs.replace(config, model=sized(config, length).model)
