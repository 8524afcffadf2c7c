"""The definition of AdamW's step and of the global norm, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import join

__all__ = ["adamw", "global_norm", "moved"]


def moved(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Any, lr: Any, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The parameter and its moments after step t, in the dtype of the arguments.

    p *= 1 - lr*weight_decay;  m = beta1*m + (1 - beta1)*g;  v = beta2*v + (1 - beta2)*g^2;
    p -= lr/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps).
    """
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    step_size = lr / (1 - beta1**t)
    p = p * (1 - lr * weight_decay) - step_size * (m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps))
    return p, m, v


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    step: int = 10,
    shared: bool | None = None,
) -> tuple[Tensor, ...]:
    """One step of N tensors of D elements each, stacked as [N, D]: what a contest holds instead of lists.

    `step` counts the steps before this one; `shared` says that some of a group's tensors overlap, and changes
    nothing here. Returns (param, exp_avg, exp_avg_sq), and the new weight where there is a `master`.
    Computes in float32, or in float64 when an input is float64, and casts once at the end.
    """
    del shared
    old = (param, exp_avg, exp_avg_sq)
    wide = torch.promote_types(torch.promote_types(param.dtype, exp_avg.dtype), torch.float32)
    weight = param
    if master is not None:
        is_remainder = master.dtype == torch.int16
        weight = join(param.to(torch.bfloat16), master) if is_remainder else master
    g = grad.to(wide) if clip_coef is None else grad.to(wide) * clip_coef
    new, m, v = moved(
        weight.to(wide),
        g,
        exp_avg.to(wide),
        exp_avg_sq.to(wide),
        step + 1,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    )
    results = [new, m, v]
    if found_inf is not None:
        results = [
            torch.where(found_inf != 0, was, now)
            for was, now in zip((weight, *old[1:]), results, strict=True)
        ]
    stored = tuple(now.to(was.dtype) for was, now in zip(old, results, strict=True))
    return (
        stored
        if master is None
        else (*stored, results[0].to(torch.promote_types(param.dtype, torch.float32)))
    )


def global_norm(grad: Tensor) -> Tensor:
    """[sqrt(sum of squares)] of N gradients stacked as [N, D], in float32 or wider."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum().sqrt().reshape(1)
