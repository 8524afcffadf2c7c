"""One optimizer step, issued without ever waiting for the device, and the loss on held-out bytes."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bakeoff.apps.train.config import Config, Optim
from bakeoff.apps.train.data import mix
from bakeoff.graphs import CapturedStep, NotCapturable, capture_step
from bakeoff.optim import AdamW
from bakeoff.parallel import ALONE, World, full, replicas, sharded, total_norm
from bakeoff.select.choose.policy import untuned

__all__ = ["Stepper", "adamw", "learning_rate", "uses_bf16"]


def uses_bf16(config: Config, device: torch.device) -> bool:
    """Whether the run computes under bf16 autocast."""
    if config.train.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return config.train.precision == "bf16"


def learning_rate(optim: Optim, progress: float) -> float:
    """lr at `progress` in [0, 1]: linear warm-up, then half a cosine down to min_lr * lr
    (Loshchilov & Hutter 2017)."""
    if progress < optim.warmup:
        return optim.lr * progress / optim.warmup
    rest = min(1.0, (progress - optim.warmup) / (1.0 - optim.warmup))
    return optim.lr * (optim.min_lr + (1.0 - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * rest)))


def adamw(model: nn.Module, optim: Optim, device: torch.device, *, shards: bool = False) -> AdamW:
    """AdamW, decaying matrices only; it clips and skips by itself unless it sees `shards` only. On CUDA the
    rate is a device tensor."""
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
        max_grad_norm=None if shards else optim.clip or math.inf,
        skip_nonfinite=not shards,
    )


class Stepper:
    """Steps a model and counts, on the device, what the next log point wants to know.

    A step whose loss or gradient is not finite changes neither weights nor optimizer state, and is counted.
    With several ranks each takes its rows of the global batch; loss and gradients are means over all of it.
    """

    def __init__(
        self, model: nn.Module, config: Config, device: torch.device, world: World = ALONE, mode: str = "none"
    ) -> None:
        self.model, self.device, self.world, self.mode = model, device, world, mode
        self.parts = config.train.accumulate
        self.part_rows = config.train.batch_size // self.parts // world.size
        self.clip = config.optim.clip or math.inf
        self.bf16 = uses_bf16(config, device)
        self.compiled = config.train.compile
        self.module = self._spread()
        """What a training pass calls: the model, or the model spread over ranks."""
        self.optimizer = adamw(model, config.optim, device, shards=mode == "fsdp")
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # Sums of loss and gradient norm since the last log point, steps skipped since then, in all, in a row.
        self.window = torch.zeros(5, dtype=torch.float64, device=device)
        self.captured: CapturedStep[[Tensor], None] | None = None
        self.uncaptured = ""
        """Why steps are not captured, once that was found out."""

    def _spread(self) -> nn.Module:
        blocks = [part for part in self.model.children() if isinstance(part, nn.ModuleList)]
        layers = [layer for part in blocks for layer in part]
        if self.compiled:
            # Shards are gathered between blocks, where compiled code would break anyway.
            for region in layers if self.mode == "fsdp" else [self.model]:
                region.compile(dynamic=False)
        if self.mode == "fsdp":
            return sharded(self.model, layers, self.device, self.world.size)
        return replicas(self.model, self.device) if self.mode == "ddp" else self.model

    def __call__(self, rows: Tensor, lr: float) -> None:
        """A step on this rank's `rows` [B, T + 1] uint8 at rate `lr`."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self.captured is None:
            self._step(rows)
            return
        try:
            self.captured(rows)
        except NotCapturable as why:
            self.captured, self.uncaptured = None, str(why)
            if not why.ran:
                self.model.zero_grad(set_to_none=True)
                self._step(rows)

    def capture(self) -> None:
        """Lets the steps to come be one CUDA graph, from the fourth on; `uncaptured` says why not."""
        self.captured = capture_step(self._step)

    @property
    def graph_bytes(self) -> int:
        """Device memory that the captured step holds."""
        return self.captured.bytes if self.captured is not None else 0

    def _step(self, rows: Tensor, *, rehearsal: bool = False) -> None:
        """Everything that happens on the device; nothing here depends on the step's number."""
        loss = torch.zeros((), device=self.device)
        parts = rows.split(self.part_rows)
        for number, part in enumerate(parts):
            with self._exchanging(number == len(parts) - 1):
                loss += self._backward(part)
        self.world.mean(loss)
        bad = ~loss.isfinite() if not rehearsal else torch.ones_like(loss, dtype=torch.bool)
        if self.mode == "fsdp":
            norm = total_norm([p.grad for p in self.parameters if p.grad is not None])
            bad = bad | ~norm.isfinite()
            self.optimizer.grad_scale = (norm / self.clip).clamp(min=1.0)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        if self.mode != "fsdp":
            assert self.optimizer.grad_norm is not None
            norm = self.optimizer.grad_norm
            bad = bad | ~norm.isfinite()
        self.optimizer.zero_grad(set_to_none=True)
        if not rehearsal:
            self._count(loss, norm, bad)

    @contextlib.contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        """Ranks exchange gradients once a step, behind the last part."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        else:
            yield

    def _backward(self, part: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            _, loss = self.module(part[:, :-1], part[:, 1:])
        loss = loss / self.parts
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

    def rehearse(self, rows: Tensor) -> None:
        """A whole step on one part that leaves weights, gradients and counts as they were."""
        self._step(rows[: self.part_rows], rehearsal=True)

    @torch.no_grad()
    def bits_per_byte(self, rows: Tensor) -> float:
        """Mean cross entropy of `rows` [N, T + 1] uint8 in bits, without dropout. Waits for the device.

        Each rank takes its share of the same `rows`; all make equally many passes, as shards need that.
        """
        share = math.ceil(len(rows) / self.world.size)
        mine = rows[self.world.rank * share :][:share]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with self._uncompiled(), untuned():
            for start in range(0, share, self.part_rows):
                part = mine[start : start + self.part_rows]
                known = part if len(part) else rows[:1]
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                    _, loss = self.model(known[:, :-1], known[:, 1:])
                if len(part):
                    total += loss.double() * len(part)
        self.model.train()
        return self.world.total(total).item() / len(rows) / math.log(2.0)

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Passes of other shapes or without gradient are not worth compiling for."""
        if not self.compiled:
            yield  # without loading the compiler
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    def weights(self) -> dict[str, Tensor]:
        """The whole model on the CPU, by name, on the first rank; empty on the others. All must ask."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            whole = full(tensor.detach())
            if self.world.first:
                found[name] = whole.cpu().contiguous()
        return found

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state by name, in shards where the model is; made where it does not exist yet."""
        fresh = [p for p in self.parameters if not self.optimizer.state[p]]
        if fresh:
            for p in fresh:
                p.grad = torch.zeros_like(p)
            self.optimizer.found_inf = torch.ones((), device=self.device)  # changes nothing
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        found = {}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state[p].items():
                found[f"{name}/{key}"] = value.view(1) if value.ndim == 0 else value
        return found

    def state(self) -> dict[str, Tensor]:
        """This rank's own small state: sums since the last log point, and random generators."""
        found = {"window": self.window.cpu(), f"random.{self.world.rank}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"random.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state` gave, gathered from all ranks, possibly of another world or device."""
        self.window.copy_(state["window"])
        own = state.get(f"random.{self.world.rank}.cpu")
        if own is not None:
            torch.set_rng_state(own)
        cuda = state.get(f"random.{self.world.rank}.cuda")
        if self.device.type == "cuda" and cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def seed(self, seed: int) -> None:
        """Random numbers that differ from rank to rank, for dropout; the first rank's are as if alone."""
        if not self.world.first:
            torch.manual_seed(mix(seed, self.world.rank))
