"""A model on its device, with what steps it: as the trainer has it, without a run."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bakeoff.apps.train import Config
from bakeoff.apps.train.data import Batches, ByteCorpus, held_out_rows, split
from bakeoff.apps.train.step import Stepper
from bakeoff.models import build
from bakeoff.select import tune, using
from bakeoff.select.choose.policy import current

__all__ = ["Stage", "clear", "selecting", "settled"]

_BATCHES = 4


class Stage:
    """Fresh parameters, an optimizer and a few batches of `config`, which names its device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.train.seed)
        self.model = build(config.model).to(device).train()
        self.stepper = Stepper(self.model, config, device)
        self.corpus = ByteCorpus.open(config.data.path)
        training, self.held_out = split(self.corpus, config.data.holdout, config.seq_len)
        source = Batches(
            self.corpus,
            training,
            seq_len=config.seq_len,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
        )
        self.batches = [source.batch(number).to(device) for number in range(_BATCHES)]
        self.made = 0

    def step(self) -> None:
        """One optimizer step."""
        self.stepper(self.batches[self.made % _BATCHES], self.config.optim.lr)
        self.made += 1

    @torch.no_grad()
    def infer(self) -> Tensor:
        """The logits of a batch."""
        rows = self.batches[0][:, :-1]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.stepper.bf16):
            logits, _ = self.model(rows)
        assert logits is not None
        found: Tensor = logits
        return found

    def evaluate(self) -> float:
        """Held-out bits per byte."""
        rows = held_out_rows(self.corpus, self.held_out, self.config.seq_len, self.config.train.eval_rows)
        return self.stepper.bits_per_byte(rows.to(self.device))

    def contests(self, announce: Callable[[str], None]) -> dict[str, str]:
        """Rehearses a step and holds its contests, if the configuration wants that; what was left unsettled,
        and why."""
        rows = self.batches[0]
        if not self.config.select.tune or current().policy not in ("table", "tune"):
            self.stepper.rehearse(rows)
            return {}
        report = tune(lambda: self.stepper.rehearse(rows), self.config.select.budget_s, announce=announce)
        return report.unsettled


def settled(config: Config, device: torch.device, announce: Callable[[str], None]) -> dict[str, str]:
    """Holds the contests of one step of `config` before anything is timed, and compiles what a measurement
    runs; what was left unsettled, and why."""
    graph = device.type == "cuda" and config.train.capture != "off"
    clear(device, compiled=config.train.compile)
    stage = Stage(config, device)
    with selecting(config, "eager"):
        unsettled = stage.contests(announce)
    with selecting(config, "graph" if graph else "eager"):
        stage.evaluate()  # within a run this counts as time, and compiles at its first call
    return unsettled


@contextlib.contextmanager
def selecting(config: Config, regime: str) -> Iterator[None]:
    """Selection as `config` wants it, inside."""
    with using(config.select.policy or None, regime=regime, **config.select.ops):
        yield


def clear(device: torch.device, *, compiled: bool) -> None:
    """Frees device memory that nothing holds, begins a new count of its peak, and where steps are `compiled`
    forgets earlier ones, of which PyTorch keeps only a few."""
    gc.collect()
    if compiled:
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.init()  # counting memory doesn't do that by itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
