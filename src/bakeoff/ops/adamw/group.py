"""What one update works on: a group's tensors, its settings, and weights kept wider than parameters."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "Group",
    "Guard",
    "Hyper",
    "Scaled",
    "factor_of",
    "grouped",
    "join",
    "log_beta",
    "rate_of",
    "split",
]


class Group(NamedTuple):
    """Lists of equal length, one entry a tensor; every tensor of an entry has the parameter's shape."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    step: list[Tensor]
    """Steps taken so far, float32 scalars: one for each tensor, or a single one for all."""
    master: list[Tensor] | None = None
    """Weights wider than the parameters: float32, or the int16 remainders of bfloat16 ones (`split`)."""


class Hyper(NamedTuple):
    """The settings of an update. Tensors among them are scalars on the device; the host never reads them."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    lr_mult: Tensor | None = None
    sums: Tensor | None = None
    """[4], written: sum of g*u_prev, g^2, p^2 and u^2 over all elements (see `adamw_`)."""


class Guard(NamedTuple):
    """Device scalars: the gradients' norm (unscaled), the coefficient that clips it, 1 to skip the step."""

    norm: Tensor
    clip_coef: Tensor
    found_inf: Tensor


def grouped(args: Sequence[Any]) -> tuple[Group, Hyper]:
    """The arguments of adamw_ as implementations get them, which are those of `Group` and then of `Hyper`."""
    return Group(*args[:6]), Hyper(*args[6:])


class Scaled(Protocol):
    """Settings of any rule's update that say how fast it goes and how gradients are scaled; see `Hyper`."""

    @property
    def lr(self) -> float | Tensor: ...
    @property
    def lr_mult(self) -> Tensor | None: ...
    @property
    def maximize(self) -> bool: ...
    @property
    def clip_coef(self) -> Tensor | None: ...
    @property
    def grad_scale(self) -> Tensor | None: ...


def rate_of(how: Scaled) -> float | Tensor:
    """lr * lr_mult, in float64 where it is a tensor."""
    lr = how.lr.double() if isinstance(how.lr, Tensor) else how.lr
    return lr if how.lr_mult is None else lr * how.lr_mult.double()


def factor_of(how: Scaled) -> float | Tensor:
    """What gradients are multiplied by: the clip coefficient over the loss scale, negative to maximize."""
    factor: float | Tensor = -1.0 if how.maximize else 1.0
    if how.clip_coef is not None:
        factor = factor * how.clip_coef
    if how.grad_scale is not None:
        factor = factor / how.grad_scale
    return factor


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 weight whose bits are those of the bfloat16 `param`, shifted up, plus the remainder."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 (halves away from zero) and the int16 remainder; `join` restores the bits."""
    bits = weight.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def log_beta(beta: float) -> float:
    """ln(beta), so that beta^t = exp(t * ln(beta)); -inf for 0."""
    return math.log(beta) if beta > 0 else -math.inf
