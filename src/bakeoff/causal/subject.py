"""The model under trial: its answers, what rounding does to them, and how it is shaken and trained."""

import contextlib
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.causal.answers import Answer, Called, answer, form_of
from bakeoff.causal.copies import Parameters, copied, generators, set_mode, twin
from bakeoff.causal.rounding import Rounding
from bakeoff.errors import BakeoffError
from bakeoff.modes import UntracedMode

__all__ = ["Call", "Computed", "Subject", "mode_name"]


@dataclass(frozen=True)
class Call:
    """The circumstances of a call: the mode, whether gradients are on (by default in training), the targets
    given, whether logits are asked for beside a loss, and the ids of the calls before it."""

    training: bool = False
    gradients: bool | None = None
    targets: Tensor | None = None
    logits: bool = True
    earlier: Sequence[Tensor] = ()


class Computed(UntracedMode):
    """Notes the floating types of all that is computed; single numbers aside."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
        self.dtypes |= {t.dtype for t in parts if t.numel() > 1 and (t.is_floating_point() or t.is_complex())}
        return out


class Subject:
    """A private copy of the model, the rows it is tried on, and the draws."""

    # Four float32 steps, whatever the outputs' type: a transform over time is rounded in it by the whole row.
    floor = 2.0**-21

    def __init__(self, model: nn.Module, rows: Tensor, draws: torch.Generator, seed: int) -> None:
        self.form = form_of(model)
        self.model = copied(model)
        self.rows, self.draws, self.seed = rows, draws, seed
        self.generators = generators(self.model, rows.device)
        self.trainable = [
            p
            for p in self.model.parameters()
            if p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        self.step = self._probed()

    def exact(self) -> "Subject":
        """The same in float64, to be run without autocast."""
        other = copy.copy(self)
        other.model = copied(self.model)._apply(_exact)
        other.step, other.floor = torch.finfo(torch.float64).eps, 2.0**-30
        return other

    # Passes

    def run(self, ids: Tensor, call: Call, replace: Parameters | None = None) -> Answer:
        """What a twin answers that takes its state from before any pass; logits in float64."""
        private = twin(self.model, replace)
        set_mode(private, call.training)
        self.same_draws()
        with torch.set_grad_enabled(call.training if call.gradients is None else call.gradients):
            for before in call.earlier:
                self._ask(private, before, None)
            self.same_draws()
            found = self._ask(private, ids, call.targets, logits=call.logits)
        logits, loss = (None if part is None else part.detach().double() for part in found)
        return Answer(logits, loss)

    def logits(self, ids: Tensor, call: Call, replace: Parameters | None = None) -> Tensor:
        """The logits [B, T, -1] of `run`."""
        found = self.run(ids, call, replace).logits
        if found is None:
            raise TypeError(
                f"the model gave a loss and no logits, expected (logits, loss): return both, or make "
                f"{self.form.targets} optional and return logits without"
            )
        return found

    def _ask(
        self, private: nn.Module, ids: Tensor, targets: Tensor | None, *, logits: bool = False
    ) -> Answer:
        out, scored = self._call(private, ids, targets, logits=logits)
        return answer(out, ids, scored=scored)

    def _call(
        self, private: nn.Module, ids: Tensor, targets: Tensor | None, *, logits: bool = False
    ) -> tuple[Any, bool]:
        """What the model returns, and whether it was given targets."""
        form, given = self.form, dict[str, Any]()
        if targets is None and form.needed:
            targets = torch.zeros_like(ids)
        if targets is not None and form.targets is not None:
            given[form.targets] = targets
            if form.return_logits and logits:
                given["return_logits"] = True
        return private(ids, **given), bool(given)

    def _probed(self) -> float:
        """The coarsest relative rounding among the outputs of the model's modules (of all that a function
        computes), in a first pass; models that say less without targets get them from here on."""
        seen = {torch.float64}

        def note(_module: nn.Module, _inputs: Any, out: Any) -> None:
            parts = out if isinstance(out, tuple | list) else (out,)
            seen.update(t.dtype for t in parts if isinstance(t, Tensor) and t.is_floating_point())

        private = twin(self.model)
        set_mode(private, training=False)
        for module in private.modules():
            with contextlib.suppress(RuntimeError):  # a scripted one takes no hook
                module.register_forward_hook(note)
        try:
            found, dtypes = self._tried(private)
        except (TypeError, ValueError):
            if self.form.targets is None or self.form.needed:
                raise
            self.form = self.form._replace(needed=True)
            found, dtypes = self._tried(private)
        note(private, None, found)
        seen |= dtypes if isinstance(self.model, Called) else set()
        steps = [torch.finfo(dtype).eps for dtype in seen]
        if torch.float32 in seen and self.rows.is_cuda and torch.get_float32_matmul_precision() != "highest":
            steps.append(2.0**-10)
        return max(steps)

    def _tried(self, private: nn.Module) -> tuple[Answer, set[torch.dtype]]:
        """The answer of a first pass, and the floating types computed in it."""
        self.same_draws()
        try:
            with torch.no_grad(), Computed() as computed:
                out, scored = self._call(private, self.rows, None)
        except BakeoffError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise BakeoffError(
                f"model(ids) fails for ids {tuple(self.rows.shape)} of tokens up to {int(self.rows.max())} "
                f"({said}): pass ids=, vocab= or length= that it takes"
            ) from error
        return answer(out, self.rows, scored=scored), computed.dtypes

    def same_draws(self) -> None:
        """The next pass draws what every pass draws."""
        torch.clear_autocast_cache()  # the caller's autocast would keep casts of parameters changed since
        for generator in self.generators:
            generator.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)  # noqa: NPY002 (models draw from the global state)

    def settle(self, ids: Tensor, call: Call) -> tuple[Tensor, Rounding]:
        """The outputs that edits are compared with, and the change that rounding explains."""
        base = self.logits(ids, call)
        if base.isnan().any():
            raise BakeoffError(
                f"the outputs are not finite in {mode_name(call.training)}, so that causality can't be "
                "judged: check the model on these rows, or pass perturb=False"
            )
        repeat, shaken = self.logits(ids, call), self.logits(ids, call, self.rounded())
        rounding = Rounding(base, repeat, shaken, self.step + self.floor)
        if rounding.unsteady:
            raise BakeoffError(
                f"two equal passes in {mode_name(call.training)} differ by {rounding.repeat:.3g}: draw "
                "random numbers from PyTorch's default generators, so that causality can be judged"
            )
        return base, rounding

    def rounded(self) -> dict[str, nn.Parameter]:
        """The parameters with relative noise of one rounding step."""
        moved = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p.is_floating_point() or p.is_complex():
                shaken = p.detach().clone()
                part = _real(shaken)
                noise = torch.rand(part.shape, generator=self.draws).to(p.device).mul_(2).sub_(1)
                part.copy_(part * (1 + self.step * noise.double()))
                moved[name] = nn.Parameter(shaken, p.requires_grad)
        return moved

    # Changes of the parameters

    @torch.no_grad()
    def perturb(self) -> None:
        """Adds noise to what trains: a quarter of its scale, and enough to open what starts at zero."""
        parts = [_real(p.detach()) for p in self.trainable]
        kept = [p.clone() for p in parts]
        for strength in (1.0, 0.25, 0.05):
            for p, old in zip(parts, kept, strict=True):
                finite = old[old.isfinite()]
                scale = finite.double().square().mean().sqrt().item() if finite.numel() else 0.0
                floor = 0.25 if p.ndim < 2 else 0.5 * (p.shape[0] / p.numel()) ** 0.5 if p.numel() else 0.0
                noise = torch.randn(p.shape, generator=self.draws).to(p.device, p.dtype)
                p.copy_(old + noise * (strength * max(0.25 * scale, floor)))
            if self.logits(self.rows, Call()).isfinite().any(dim=-1).all():
                return
        for p, old in zip(parts, kept, strict=True):
            p.copy_(old)

    def update(self) -> None:
        """One step of training, with a loss of the model's own where it has one."""
        ids, targets = self.rows, self.rows.roll(-1, 1)
        set_mode(self.model, training=True)
        self.same_draws()
        with torch.enable_grad():
            logits, loss = self._ask(self.model, ids, targets if self.form.targets else None)
            if loss is None:
                assert logits is not None
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten() % logits.shape[-1])
            if not loss.requires_grad:
                return
            gradients = torch.autograd.grad(loss, self.trainable, allow_unused=True)
        with torch.no_grad():
            for p, gradient in zip(self.trainable, gradients, strict=True):
                if gradient is not None:
                    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
                    _real(p.detach()).sub_(_real(dense).nan_to_num().sign(), alpha=0.01)


def _real(p: Tensor) -> Tensor:
    return torch.view_as_real(p) if p.is_complex() else p


def _exact(t: Tensor) -> Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def mode_name(training: bool) -> str:
    """The mode in words."""
    return "training mode" if training else "evaluation mode"
