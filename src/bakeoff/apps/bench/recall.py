"""Suite "recall": what a model still knows of pairs that are out of its attention's reach.

A row holds pairs of a key and a value, then noise, then the same keys in another order; at each of these the
value is to be told, which itself is not shown. Only these answers count in the loss. The noise is longer than
all layers' windows together, so that a model with nothing but attention can only guess (Arora et al. 2023,
Zoology, with the pairs moved out of the window). Rows are put into a CSV file: `right_near` is the share of
right answers behind the noise trained with, `right_far` behind three times as much.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bakeoff.apps.bench import tables
from bakeoff.apps.bench.memory_forms import FORMS, Learner, facts, side_by_side, written
from bakeoff.models.titan_mac import Config
from bakeoff.select import using

__all__ = ["Task", "accuracy", "draw", "right", "run_recall", "scheduled"]

Hear = Callable[[dict[str, str]], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """Pairs in a row, bytes of noise behind them, rows a step, steps. Keys are the bytes below `alphabet`,
    values the next as many, noise is above."""

    alphabet: int = 64
    pairs: int = 32
    noise: int = 128
    rows: int = 32
    steps: int = 500
    lr: float = 3e-3


def draw(task: Task, generator: torch.Generator, noise: int | None = None) -> tuple[Tensor, Tensor]:
    """(ids, targets) [rows, 3 pairs + noise] of fresh rows; targets are -100 but for the answers."""
    rows, pairs, n = task.rows, task.pairs, task.alphabet
    keys = torch.rand(rows, n, generator=generator).argsort(dim=1)[:, :pairs]
    values = n + torch.randint(n, (rows, pairs), generator=generator)
    again = torch.rand(rows, pairs, generator=generator).argsort(dim=1)
    size = rows, task.noise if noise is None else noise
    between = torch.randint(2 * n, 256, size, generator=generator)
    told = torch.stack([keys, values], dim=-1).flatten(1)
    ids = torch.cat([told, between, keys.gather(1, again)], dim=1)
    targets = torch.full_like(ids, -100)
    targets[:, -pairs:] = values.gather(1, again)
    return ids, targets


def accuracy(model: nn.Module, task: Task, noise: int, seed: int = 1) -> float:
    """Share of right answers on rows with so much noise. Waits for the device."""
    return right(model, *draw(task, torch.Generator().manual_seed(seed), noise))


@torch.no_grad()
def right(model: nn.Module, ids: Tensor, targets: Tensor) -> float:
    """Share of the targets that the likeliest symbol is; those of -100 don't count. Waits for the device."""
    device = next(model.parameters()).device
    ids, targets = ids.to(device), targets.to(device)
    logits, _ = model(ids)
    counted = targets >= 0
    return float(((logits.argmax(-1) == targets) & counted).sum() / counted.sum())


def scheduled(lr: float, step: int, steps: int) -> float:
    """The rate of a step: 50 steps of warm-up, then half a cosine down to 0."""
    return lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def run_recall(
    device: str,
    out: Path,
    *,
    forms: Sequence[str] = tuple(FORMS),
    seeds: Sequence[int] = (0,),
    steps: int | None = None,
    resume: bool = False,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> None:
    """Trains every form, all of a seed side by side, and puts a row for each into the file at `out`; with
    `resume` only those that it lacks. Without `steps` as many as the device's size of the task has."""
    base, task = _sized(device)
    task = task if steps is None else dataclasses.replace(task, steps=steps)
    place, key = torch.device(device), ("form", "seed", "gpu")
    common = facts(device)
    rows = tables.read(out) if resume and out.exists() else []
    held = {(row["form"], row["seed"]) for row in rows if row["steps"] == str(task.steps)}
    for seed in seeds:
        wanted = [form for form in forms if (form, str(seed)) not in held]
        with using(regime="graph" if place.type == "cuda" else "eager"):
            for learner in _trained(wanted, base, task, place, seed, announce):
                row = common | learner.described() | {"window": str(base.segment), "chunk": str(base.chunk)}
                row |= {name: str(value) for name, value in dataclasses.asdict(task).items()}
                many = dataclasses.replace(task, rows=8 * task.rows)
                with learner.apart(), learner.precision():
                    for name, noise in (("near", task.noise), ("far", 3 * task.noise)):
                        row[f"right_{name}"] = f"{accuracy(learner.model, many, noise):.4f}"
                ids, targets = draw(task, torch.Generator().manual_seed(seed))
                row |= {
                    "step_ms": f"{learner.milliseconds(ids, targets):.3f}",
                    "curve": written(learner.curve),
                }
                tables.put(out, row, key)
                hear(row)


def _trained(
    forms: Sequence[str],
    base: Config,
    task: Task,
    device: torch.device,
    seed: int,
    announce: Callable[[str], None],
) -> list[Learner]:
    learners = [Learner(form, base, device, seed) for form in forms]
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, targets = draw(task, generator)
        return (ids.pin_memory(), targets.pin_memory()) if device.type == "cuda" else (ids, targets)

    side_by_side(
        learners, batch, task.steps, lambda step: scheduled(task.lr, step, task.steps),
        lambda learner: accuracy(learner.model, task, task.noise),
        hear=lambda step: announce(f"seed {seed}: step {step} of {task.steps}"),
    )  # fmt: skip
    return learners


def _sized(device: str) -> tuple[Config, Task]:
    if device.startswith("cuda"):
        return Config(
            d_model=128, layers=2, heads=2, segment=64, persistent=4, chunk=16, max_seq_len=256
        ), Task()
    size = Config(d_model=32, layers=1, heads=1, segment=8, persistent=2, chunk=8, max_seq_len=24)
    return size, Task(alphabet=8, pairs=4, noise=12, rows=16, steps=150)
