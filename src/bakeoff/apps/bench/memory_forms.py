"""Models with a neural memory, without it, with parts of it left out, and with gated DeltaNet."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.apps.bench import results
from bakeoff.apps.bench.gated_delta import GatedDelta, with_gated_delta
from bakeoff.apps.bench.trainee import Trainee
from bakeoff.models.titan_mac import Config, TitanMAC
from bakeoff.nn import NeuralMemory
from bakeoff.optim import AdamW
from bakeoff.select.choose.explain import explain_case
from bakeoff.select.choose.tune import recording

__all__ = ["ABLATIONS", "FORMS", "Learner", "facts", "side_by_side", "written"]

FORMS: dict[str, dict[str, Any]] = {
    "mac": {},
    "mac, no memory": {"memory": False},
    "mac, gate by segments": {"gate": "segment"},
    "mag": {"variant": "mag"},
    "mag, no memory": {"variant": "mag", "memory": False},
    "mag, gated delta": {"variant": "mag", "delta": True},
    "lmm": {"variant": "lmm"},
    "gated delta": {"variant": "lmm", "delta": True},
}
"""Changes of the configuration, by name; "delta" puts gated DeltaNet in the memories' place."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "ascent": {"ascent": True},
    "no momentum": {"momentum": False},
    "constant rates": {"per_token": False},
    "last layer": {"learns": "last"},
}
"""What a memory is said not to need."""

FORMS |= {f"lmm, {name}": {"variant": "lmm", **changes} for name, changes in ABLATIONS.items()}


def built(base: Config, form: str, device: torch.device, seed: int) -> TitanMAC:
    """`base` changed as `form` says, with fresh parameters."""
    changes = dict(FORMS[form])
    delta = changes.pop("delta", False)
    torch.manual_seed(seed)
    model = TitanMAC(msgspec.structs.replace(base, **changes)).to(device).train()
    return with_gated_delta(model) if delta else model


def state_numbers(model: TitanMAC) -> int:
    """Numbers that a layer holds of a row, however long: memories and momentum, or gated DeltaNet's."""
    for module in next(iter(model.blocks)).modules():
        if isinstance(module, GatedDelta):
            return module.heads * module.keys * module.values
        if isinstance(module, NeuralMemory):
            first = [module.w1, module.b1] if module.learns == "all" else []
            numbers = sum(w.numel() for w in (*first, module.w2, module.b2))
            return numbers * (2 if module.momentum else 1)
    return 0


class Learner(Trainee):
    """A form of the model in training."""

    def __init__(self, form: str, base: Config, device: torch.device, seed: int) -> None:
        model = built(base, form, device, seed)
        optimizer = AdamW(
            model.parameters(), lr=torch.zeros((), device=device), betas=(0.9, 0.95), weight_decay=0.01,
            max_grad_norm=1.0, skip_nonfinite=True,
        )  # fmt: skip
        super().__init__(model, optimizer, device)
        self.form, self.seed = form, seed
        self.state = state_numbers(model)
        self.candidates = ""
        """The candidates of memory_scan that steps run."""

    def _issue(self, ids: Tensor, targets: Tensor) -> None:
        if self.candidates:
            super()._issue(ids, targets)
            return
        with recording() as seen:
            super()._issue(ids, targets)
        scans = {explain_case(op, case).choice for op, case in seen.values() if op.name == "memory_scan"}
        self.candidates = "+".join(sorted(scans)) or "-"

    def described(self) -> dict[str, str]:
        """Columns of a results file."""
        return {
            "form": self.form,
            "seed": str(self.seed),
            "params": str(sum(p.numel() for p in self.model.parameters())),
            "state": str(self.state),
            "memory_scan": self.candidates,
            "mode": "captured" if self.cuda and not self.reason else "eager",
        }


def side_by_side(
    learners: Sequence[Learner],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    rate: Callable[[int], float],
    score: Callable[[Learner], float],
    scores: int = 10,
    hear: Callable[[int], None] = lambda step: None,
) -> None:
    """All make the same steps on the same batches; every `steps` / `scores` each adds to its curve."""
    for step in range(steps):
        ids, targets = batch(step)
        for learner in learners:
            learner(ids, targets, rate(step))
        if (step + 1) % max(1, steps // scores) == 0:
            for learner in learners:
                with learner.apart(), torch.no_grad(), learner.precision():
                    learner.curve.append((step + 1, score(learner)))
            hear(step + 1)


def written(curve: Sequence[tuple[int, float]]) -> str:
    """A curve as one column."""
    return " ".join(f"{step}:{value:.4f}" for step, value in curve)


def facts(device: str) -> dict[str, str]:
    """Columns that say where and when a row was measured."""
    found = hardware.facts(device)
    return {"gpu": found.device, "torch": found.torch, "triton": found.triton, "date": results.now()[:10]}
