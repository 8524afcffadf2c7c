"""Suite "text": held-out bits per byte of models with neural memories, without them, and with gated DeltaNet.

All take the same steps on the same bytes, at a rate that is constant after a warm-up, so that every point of
a curve is what training of that length gives. What equal *time* gives follows from the curve and the time of
a step, which is measured while nothing else runs.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from bakeoff.apps.bench import tables
from bakeoff.apps.bench.memory_forms import FORMS, Learner, facts, side_by_side, written
from bakeoff.apps.train.data import Batches, ByteCorpus, held_out_rows, split
from bakeoff.models.titan_mac import Config
from bakeoff.select import using

__all__ = ["Plan", "plan_for", "run_text"]

Hear = Callable[[dict[str, str]], None]
_PART = 64
"""Rows scored at once."""


class Plan(msgspec.Struct, frozen=True):
    """What is trained on what."""

    model: Config = Config(
        d_model=256, layers=2, heads=4, segment=128, persistent=4, chunk=32, max_seq_len=512
    )
    data: str = "stdlib"
    seq: int = 512
    rows: int = 16
    steps: int = 450
    lr: float = 1e-3
    held_out: int = 128
    """Rows scored."""


def plan_for(device: str, data: str) -> Plan:
    """On a GPU 16 rows of 512 bytes and 2 layers; on the CPU what a test takes."""
    if device.startswith("cuda"):
        return Plan(data=data)
    tiny = Config(d_model=32, layers=1, heads=2, segment=8, persistent=2, chunk=8, max_seq_len=32)
    return Plan(model=tiny, data=data, seq=32, rows=4, steps=20, held_out=8)


def run_text(
    device: str,
    out: Path,
    plan: Plan,
    *,
    forms: Sequence[str] = tuple(FORMS),
    seeds: Sequence[int] = (0, 1, 2),
    resume: bool = False,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> None:
    """Trains every form, all of a seed side by side, and puts a row for each into the file at `out`; with
    `resume` only those that it lacks."""
    place, common = torch.device(device), facts(device)
    corpus = ByteCorpus.open(plan.data)
    training, held = split(corpus, 0.1, plan.seq)
    rows = held_out_rows(corpus, held, plan.seq, plan.held_out).to(place)
    earlier = tables.read(out) if resume and out.exists() else []
    done = {(row["form"], row["seed"]) for row in earlier if row["steps"] == str(plan.steps)}
    for seed in seeds:
        batches = Batches(corpus, training, seq_len=plan.seq, batch_size=plan.rows, seed=seed)

        def batch(step: int, batches: Batches = batches) -> tuple[Tensor, Tensor]:
            found = batches.batch(step)
            pair = found[:, :-1].contiguous(), found[:, 1:].contiguous()
            return (pair[0].pin_memory(), pair[1].pin_memory()) if place.type == "cuda" else pair

        wanted = [form for form in forms if (form, str(seed)) not in done]
        with using(regime="graph" if place.type == "cuda" else "eager"):
            learners = [Learner(form, plan.model, place, seed) for form in wanted]
            side_by_side(
                learners, batch, plan.steps, lambda step: plan.lr * min(1.0, (step + 1) / 50),
                lambda learner: _bits(learner, rows),
                scores=6,
                hear=functools.partial(_announced, announce, f"seed {seed}: of {plan.steps} steps"),
            )  # fmt: skip
            for learner in learners:
                row = common | learner.described()
                row |= {"data": Path(corpus.name).name, "window": str(plan.model.segment)}
                row |= {"chunk": str(plan.model.chunk), "seq": str(plan.seq), "rows": str(plan.rows)}
                row |= {"steps": str(plan.steps), "lr": str(plan.lr), "scored": str(rows[:, 1:].numel())}
                row |= {"step_ms": f"{learner.milliseconds(*batch(0)):.3f}"}
                row |= {"bits_per_byte": f"{learner.curve[-1][1]:.4f}", "curve": written(learner.curve)}
                tables.put(out, row, ("form", "seed", "gpu"))
                hear(row)


def _announced(announce: Callable[[str], None], what: str, step: int) -> None:
    announce(f"{what} {step}")


def _bits(learner: Learner, rows: Tensor) -> float:
    """Mean cross entropy of rows [N, T + 1] in bits. Waits for the device."""
    total = torch.zeros((), device=rows.device)
    for piece in rows.split(_PART):
        _, loss = learner.model(piece[:, :-1], piece[:, 1:])
        assert loss is not None
        total += loss * len(piece)
    return float(total) / len(rows) / math.log(2)
