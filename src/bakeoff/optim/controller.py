"""A learned multiplier of each parameter group's learning rate, kept and trained on the device."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware

__all__ = ["NestedController"]

_INPUTS = 6
_SHARED = ("weight1", "bias1", "weight2", "bias2", "loss")
_LIMIT = 3.0
"""Standard deviations that an input may lie from its mean."""
_TINY = 1e-30


class NestedController:
    """Multiplies each group's learning rate by r^tanh(y), where a small network shared by all groups gives y.

    y = bias2 + weight2 . tanh(weight1 x + bias1). weight2 and bias2 start at 0, so every multiplier starts at
    exactly 1. x holds, for each group, the logarithms of the gradient's norm, of the parameters' norm and of
    the update's over the parameters' norm, the cosine of the gradient with the last update, how far the
    loss's logarithm lies from its running mean, all five standardised by running averages, and the group's
    depth.

    The network descends on the loss's slope in the multipliers, the hypergradient -lr * <g_t, u_{t-1}>. Its
    size says more about the model than about the rate, so that it is taken as a cosine c, averaged over some
    steps, and only as far as c leaves the band [-margin, margin], in which well chosen rates keep it. A pull
    leads back to 1.

    Everything stays on the device: no call waits for it, and each may be captured in a CUDA graph. Ranks that
    pass equal sums and losses hold equal multipliers. A group that took no step keeps its multiplier; one
    whose sums or loss are not finite gets 1, and nothing is learned from them.

    Args:
        groups: how many.
        device: of the sums that will come.
        ratio: r > 1; multipliers lie in [1/r, r].
        hidden: units of the network.
        rate: step size of the network's last bias.
        inner: step size of its other weights, as a share of `rate`.
        margin: cosines, at most 1, that count as 0.
        pull: of y towards 0, as a share of `rate` a step.
        decay: of the running averages of inputs, in [0, 1); that of the cosine forgets ten times as fast.
        wait: steps of a group before anything is learned from it. While the rate warms up the cosine always
            asks for more.
        depths: one number a group, within [-1, 1]; by default spread evenly in order.
        seed: of weight1.

    Attributes:
        multipliers: float32 [groups], on the device, always in the same memory.

    Raises:
        ValueError: settings outside their range.

    Source: Baydin et al. 2018, Online Learning Rate Adaptation with Hypergradient Descent; Wu et al. 2018,
    Understanding Short-Horizon Bias in Stochastic Meta-Optimization, for what to beware of.

    Example:
        >>> import torch
        >>> controller = NestedController(1)
        >>> for _ in range(130):  # gradients that point as the last update did, step by step
        ...     controller.advance(torch.tensor([[1.0, 1.0, 4.0, 1.0]]))
        >>> bool(1 < controller.multipliers < 4)
        True
    """

    def __init__(
        self,
        groups: int,
        device: torch.device | str = "cpu",
        *,
        ratio: float = 4.0,
        hidden: int = 16,
        rate: float = 0.5,
        inner: float = 0.1,
        margin: float = 0.1,
        pull: float = 0.01,
        decay: float = 0.99,
        wait: int = 100,
        depths: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        _check(groups, ratio, hidden, rate, inner, margin, pull, decay, wait, depths)
        self.groups, self.hidden, self.ratio, self.rate = groups, hidden, ratio, rate
        self.inner, self.margin, self.pull, self.decay, self.wait = inner, margin, pull, decay, wait
        device = torch.device(device)
        # In float32 whatever the default dtype is, and on the CPU whatever the default device is.
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        first = torch.randn(hidden, _INPUTS, generator=torch.Generator().manual_seed(seed), **kind)
        spread = (
            torch.linspace(-1.0, 1.0, groups, **kind) if depths is None else torch.tensor([*depths], **kind)
        )
        zeros = functools.partial(torch.zeros, dtype=torch.float32)
        self._state = {
            "weight1": (first / math.sqrt(_INPUTS)).to(device),
            "bias1": zeros(hidden, device=device),
            "weight2": zeros(hidden, device=device),
            "bias2": zeros((), device=device),
            "loss": zeros(2, device=device),  # the running mean of its logarithm, and the steps in it
            "depth": spread.to(device),
            "count": zeros(groups, device=device),
            "mean": zeros(groups, 5, device=device),
            "square": zeros(groups, 5, device=device),  # the running variance
            "cosine": zeros(groups, device=device),
            "size": zeros(groups, device=device),  # the last update's norm
            "x": zeros(groups, _INPUTS, device=device),  # what the present multipliers were made of,
            "x_last": zeros(groups, _INPUTS, device=device),  # and those of the last step
            "multipliers": torch.ones(groups, device=device, dtype=torch.float32),
        }

    @property
    def multipliers(self) -> Tensor:
        """float32 [groups], on the device, in [1/ratio, ratio]."""
        return self._state["multipliers"]

    @torch.no_grad()
    def advance(self, sums: Tensor, loss: Tensor | None = None) -> None:
        """Learns from a step and sets the multipliers of the next.

        Args:
            sums: [groups, 4] on the device, as adamw_ gives them: of g*u_prev, g^2, p^2, u^2. Zeros where a
                group took no step.
            loss: scalar on the device, of this step; without one the loss tells nothing.

        Raises:
            TypeError, ValueError: sums or a loss that are no tensors, or of another shape; nothing changed.
        """
        _check_step(sums, loss, self.groups)  # the kernel reads as many numbers, whatever there are
        s, sums = self._state, sums.float()
        if self._in_one_launch(sums):
            from bakeoff.optim.kernels import advance

            advance(
                s, sums.contiguous(), loss, ratio=self.ratio, rate=self.rate, inner=self.inner,
                margin=self.margin, pull=self.pull, decay=self.decay, wait=self.wait,
            )  # fmt: skip
            return
        slope, gg, pp, uu = sums.unbind(1)
        size = uu.sqrt()
        stepped = ~((gg == 0) & (uu == 0))
        cosine = slope * torch.rsqrt(gg.clamp(min=_TINY)) / s["size"].clamp(min=_TINY)
        cosine = torch.where(s["size"] > 0, cosine, 0.0 * slope)  # none yet; what is not finite stays so
        norms = torch.stack([gg, pp, uu / pp.clamp(min=_TINY)], 1).clamp(min=_TINY).log() * 0.5
        ahead = self._ahead(loss, stepped.any())
        raw = torch.cat([norms, cosine[:, None], ahead.expand(self.groups)[:, None]], 1)
        fine = stepped & raw.isfinite().all(1) & sums.isfinite().all(1)

        count = s["count"] + 1.0
        averaged = self._learn(cosine.clamp(-1.0, 1.0), fine, count)
        x, mean, square = self._standardised(raw, count)
        new = {"count": count, "mean": mean, "square": square, "cosine": averaged, "size": size}
        for name, value in new.items():
            known = fine if value.ndim == 1 else fine[:, None]
            s[name].copy_(torch.where(known, value, s[name]))
        s["x_last"].copy_(torch.where(fine[:, None], s["x"], s["x_last"]))
        s["x"].copy_(torch.where(fine[:, None], x, s["x"]))
        y, _ = self._network(s["x"])
        now = torch.where(fine, torch.exp(math.log(self.ratio) * torch.tanh(y)), 1.0)
        self.multipliers.copy_(torch.where(stepped, now, self.multipliers))

    def _in_one_launch(self, sums: Tensor) -> bool:
        """Whether a kernel does the whole step: on a GPU that Triton compiles for, if it can hold it."""
        if not sums.is_cuda or hardware.without_triton(str(sums.device)):
            return False
        from bakeoff.optim.kernels import fits

        return fits(self.groups, self.hidden)

    def _network(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y of each group, and the hidden units."""
        s = self._state
        units = torch.tanh(torch.addmm(s["bias1"], x, s["weight1"].t()))
        return torch.mv(units, s["weight2"]) + s["bias2"], units

    def _ahead(self, loss: Tensor | None, stepped: Tensor) -> Tensor:
        """How far the loss's logarithm lies above its running mean, 0 without a loss; it enters the mean if
        a step was taken."""
        mean, count = self._state["loss"].unbind()
        if loss is None:
            return torch.zeros_like(mean)
        known = loss.detach().float().reshape(()).clamp(min=_TINY).log()
        fine = known.isfinite() & stepped
        ahead = torch.where(count > 0, known - mean, 0.0 * known)
        share = torch.clamp(1.0 / (count + 1.0), min=5.0 * (1.0 - self.decay))
        self._state["loss"].copy_(
            torch.where(fine, torch.stack([mean + share * (known - mean), count + 1.0]), self._state["loss"])
        )
        return ahead

    def _learn(self, cosine: Tensor, fine: Tensor, count: Tensor) -> Tensor:
        """Moves the network against the slope of the loss in the last step's multipliers; returns the
        averaged cosines."""
        s = self._state
        averaged = s["cosine"] + (cosine - s["cosine"]) * min(1.0, 10.0 * (1.0 - self.decay))
        beyond = averaged - averaged.clamp(-self.margin, self.margin)
        y, units = self._network(s["x_last"])
        learns = fine & (count > max(2, self.wait))
        steep = math.log(self.ratio) * (1.0 - torch.tanh(y).square())
        dy = torch.where(learns, (self.pull * y - beyond * steep) * (1.0 / self.groups), 0.0)
        inside = torch.outer(dy, s["weight2"]) * (1.0 - units.square())
        step = -self.rate * self.inner
        s["weight2"].add_(torch.mv(units.t(), dy), alpha=step)
        s["weight1"].add_(torch.mm(inside.t(), s["x_last"]), alpha=step)
        s["bias1"].add_(inside.sum(0), alpha=step)
        s["bias2"].add_(dy.sum(), alpha=-self.rate)
        return averaged

    def _standardised(self, raw: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The network's inputs, and the running means and variances that they are measured by."""
        s = self._state
        share = torch.clamp(1.0 / count, min=1.0 - self.decay)[:, None]
        away = raw - s["mean"]
        mean = s["mean"] + share * away
        square = (1.0 - share) * (s["square"] + share * away.square())
        x = ((raw - mean) / (square.sqrt() + 1e-3)).clamp(-_LIMIT, _LIMIT)
        return torch.cat([x, s["depth"][:, None]], 1), mean, square

    def grow(self, groups: int) -> None:
        """Makes room for more groups, which start as the first ones did; the tensors are others then."""
        more = groups - self.groups
        if more <= 0:
            return
        self.groups = groups
        for name, own in self._state.items():
            if name not in _SHARED:
                filler = torch.ones if name in ("multipliers", "depth") else torch.zeros
                self._state[name] = torch.cat(
                    [own, filler(more, *own.shape[1:], device=own.device, dtype=own.dtype)]
                )

    def to(self, device: torch.device) -> None:
        """Moves everything to `device`, if it is elsewhere."""
        if self.multipliers.device != device:
            self._state = {name: own.to(device) for name, own in self._state.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything learned and remembered, by name: the controller's own tensors, not copies."""
        return dict(self._state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state that `load_state_dict` could not take."""
        for name, own in self._state.items():
            given = state.get(name)
            if not isinstance(given, Tensor) or given.shape != own.shape:
                found = tuple(given.shape) if isinstance(given, Tensor) else "missing"
                raise ValueError(
                    f"NestedController: {name} is {found} in the state, {tuple(own.shape)} here; use as many "
                    f"groups ({self.groups}) and hidden units ({self.hidden}) as when it was saved"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a `state_dict`, in the memory that is there. Raises ValueError, having changed nothing,
        where groups or hidden units are others."""
        self.check_state(state)
        for name, own in self._state.items():
            own.copy_(state[name])


def _check_step(sums: Any, loss: Any, groups: int) -> None:
    for name, given in (("sums", sums), *((("loss", loss),) if loss is not None else ())):
        if not isinstance(given, Tensor):
            raise TypeError(f"NestedController: {name} must be a tensor on the device, got {given!r}")
    if sums.shape != (groups, 4):
        raise ValueError(
            f"NestedController: sums have shape {tuple(sums.shape)}, expected ({groups}, 4): four for each "
            f"group, zeros where it took no step"
        )
    if loss is not None and loss.numel() != 1:
        raise ValueError(
            f"NestedController: the loss has shape {tuple(loss.shape)}, expected one number: give the mean"
        )


def _check(
    groups: int, ratio: float, hidden: int, rate: float, inner: float, margin: float, pull: float,
    decay: float, wait: int, depths: Sequence[float] | None,
) -> None:  # fmt: skip
    if groups < 1 or hidden < 1 or wait < 0:
        raise ValueError(
            f"NestedController: groups and hidden must be at least 1 and wait at least 0, got {groups}, "
            f"{hidden} and {wait}"
        )
    if not 1.0 < ratio < math.inf:
        raise ValueError(f"NestedController: ratio must be above 1 and finite, got {ratio}")
    for name, value in (("rate", rate), ("inner", inner), ("pull", pull)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"NestedController: {name} must be at least 0 and finite, got {value}")
    if not 0.0 <= margin <= 1.0 or not 0.0 <= decay < 1.0:
        raise ValueError(
            f"NestedController: margin must be in [0, 1] and decay in [0, 1), got {margin} and {decay}"
        )
    if depths is not None and not all(-1.0 <= depth <= 1.0 for depth in depths):
        raise ValueError(f"NestedController: depths must lie in [-1, 1], got {[*depths]}")
    if depths is not None and len(depths) != groups:
        raise ValueError(f"NestedController: {len(depths)} depths for {groups} groups; pass one a group")
