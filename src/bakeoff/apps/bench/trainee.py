"""A model of any kind in training on rows that a suite draws, apart from the trainer and its runs."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bakeoff.apps.train.step import set_rate
from bakeoff.device import synchronize
from bakeoff.graphs import NotCapturable, capture_step
from bakeoff.optim import AdamW, DeepNestedOptimizer
from bakeoff.timing import seconds_per_call

__all__ = ["Trainee"]


class Trainee:
    """`model` and its `optimizer`, in bfloat16 under autocast on CUDA. There its step is one graph, which is
    replayed on a stream of its own: steps of small models are bound by launches, so those of several
    overlap."""

    def __init__(self, model: nn.Module, optimizer: AdamW, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.issued: Callable[[Tensor, Tensor], object] = (
            capture_step(self._step) if self.cuda else self._step
        )
        self.reason = ""
        """Why steps are not captured."""
        self.curve: list[tuple[int, float]] = []

    def __call__(self, ids: Tensor, targets: Tensor, rate: float) -> None:
        """A step on ids and targets [B, T], of the CPU or pinned memory."""
        with self.apart():
            set_rate(self.optimizer, rate)
            ids, targets = (x.to(self.device, non_blocking=True) for x in (ids, targets))
            self._issue(ids, targets)

    def _issue(self, ids: Tensor, targets: Tensor) -> None:
        try:
            self.issued(ids, targets)
        except NotCapturable as why:
            self.issued, self.reason = self._step, str(why)
            if not why.ran:
                self.model.zero_grad(set_to_none=True)
                self._step(ids, targets)

    def _step(self, ids: Tensor, targets: Tensor) -> None:
        with self.precision():
            _, loss = self.model(ids, targets)
        assert loss is not None
        loss.backward()
        if isinstance(self.optimizer, DeepNestedOptimizer):
            self.optimizer.loss = loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """On this trainee's stream."""
        return torch.cuda.stream(self.stream)

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.cuda)

    def milliseconds(self, ids: Tensor, targets: Tensor, steps: int = 20) -> float:
        """Of a step while nothing else runs, at rate 0: after training."""
        synchronize(self.device)
        with self.apart():
            return 1e3 * seconds_per_call([lambda: self(ids, targets, 0.0)], steps, self.device)
