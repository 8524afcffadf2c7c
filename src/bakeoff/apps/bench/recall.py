"""Suite "recall": what a model still knows of pairs that are out of its attention's reach.

A row holds pairs of a key and a value, then noise that is longer than a segment, then the same keys in
another order, each to be followed by its value. Only these answers count in the loss. A model whose attention
ends before the pairs can only guess, unless something else carries them on (Arora et al. 2023, Zoology, with
the pairs moved out of the window).
"""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import bakeoff
from bakeoff.apps.bench import results
from bakeoff.apps.bench.results import File, open_file
from bakeoff.device import synchronize
from bakeoff.graphs import NotCapturable, capture_step
from bakeoff.models.titan_mac import Config, TitanMAC
from bakeoff.optim import AdamW
from bakeoff.select import using

__all__ = ["FORMS", "RecallRow", "Task", "accuracy", "draw", "run_recall", "trained"]

_KEYS, _VALUES = 64, 64
"""Keys are bytes 0 to 63, values 64 to 127, noise is above."""

FORMS: dict[str, dict[str, Any]] = {
    "mac": {},
    "mac without memory": {"memory": False},
    "mac gated by segments": {"gate": "segment"},
    "mag": {"variant": "mag"},
    "lmm": {"variant": "lmm"},
    "mac, last layer learns": {"learns": "last"},
    "mac, no momentum": {"momentum": False},
    "mac, constant gates": {"per_token": False},
    "mac, ascent": {"ascent": True},
}
"""Changes of the configuration, by name: the variants, and what the memory is said not to need."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Pairs in a row, bytes of noise behind them, rows a step."""

    pairs: int = 16
    noise: int = 192
    rows: int = 64

    @property
    def length(self) -> int:
        """Bytes of a row."""
        return 4 * self.pairs + self.noise


class RecallRow(msgspec.Struct, kw_only=True):
    """A model trained on the task. `accuracy` is the share of right answers by bytes of noise, where guessing
    gives 1/64; `curve` holds (step, accuracy) at the noise trained with."""

    model: str
    form: str
    seed: int
    params: int
    segment: int
    pairs: int
    noise: int
    rows: int
    steps: int
    lr: float
    seconds: float
    accuracy: dict[str, float]
    curve: list[tuple[int, float]]
    loss: float
    mode: str
    reason: str = ""
    """Why the steps were not captured."""
    source_hash: str = ""
    date: str = ""


Hear = Callable[[RecallRow], None]


def draw(task: Task, generator: torch.Generator, noise: int | None = None) -> tuple[Tensor, Tensor]:
    """(ids, targets) [rows, length - 1] of fresh rows; targets are -100 but for the answers."""
    rows, pairs, device = task.rows, task.pairs, generator.device
    order = torch.rand(rows, _KEYS, generator=generator, device=device).argsort(dim=1)
    keys = order[:, :pairs]
    values = _KEYS + torch.randint(_VALUES, (rows, pairs), generator=generator, device=device)
    again = torch.rand(rows, pairs, generator=generator, device=device).argsort(dim=1)
    between = torch.randint(
        _KEYS + _VALUES,
        256,
        (rows, task.noise if noise is None else noise),
        generator=generator,
        device=device,
    )
    asked = torch.stack([keys.gather(1, again), values.gather(1, again)], dim=-1).flatten(1)
    ids = torch.cat([torch.stack([keys, values], dim=-1).flatten(1), between, asked], dim=1)
    targets = torch.full_like(ids, -100)
    targets[:, -2 * pairs :: 2] = ids[:, -2 * pairs + 1 :: 2]
    return ids[:, :-1], targets[:, :-1]


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, noise: int, seed: int = 1) -> float:
    """Share of right answers on rows with so much noise. Waits for the device."""
    device = next(model.parameters()).device
    ids, targets = draw(task, torch.Generator(device).manual_seed(seed), noise)
    with _precision(device):
        logits, _ = model(ids)
    counted = targets >= 0
    right = (logits.argmax(-1) == targets) & counted
    return float(right.sum() / counted.sum())


def _precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def trained(
    config: Config,
    form: str,
    task: Task,
    device: torch.device,
    *,
    steps: int,
    lr: float = 3e-3,
    seed: int = 0,
    distances: tuple[int, ...] = (192, 448, 960),
    evaluations: int = 10,
) -> RecallRow:
    """Train a model on the task and ask it; on CUDA steps are captured, in bf16 under autocast."""
    torch.manual_seed(seed)
    model = TitanMAC(config).to(device).train()
    rate = torch.tensor(lr, device=device)
    optimizer = AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=1.0)
    generator = torch.Generator(device).manual_seed(seed)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        with _precision(device):
            _, loss = model(ids, targets)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        detached: Tensor = loss.detach()
        return detached

    captured: Callable[[Tensor, Tensor], Tensor] = step
    cuda, reason = device.type == "cuda", ""
    curve: list[tuple[int, float]] = []
    start, loss = time.perf_counter(), torch.zeros(())
    with using(regime="graph" if cuda else "eager"):
        if cuda:
            captured = capture_step(step)
        for number in range(steps):
            rate.fill_(lr * min(1.0, (number + 1) / 50) * 0.5 * (1 + math.cos(math.pi * number / steps)))
            ids, targets = draw(task, generator)
            try:
                loss = captured(ids, targets)
            except NotCapturable as why:
                captured, reason = step, str(why)
                if not why.ran:
                    model.zero_grad(set_to_none=True)
                    loss = step(ids, targets)
            if (number + 1) % max(1, steps // evaluations) == 0:
                curve.append((number + 1, accuracy(model, task, task.noise)))
        synchronize(device)
    seconds = time.perf_counter() - start
    return RecallRow(
        model=f"TitanMAC {config.variant}",
        form=form,
        seed=seed,
        params=sum(p.numel() for p in model.parameters()),
        segment=config.segment,
        pairs=task.pairs,
        noise=task.noise,
        rows=task.rows,
        steps=steps,
        lr=lr,
        seconds=seconds,
        accuracy={str(noise): accuracy(model, task, noise) for noise in distances},
        curve=curve,
        loss=float(loss),
        mode="captured" if cuda and not reason else "eager",
        reason=reason,
        source_hash=_source_hash(),
        date=results.now(),
    )


def run_recall(
    device: str,
    out: Path,
    *,
    seeds: int = 1,
    steps: int | None = None,
    forms: tuple[str, ...] = tuple(FORMS),
    resume: bool = False,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> File:
    """Train every form with every seed and write each to `out` at once; a form's row is replaced, or with
    `resume` kept where it has today's sources.

    Raises:
        ResultsError: `out` can't be read or written, or belongs to another machine or other versions.
    """
    base, task, usual = _sized(device)
    env = results.environment(device)
    file = open_file(out, env)
    for seed in range(seeds):
        for form in forms:
            held = [row for row in file.rows if (row.get("form"), row.get("seed")) == (form, seed)]
            if resume and any(row.get("source_hash") == _source_hash() for row in held):
                continue
            announce(f"{form}, seed {seed}")
            config = msgspec.structs.replace(base, **FORMS[form])
            row = trained(config, form, task, torch.device(device), steps=steps or usual, seed=seed)
            file = results.changed(out, env, functools.partial(_put, row=row))
            hear(row)
    return file


def _put(file: File, row: RecallRow) -> None:
    others = [r for r in file.rows if (r.get("form"), r.get("seed")) != (row.form, row.seed)]
    file.rows = [*others, msgspec.to_builtins(row)]


def _sized(device: str) -> tuple[Config, Task, int]:
    """(configuration, task, steps)."""
    if device.startswith("cuda"):
        size = Config(d_model=128, layers=2, heads=2, segment=64, persistent=4, chunk=32, max_seq_len=256)
        return size, Task(), 2000
    size = Config(d_model=32, layers=1, heads=2, segment=8, persistent=2, chunk=8, max_seq_len=24)
    return size, Task(pairs=2, noise=16, rows=8), 20


@functools.cache
def _source_hash() -> str:
    folder = Path(bakeoff.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
