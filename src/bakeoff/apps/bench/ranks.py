"""Suite "ranks": training over several GPUs, by replicas (DDP) and by shards (FSDP2), beside one GPU.

Run it on one GPU, then `torchrun --nproc-per-node 2 -m bakeoff bench --suite ranks`, with the same --out.
Each model trains with as many rows as one GPU has, cut among the ranks, so that losses can be compared; and
with so many on every rank, which shows what is lost to communication.
"""

import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from bakeoff.apps.bench import results
from bakeoff.apps.bench.suites import chosen
from bakeoff.apps.bench.together import Together, together
from bakeoff.apps.train import Config, recipe, resolve, train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.apps.train.step import uses_bf16
from bakeoff.errors import BakeoffError
from bakeoff.models import build

__all__ = ["RanksRow", "run_ranks"]

_STEPS, _EVERY, _FIRST = 40, 5, 3  # steps, of a line of metrics, and lines that are not timed


class RanksRow(msgspec.Struct, kw_only=True):
    """A training run. `batch` counts the rows of all ranks, `step_us` is the median over lines of metrics but
    the first ones, `peak_bytes` rank 0's. `reduce_us` is the time that adding up as many gradients takes by
    itself. Losses are means over lines, in nats."""

    model: str
    mode: str
    ranks: int
    batch: int
    seq: int
    params: int
    precision: str
    step_us: float
    tokens_per_s: float
    peak_bytes: int | None
    reduce_us: float | None
    losses: list[float]
    largest_difference_from_one_gpu: float | None
    """Of a loss, relative, where one GPU has trained with as many rows."""
    date: str


Hear = Callable[[RanksRow], None]


def run_ranks(
    device: str,
    out: Path | None,
    *,
    text: str = "",
    budget_s: float = 30.0,
    hear: Hear = lambda row: None,
    announce: Callable[[str], None] = lambda stage: None,
) -> Path:
    """Train what has `text` in its model and mode; `hear` is told on rank 0. Returns where the results are.

    Raises:
        ResultsError: the file can't be read or written, or belongs to another machine or other versions.
    """
    with together(device, out, "train.json") as ranks:
        modes = ("ddp", "fsdp") if ranks.world.size > 1 else ("alone",)
        models = _models(ranks.device.type == "cuda")
        results.require_chosen(text, (f"{model} {mode}" for model, *_ in models for mode in modes))
        for model, base, batch, seq in models:
            for mode in modes:
                for rows in sorted({batch, batch * ranks.world.size}):
                    if not chosen(text, f"{model} {mode}"):
                        continue
                    announce(f"{model}, {mode}, {rows} rows")
                    given = [
                        f"train.batch_size={rows}", f"train.seq_len={seq}", f"select.budget_s={budget_s}"
                    ]  # fmt: skip
                    row = _trained(model, resolve(recipe(base), None, given), mode, ranks)
                    ranks.keep(msgspec.to_builtins(row), ("model", "mode", "ranks", "batch", "seq"))
                    if ranks.world.first:
                        hear(row)
        return ranks.out


def _models(cuda: bool) -> list[tuple[str, str, int, int]]:
    """(name, recipe, rows, bytes a row)."""
    if not cuda:
        return [("LLMMed tiny", "llm-med-tiny", 4, 32)]
    return [("LLMMed base", "llm-med-base", 32, 1024), ("TitanMAC seed", "titan-mac", 4, 512)]


def _trained(model: str, config: Config, mode: str, ranks: Together) -> RanksRow:
    parallel = msgspec.structs.replace(config.parallel, mode="none" if mode == "alone" else mode)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.world.decide(lambda: own))
        limits = msgspec.structs.replace(
            config.train, steps=_STEPS, log_every=_EVERY, checkpoint_every=0, eval_rows=4, leak_check=False,
            device=ranks.device.type, run_dir=str(folder / "run"),
        )  # fmt: skip
        quiet = msgspec.structs.replace(config.metrics, console=False, tensorboard=False)
        config = msgspec.structs.replace(config, train=limits, parallel=parallel, metrics=quiet)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(ranks.device)
        done = train(config)
        lines = ranks.world.decide(lambda: _lines(folder / "run"))
        ranks.world.gather(None)  # rank 0's folder goes when all have read it
    if done.signal:
        raise KeyboardInterrupt
    if done.skipped:
        raise BakeoffError(f"{model}, {mode}: {done.skipped} of {done.steps} steps had no finite gradient")
    losses = [float(line["loss"]) for line in lines]
    speed = statistics.median(float(line["tokens_per_s"]) for line in lines[_FIRST:])
    batch, seq = config.train.batch_size, config.seq_len
    with torch.device("meta"):
        params = sum(p.numel() for p in build(config.model).parameters())
    return RanksRow(
        model=model,
        mode=mode,
        ranks=ranks.world.size,
        batch=batch,
        seq=seq,
        params=params,
        precision="bf16" if uses_bf16(config, ranks.device) else "float32",
        step_us=1e6 * batch * seq / speed,
        tokens_per_s=speed,
        peak_bytes=lines[-1].get("peak_bytes"),
        reduce_us=_reduce_us(params, ranks),
        losses=losses,
        largest_difference_from_one_gpu=_apart(ranks, model, batch, losses) if mode != "alone" else None,
        date=results.now(),
    )


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "train"]


def _reduce_us(params: int, ranks: Together) -> float | None:
    """The time of one sum of as many float32 gradients over all ranks."""
    if ranks.world.size == 1:
        return None
    gradients = torch.zeros(params, device=ranks.device)
    return ranks.microseconds(lambda: dist.all_reduce(gradients))


def _apart(ranks: Together, model: str, batch: int, losses: list[float]) -> float | None:
    for row in ranks.held():
        if (row["model"], row["mode"], row["batch"]) == (model, "alone", batch):
            pairs = zip(losses, row["losses"], strict=True)
            found = max(abs(mine - other) / other for mine, other in pairs)
            return found if math.isfinite(found) else None
    return None
