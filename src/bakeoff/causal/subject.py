"""The model under trial: its answers, what rounding does to them, and how it is shaken and trained."""

import copy
import inspect
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.causal.copies import Parameters, copied, generators, twin
from bakeoff.errors import BakeoffError

__all__ = ["Subject", "change", "mode_name"]


class Subject:
    """A private copy of the model, the rows it is tried on, and the draws."""

    def __init__(self, model: nn.Module, rows: Tensor, draws: torch.Generator, seed: int) -> None:
        self.model = copied(model)
        self.rows, self.draws, self.seed = rows, draws, seed
        self.trainable = [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        self.accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self.step = _rounding_step(self.model, rows)

    def exact(self) -> "Subject":
        """The same in float64, to be run without autocast."""
        other = copy.copy(self)
        other.model = copied(self.model).double()
        return other

    # Passes

    def run(
        self,
        ids: Tensor,
        *,
        training: bool,
        targets: Tensor | None = None,
        replace: Parameters | None = None,
    ) -> Tensor | None:
        """Logits [B, T, -1] in float64, by a twin that takes its state from before any pass.

        None only with `targets`, where the model keeps its logits to itself.
        """
        private = twin(self.model, replace)
        if not training:
            private.eval()
        elif not private.training:
            private.train()
        self.same_draws()
        with torch.set_grad_enabled(training):
            if targets is None:
                return _logits(private(ids), ids)
            extra = {"return_logits": True} if "return_logits" in self.accepts else {}
            out = private(ids, targets=targets, **extra)
            return _logits(out, ids) if isinstance(out, tuple | list) and out[0] is not None else None

    def logits(
        self,
        ids: Tensor,
        *,
        training: bool,
        targets: Tensor | None = None,
        replace: Parameters | None = None,
    ) -> Tensor:
        """What `run` gives where it gives something."""
        found = self.run(ids, training=training, targets=targets, replace=replace)
        assert found is not None
        return found

    def same_draws(self) -> None:
        """The next pass draws what every pass draws."""
        torch.clear_autocast_cache()  # the caller's autocast would keep casts of parameters changed since
        for generator in generators(self.model):
            generator.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)  # noqa: NPY002 (models draw from the global state)

    def settle(self, ids: Tensor, *, training: bool) -> tuple[Tensor, float]:
        """The outputs that edits are compared with, and the change that rounding explains."""
        base = self.logits(ids, training=training)
        if base.isnan().any():
            raise BakeoffError(
                f"the outputs are not finite in {mode_name(training)}, so that causality can't be judged: "
                "check the model on these rows, or pass perturb=False"
            )
        top = base[base.isfinite()].abs().max().item()
        repeat = change(base, self.logits(ids, training=training)).max().item()
        if repeat > 0.05 * top:
            raise BakeoffError(
                f"two equal passes in {mode_name(training)} differ by {repeat:.3g}, outputs reach "
                f"{top:.3g}: draw random numbers from PyTorch's default generators, so that causality can be "
                "judged"
            )
        shaken = self.logits(ids, training=training, replace=self._rounded())
        rounding = torch.quantile(change(base, shaken).flatten(), 0.9).item()
        # Four float32 steps on top: a transform over time is rounded in float32 by the whole row.
        return base, 3 * rounding + 4 * repeat + (self.step + 2.0**-21) * top

    def _rounded(self) -> dict[str, nn.Parameter]:
        """The parameters with relative noise of one rounding step."""
        moved = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p.is_floating_point():
                noise = torch.rand(p.shape, generator=self.draws).to(p.device).mul_(2).sub_(1)
                shaken = (p.detach() * (1 + self.step * noise)).to(p.dtype)
                moved[name] = nn.Parameter(shaken, p.requires_grad)
        return moved

    # Changes of the parameters

    @torch.no_grad()
    def perturb(self) -> None:
        """Adds noise to what trains: a quarter of its scale, and enough to open what starts at zero."""
        kept = [p.clone() for p in self.trainable]
        for strength in (1.0, 0.25, 0.05):
            for p, old in zip(self.trainable, kept, strict=True):
                finite = old[old.isfinite()]
                scale = finite.double().square().mean().sqrt().item() if finite.numel() else 0.0
                floor = 0.25 if p.ndim < 2 else 0.5 * (p.shape[0] / p.numel()) ** 0.5 if p.numel() else 0.0
                noise = torch.randn(p.shape, generator=self.draws).to(p.device, p.dtype)
                p.copy_(old + noise * (strength * max(0.25 * scale, floor)))
            if self.logits(self.rows, training=False).isfinite().any(dim=-1).all():
                return
        for p, old in zip(self.trainable, kept, strict=True):
            p.copy_(old)

    def update(self) -> None:
        """One step of training, with a loss of the model's own where it has one."""
        ids, targets = self.rows[:, :-1], self.rows[:, 1:]
        self.same_draws()
        if not self.model.training:  # else its parts keep modes of their own, such as a frozen BatchNorm's
            self.model.train()
        with torch.enable_grad():
            if "targets" in self.accepts:
                loss = self.model(ids, targets=targets)[1]
            else:
                found = _first(self.model(ids))
                loss = F.cross_entropy(found.flatten(0, -2).float(), targets.flatten() % found.shape[-1])
            gradients = torch.autograd.grad(loss, self.trainable, allow_unused=True)
        with torch.no_grad():
            for p, gradient in zip(self.trainable, gradients, strict=True):
                if gradient is not None:
                    p.sub_(gradient.nan_to_num().sign(), alpha=0.01)


def change(one: Tensor, other: Tensor) -> Tensor:
    """Largest |one - other| [B, T] of every position's outputs; a NaN in one of them counts as infinite."""
    apart = torch.where(one == other, 0.0, (one - other).abs())
    return apart.amax(dim=-1).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _first(out: Any) -> Tensor:
    found = out[0] if isinstance(out, tuple | list) and out else getattr(out, "logits", out)
    if not isinstance(found, Tensor):
        raise TypeError(f"model(ids) gave {type(found).__name__}, expected logits, (logits, ...) or .logits")
    return found


def _logits(out: Any, ids: Tensor) -> Tensor:
    found = _first(out)
    if found.shape[:2] != ids.shape:
        raise ValueError(
            f"logits have shape {tuple(found.shape)}, expected {(*ids.shape, 'vocab')}: a model that "
            "says nothing at every position can't be causal"
        )
    return found.detach().reshape(*ids.shape, -1).double()


def _rounding_step(model: nn.Module, rows: Tensor) -> float:
    """The coarsest relative rounding among the outputs of the model's modules."""
    seen = {torch.float64}

    def note(_module: nn.Module, _inputs: Any, out: Any) -> None:
        parts = out if isinstance(out, tuple | list) else (out,)
        seen.update(t.dtype for t in parts if isinstance(t, Tensor) and t.is_floating_point())

    private = twin(model).eval()
    for module in private.modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        private(rows)
    steps = [torch.finfo(dtype).eps for dtype in seen]
    if torch.float32 in seen and rows.is_cuda and torch.get_float32_matmul_precision() != "highest":
        steps.append(2.0**-10)
    return max(steps)


def mode_name(training: bool) -> str:
    """The mode in words."""
    return "training mode" if training else "evaluation mode"
