"""A model on its device with what it takes to step it, as the trainer does, but without a run's files."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bakeoff.apps.train import Config
from bakeoff.apps.train.data import Batches, held_out_rows, open_parts
from bakeoff.apps.train.step import Stepper
from bakeoff.models import build
from bakeoff.select import tune, using
from bakeoff.select.choose.policy import current

__all__ = ["Stage", "clear", "hold_contests", "selecting"]

_BATCHES = 4


class Stage:
    """Fresh parameters, an optimizer and a few batches of `config`, which names its device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.train.seed)
        self.model = build(config.model).to(device).train()
        self.stepper = Stepper(self.model, config, device)
        self.corpus, training, self.held_out = open_parts(config.data, config.seq_len)
        source = Batches(
            self.corpus,
            training,
            seq_len=config.seq_len,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
        )
        self.batches = [source.batch(number).to(device) for number in range(_BATCHES)]
        self.steps = 0

    def step(self) -> None:
        """One optimizer step."""
        self.stepper(self.batches[self.steps % _BATCHES], self.config.optim.lr)
        self.steps += 1

    @torch.no_grad()
    def infer(self) -> Tensor:
        """The logits of a batch."""
        rows = self.batches[0][:, :-1]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.stepper.bf16):
            logits, _ = self.model(rows)
        assert logits is not None
        tensor: Tensor = logits
        return tensor

    def evaluate(self) -> float:
        """Held-out bits per byte."""
        rows = held_out_rows(self.corpus, self.held_out, self.config.seq_len, self.config.train.eval_rows)
        return self.stepper.bits_per_byte(rows.to(self.device))

    def contests(self, announce: Callable[[str], None]) -> dict[str, str]:
        """Rehearses a step and holds its contests, if the configuration says so; returns the calls without a
        contest, and why."""
        rows = self.batches[0]
        if not self.config.select.tune or current().policy not in ("table", "tune"):
            self.stepper.rehearse(rows)
            return {}
        report = tune(lambda: self.stepper.rehearse(rows), self.config.select.budget_s, announce=announce)
        return report.unsettled


def hold_contests(config: Config, device: torch.device, announce: Callable[[str], None]) -> dict[str, str]:
    """Holds the contests of one step of `config` before anything is timed, and compiles what an evaluation
    runs; returns the calls for which no contest was held, and why."""
    graph = device.type == "cuda" and config.train.capture != "off"
    clear(device, compiled=config.train.compile)
    stage = Stage(config, device)
    with selecting(config, "eager"):
        unsettled = stage.contests(announce)
    with selecting(config, "graph" if graph else "eager"):
        stage.evaluate()  # compiles at its first call, which within a run would count as training time
    return unsettled


@contextlib.contextmanager
def selecting(config: Config, regime: str) -> Iterator[None]:
    """Inside, ops are selected as `config` says."""
    with using(config.select.policy or None, regime=regime, **config.select.forced()):
        yield


def clear(device: torch.device, *, compiled: bool) -> None:
    """Frees unused device memory and starts a new count of its peak; where steps are `compiled`, also makes
    PyTorch forget earlier compiled ones, of which it keeps only a few."""
    if compiled:
        torch.compiler.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.init()  # resetting the count fails before CUDA has started
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
