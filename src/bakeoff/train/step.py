"""One optimizer step, issued without ever waiting for the device, and the loss on held-out bytes."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.train.config import Config, Optim

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


def adamw(model: nn.Module, optim: Optim, device: torch.device) -> torch.optim.AdamW:
    """AdamW in one fused kernel, decaying matrices only; on CUDA the rate is a device tensor."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(optim.lr, device=device) if device.type == "cuda" else optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )


class Stepper:
    """Steps a model and counts, on the device, what the next log point wants to know.

    A step whose gradient is not finite changes neither weights nor optimizer state, and is counted.
    """

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.model, self.device = model, device
        self.parts = config.train.accumulate
        self.part_rows = config.train.batch_size // self.parts
        self.clip = config.optim.clip or math.inf
        self.bf16 = uses_bf16(config, device)
        self.optimizer = adamw(model, config.optim, device)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # Sums of loss and gradient norm since the last log point, steps skipped since then, in all, in a row.
        self.window = torch.zeros(5, dtype=torch.float64, device=device)

    def __call__(self, rows: Tensor, lr: float) -> None:
        """A step on `rows` [B, T + 1] uint8 at rate `lr`."""
        loss = torch.zeros((), device=self.device)
        for part in rows.split(self.part_rows):
            loss += self._backward(part)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        bad = ~(norm + loss).isfinite()
        # The fused kernel leaves everything as it is where found_inf is 1.
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._count(loss, norm, bad)

    def _backward(self, part: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            _, loss = self.model(part[:, :-1], part[:, 1:])
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
        """Forward and backward of one part, leaving weights and gradients as they were."""
        self._backward(rows[: self.part_rows])
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def bits_per_byte(self, rows: Tensor) -> float:
        """Mean cross entropy of `rows` [N, T + 1] uint8 in bits, without dropout. Waits for the device."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in rows.split(self.part_rows):
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                _, loss = self.model(part[:, :-1], part[:, 1:])
            total += loss.double() * len(part)
        self.model.train()
        return total.item() / len(rows) / math.log(2.0)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, beside the model's weights."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"optimizer": self.optimizer.state_dict(), "random": random, "window": self.window.cpu()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a `state`, possibly from another device."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a tensor must be the one on this device; its value is set every step
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        self.window.copy_(state["window"])
