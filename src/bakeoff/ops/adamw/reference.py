"""The definition of AdamW's step and of the global norm, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Hyper, factor_of, join, rate_of

__all__ = ["adamw", "direction", "global_norm", "moved", "sums_of", "weights_of"]


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


def direction(m: Tensor, v: Tensor, t: Tensor, beta1: float, beta2: float, eps: float) -> Tensor:
    """What the rate multiplies in step t, of the moments after it; 0 where t is 0.

    u = m/(1 - beta1^t) / (sqrt(v)/sqrt(1 - beta2^t) + eps).
    """
    u = m / (1 - beta1**t) / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)
    return torch.where(t == 0, torch.zeros_like(u), u)


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    step: list[Tensor],
    master: list[Tensor] | None = None,
    lr: float | Tensor = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    lr_mult: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[list[Tensor] | Tensor | None, ...]:
    """One step of all tensors of a group: what params, exp_avg, exp_avg_sq, step, master and sums hold after
    it.

    `step` counts the steps before this one, for each tensor or for all. What a master stands for is a weight,
    so that is given for int16 remainders, too. Computes in float32, or in float64 when an input is float64,
    and casts once at the end.
    """
    how = Hyper(
        lr, beta1, beta2, eps, weight_decay, maximize, clip_coef, found_inf, grad_scale, lr_mult, sums
    )
    rate, factor = rate_of(how), factor_of(how)
    counts = [t + 1 for t in step]
    weights = params if master is None else weights_of(params, master)
    new: list[tuple[Tensor, ...]] = []
    found: list[Tensor] = []
    for i, old in enumerate(zip(weights, grads, exp_avg, exp_avg_sq, strict=True)):
        w, g, m, v = old
        wide = torch.promote_types(torch.promote_types(w.dtype, m.dtype), torch.float32)
        t = counts[i if len(counts) > 1 else 0]
        after = moved(
            w.to(wide), g.to(wide) * factor, m.to(wide), v.to(wide), t, rate, beta1, beta2, eps, weight_decay
        )
        if sums is not None:
            how_far = (beta1, beta2, eps)
            before = direction(m.to(wide), v.to(wide), t - 1, *how_far)
            scaled = g.to(wide) * factor
            found.append(sums_of(scaled, before, w.to(wide), direction(after[1], after[2], t, *how_far)))
        new.append(tuple(_unless(found_inf, now, was) for now, was in zip(after, (w, m, v), strict=True)))
    return (
        [now[0].to(p.dtype) for now, p in zip(new, params, strict=True)],
        [now[1].to(m.dtype) for now, m in zip(new, exp_avg, strict=True)],
        [now[2].to(v.dtype) for now, v in zip(new, exp_avg_sq, strict=True)],
        [_unless(found_inf, now, was) for now, was in zip(counts, step, strict=True)],
        None if master is None else [now[0] for now in new],
        None if sums is None else _unless(found_inf, torch.stack(found).sum(0), torch.zeros_like(found[0])),
    )


def sums_of(g: Tensor, u_prev: Tensor, p: Tensor, u: Tensor) -> Tensor:
    """[4]: the sums of g*u_prev, g^2, p^2 and u^2."""
    return torch.stack([(g * u_prev).sum(), g.square().sum(), p.square().sum(), u.square().sum()])


def weights_of(params: list[Tensor], master: list[Tensor]) -> list[Tensor]:
    """The weights that parameters are roundings of: float32 masters, or those that int16 remainders
    extend."""
    if master[0].dtype != torch.int16:
        return master
    return [join(p.to(torch.bfloat16), r) for p, r in zip(params, master, strict=True)]


def _unless(found_inf: Tensor | None, now: Tensor, was: Tensor) -> Tensor:
    return now if found_inf is None else torch.where(found_inf != 0, was.to(now.dtype), now)


def global_norm(
    grads: list[Tensor],
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The 2-norm of all gradients together, unscaled, and what follows: the coefficient that brings a norm
    beyond `max_norm` down to it, and whether to skip the step, which `skipped` counts.

    Returns what skipped holds after it, the norm, the coefficient and 1 to skip, in float32 or wider.
    """
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm = torch.stack([g.to(wide).square().sum() for g in grads]).sum().sqrt()
    if grad_scale is not None:
        norm = norm / grad_scale
    ratio = torch.ones_like(norm) if max_norm is None else max_norm / (norm + 1e-6)
    skip = ~torch.isfinite(norm) if skip_nonfinite else torch.zeros_like(norm, dtype=torch.bool)
    if found_inf is not None:
        skip = skip | (found_inf != 0)
    after = None if skipped is None else skipped + skip
    return after, norm, torch.where(ratio >= 1, torch.ones_like(ratio), ratio), skip.to(wide)
