"""One optimizer step, issued without ever waiting for the device, and the loss on held-out bytes."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bakeoff import hardware
from bakeoff.apps.train.config import Config, Optim
from bakeoff.apps.train.fp8 import to_fp8
from bakeoff.apps.train.result import TrainError
from bakeoff.graphs import CapturedStep, NotCapturable, capture_step, capture_stream
from bakeoff.models.byte_spectral import ByteSpectralLM
from bakeoff.models.llm_med import LLMMed
from bakeoff.models.longnet import LongNetLM
from bakeoff.models.titan_mac import TitanMAC
from bakeoff.optim import AdamW, DeepNestedOptimizer, Muon, muon_groups, nested_groups
from bakeoff.parallel import ALONE, World, groups_of, let_go, replicas, sharded
from bakeoff.select.choose.policy import untuned

__all__ = ["Stepper", "adamw", "learning_rate", "muon", "optimizer", "set_rate", "uses_bf16"]

_DDP_WARMUP = 12
"""Steps before a capture: DistributedDataParallel times its first ten, which a graph can't hold."""
_RATE = "share_of_lr"
"""Key of a group whose rate is another than the schedule's: its multiple of that."""


def uses_bf16(config: Config, device: torch.device) -> bool:
    """Whether the run computes under bf16 autocast."""
    if config.train.precision == "auto":
        return hardware.native_bf16(str(device))
    return config.train.precision == "bf16"


def learning_rate(optim: Optim, progress: float) -> float:
    """lr at `progress` in [0, 1]: linear warm-up, then half a cosine down to min_lr * lr
    (Loshchilov & Hutter 2017)."""
    if progress < optim.warmup:
        return optim.lr * progress / optim.warmup
    rest = min(1.0, (progress - optim.warmup) / (1.0 - optim.warmup))
    return optim.lr * (optim.min_lr + (1.0 - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * rest)))


def adamw(model: nn.Module, optim: Optim, device: torch.device) -> AdamW:
    """AdamW, decaying matrices only; it clips and skips by itself. On CUDA the rate is a device tensor."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(optim.lr, device=device) if device.type == "cuda" else optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        max_grad_norm=optim.clip or math.inf,
        skip_nonfinite=True,
    )


def muon(model: nn.Module, optim: Optim, device: torch.device, *, share: bool) -> Muon:
    """Muon for matrices, AdamW for the rest, with rates in the proportion of `muon_lr` to `lr`; clips and
    skips as `adamw`."""
    groups = muon_groups(model, optim.weight_decay)
    for group in groups:
        rate = optim.muon_lr if group["muon"] and optim.muon_lr else optim.lr
        group["lr"] = torch.tensor(rate, device=device) if device.type == "cuda" else rate
        group[_RATE] = rate / optim.lr
    return Muon(
        groups,
        momentum=optim.momentum,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        max_grad_norm=optim.clip or math.inf,
        skip_nonfinite=True,
        process_group=dist.group.WORLD if share else None,
    )


def optimizer(model: nn.Module, optim: Optim, device: torch.device, mode: str = "none") -> AdamW:
    """The optimizer that the configuration names; `mode` says how ranks share the work."""
    if optim.name == "adamw":
        return adamw(model, optim, device)
    if optim.name == "muon":
        return muon(model, optim, device, share=optim.share and mode == "ddp")
    groups = nested_groups(model, optim.weight_decay, muon=optim.muon)
    return DeepNestedOptimizer(
        groups,
        torch.tensor(optim.lr, device=device) if device.type == "cuda" else optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        max_grad_norm=optim.clip or math.inf,
        skip_nonfinite=True,
    )


def set_rate(optimizer: AdamW, lr: float) -> None:
    """Every group's rate for the next step: `lr`, times the group's own share of it."""
    for group in optimizer.param_groups:
        rate = lr * group.get(_RATE, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Stepper:
    """Steps a model, and adds up on the device what the next log point reads.

    A step whose loss or gradient is not finite changes neither weights nor optimizer state, and is counted.
    With several ranks each takes its rows of the global batch; loss and gradients are means over all of it.
    Ranks in groups of `parallel.cp` take the same rows, and each a part of their bytes.
    """

    def __init__(
        self,
        model: LLMMed | ByteSpectralLM | TitanMAC | LongNetLM,
        config: Config,
        device: torch.device,
        world: World = ALONE,
        mode: str = "none",
    ) -> None:
        self.model, self.config, self.device, self.world = model, config, device, world
        if config.train.fp8:
            to_fp8(model, device)
        self.module = _spread(model, config, device, world, mode)
        """What a training pass calls: the model, or the model spread over ranks."""
        self.bf16 = uses_bf16(config, device)
        self.optimizer = optimizer(model, config.optim, device, mode)
        # Sums of loss and gradient norm since the last log point, steps skipped since then, in all, in a row.
        self.window = torch.zeros(5, dtype=torch.float64, device=device)
        self.captured: CapturedStep[[Tensor], None] | None = None
        self.uncaptured = ""
        """Why steps are not captured, once that is known."""

    @property
    def mode(self) -> str:
        """How ranks share the work: "none", "ddp" or "fsdp"."""
        if hasattr(self.module, "set_requires_gradient_sync"):  # an FSDPModule, without importing FSDP
            return "fsdp"
        return "ddp" if isinstance(self.module, DistributedDataParallel) else "none"

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer changes."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def part_rows(self) -> int:
        """Rows of one pass on this rank."""
        train = self.config.train
        return train.batch_size // train.accumulate // self.groups

    @property
    def groups(self) -> int:
        """How many groups of ranks have rows of their own."""
        return self.world.size // self.config.parallel.cp

    def __call__(self, rows: Tensor, lr: float) -> None:
        """A step on this rank's `rows` [B, T + 1] uint8 at rate `lr`."""
        set_rate(self.optimizer, lr)
        if self.captured is None:
            self._step(rows)
            return
        try:
            self.captured(rows)
        except NotCapturable as why:
            self.give_up(str(why))
            if why.ran:
                return
            if self.mode in ("ddp", "fsdp"):  # whose gradients were half on their way
                raise TrainError(
                    f"the step of several ranks can't be captured: {why}. Set train.capture=off"
                ) from why
            self.model.zero_grad(set_to_none=True)
            self._step(rows)

    def capture(self) -> None:
        """Replays the steps to come from one CUDA graph, after some that warm up; where that fails,
        `uncaptured` says why."""
        self.captured = capture_step(self._step, warmup=_DDP_WARMUP if self.mode == "ddp" else 3)

    def give_up(self, why: str) -> None:
        """Issues the steps to come one by one, and says `why`."""
        if self.captured is not None:
            self.captured.reset()
        self.captured, self.uncaptured = None, why

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Gives the graph up in the end, for which a process group that ends would wait; keeps it where an
        error ends the run, which may have left a collective in it without its peer."""
        try:
            yield
        except BaseException:
            if self.captured is not None and self.world.size > 1:
                self.captured.keep()
            raise
        if self.captured is not None:
            self.captured.reset()

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Replicas accumulate gradients on the stream that they were made on."""
        if self.mode == "none" or self.device.type != "cuda":
            yield
            return
        own, current = capture_stream(self.device), torch.cuda.current_stream(self.device)
        if own == current:
            yield
            return
        own.wait_stream(current)
        with torch.cuda.stream(own):
            yield
        current.wait_stream(own)

    @property
    def graph_bytes(self) -> int:
        """Device memory that the captured step holds."""
        return self.captured.bytes if self.captured is not None else 0

    def _step(self, rows: Tensor, *, rehearsal: bool = False) -> None:
        """Everything that happens on the device; nothing here depends on the step's number."""
        with self._own_stream():
            self._make_step(rows, rehearsal)

    def _make_step(self, rows: Tensor, rehearsal: bool) -> None:
        loss = torch.zeros((), device=self.device)
        parts = rows.split(self.part_rows)
        for number, part in enumerate(parts):
            with self._exchanging(number == len(parts) - 1):
                loss += self._backward(part)
        self.world.mean(loss)
        bad = ~loss.isfinite() if not rehearsal else torch.ones_like(loss, dtype=torch.bool)
        self.optimizer.found_inf = bad.float()
        if isinstance(self.optimizer, DeepNestedOptimizer):
            self.optimizer.loss = loss
        self.optimizer.step()
        assert self.optimizer.grad_norm is not None
        norm = self.optimizer.grad_norm
        bad = bad | ~norm.isfinite()
        self.optimizer.zero_grad(set_to_none=True)
        if not rehearsal:
            self._count(loss, norm, bad)

    @contextlib.contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        """Ranks exchange gradients once a step, after the last part."""
        if self.mode == "fsdp" and self.config.train.accumulate > 1:  # these walk through all modules
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
            # What is gathered at once stays whole for the next part.
            self.module.set_reshard_after_backward(last, recurse=False)  # type: ignore[operator]
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        else:
            yield

    def _backward(self, part: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            _, loss = self.module(part[:, :-1], part[:, 1:])
        loss = loss / self.config.train.accumulate
        loss.backward()
        detached: Tensor = loss.detach()
        return detached

    def _count(self, loss: Tensor, norm: Tensor, bad: Tensor) -> None:
        skipped = bad.double()
        self.window[:2] += torch.where(bad, 0.0, torch.stack([loss, norm]).double())
        self.window[2:4] += skipped
        self.window[4] = (self.window[4] + 1.0) * skipped

    def read(self, steps: int) -> dict[str, float]:
        """Means over the `steps` since the last read, and the skip counts. Waits for the device."""
        loss, norm, skipped, total, streak = self.window.tolist()
        self.window[:3] = 0.0
        counted = steps - skipped
        return {
            "loss": loss / counted if counted else math.nan,
            "grad_norm": norm / counted if counted else math.nan,
            "skipped": int(total),
            "skipped_in_a_row": int(streak),
        }

    @property
    def skipped_in_a_row(self) -> int:
        """Steps up to now without a finite gradient between them. Waits for the device."""
        return int(self.window[4].item())

    def rehearse(self, rows: Tensor) -> None:
        """A whole step on one part that leaves weights, gradients and counts as they were."""
        self._step(rows[: self.part_rows], rehearsal=True)

    @torch.no_grad()
    def bits_per_byte(self, rows: Tensor) -> float:
        """Mean cross entropy of `rows` [N, T + 1] uint8 in bits, without dropout. Waits for the device.

        Each group takes its share of the same `rows`; all make equally many passes, as shards need that.
        Weights that shards gathered for it are let go: a replayed step would not, and the next pass use them.
        """
        share, cp = math.ceil(len(rows) / self.groups), self.config.parallel.cp
        mine = rows[self.world.rank // cp * share :][:share]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with _uncompiled(self.config.train.compile), untuned():
            for start in range(0, share, self.part_rows):
                part = mine[start : start + self.part_rows]
                passed = part if len(part) else rows[:1]
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                    _, loss = self.model(passed[:, :-1], passed[:, 1:])
                if len(part):
                    total += loss.double() * len(part)
        if self.mode == "fsdp":
            let_go(self.module)
        self.model.train()
        return self.world.total(total).item() / cp / len(rows) / math.log(2.0)


def _spread(model: nn.Module, config: Config, device: torch.device, world: World, mode: str) -> nn.Module:
    """`model`, compiled if the configuration asks for it, and spread over ranks."""
    if config.parallel.cp > 1:
        assert isinstance(model, LongNetLM)
        model.share_rows(groups_of(config.parallel.cp, device, world.size))
    layers = [layer for part in model.children() if isinstance(part, nn.ModuleList) for layer in part]
    if config.train.compile:
        # Shards are gathered between layers, where compiled code would break anyway.
        for region in layers if mode == "fsdp" else [model]:
            region.compile(dynamic=False)
    if mode == "fsdp":
        return sharded(model, layers, device, world.size)
    return replicas(model, device) if mode == "ddp" else model


@contextlib.contextmanager
def _uncompiled(compiled: bool) -> Iterator[None]:
    """Runs a `compiled` model eagerly inside: its passes there have other shapes and no gradient, and are not
    worth compiling."""
    if not compiled:
        yield  # without loading the compiler
        return
    with torch.compiler.set_stance("force_eager"):
        yield
