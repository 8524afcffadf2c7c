"""The definition of Muon's step, in plain PyTorch."""

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import factor_of, rate_of
from bakeoff.ops.adamw.reference import sums_of
from bakeoff.ops.muon.settings import COEFFICIENTS, EPS, Settings, size_of

__all__ = ["muon", "orthogonalised"]


def orthogonalised(u: Tensor, steps: int = 5) -> Tensor:
    """About the nearest half-orthogonal matrix to u [rows, columns], in the dtype of u.

    X = u / (|u| + 1e-7), then `steps` times X <- a X + (b A + c A^2) X with A = X X', on the smaller side.
    """
    if u.shape[0] > u.shape[1]:
        return orthogonalised(u.T, steps).T
    a, b, c = COEFFICIENTS
    x: Tensor = u / (u.norm() + EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(
    params: list[Tensor],
    grads: list[Tensor],
    momentum: list[Tensor],
    direction: list[Tensor] | None = None,
    lr: float | Tensor = 1e-3,
    momentum_decay: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    steps: int = 5,
    scale: str = "match_rms",
    maximize: bool = False,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    lr_mult: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[list[Tensor] | Tensor | None, ...]:
    """One step of matrices: what params, momentum, direction and sums hold after it.

    Computes in float32, or in float64 when an input is float64, and casts once at the end.
    """
    how = Settings(
        lr, momentum_decay, nesterov, weight_decay, steps, scale, maximize, clip_coef, found_inf, grad_scale,
        lr_mult, sums,
    )  # fmt: skip
    rate, factor = rate_of(how), factor_of(how)
    new: list[tuple[Tensor, ...]] = []
    found: list[Tensor] = []
    for i, (param, grad, old) in enumerate(zip(params, grads, momentum, strict=True)):
        wide = torch.promote_types(torch.promote_types(param.dtype, old.dtype), torch.float32)
        p, g = param.to(wide), grad.to(wide) * factor
        m = momentum_decay * old.to(wide) + g
        u = orthogonalised(g + momentum_decay * m if nesterov else m, steps) * size_of(p.shape, scale)
        before = torch.zeros_like(u) if direction is None else direction[i].to(wide)
        if sums is not None:
            found.append(sums_of(g, before, p, u))
        after = (p * (1 - rate * weight_decay) - rate * u, m, u)
        new.append(tuple(_unless(found_inf, a, b) for a, b in zip(after, (p, old, before), strict=True)))
    return (
        [now[0].to(p.dtype) for now, p in zip(new, params, strict=True)],
        [now[1].to(m.dtype) for now, m in zip(new, momentum, strict=True)],
        None if direction is None else [now[2].to(d.dtype) for now, d in zip(new, direction, strict=True)],
        None if sums is None else _unless(found_inf, torch.stack(found).sum(0), torch.zeros_like(found[0])),
    )


def _unless(found_inf: Tensor | None, now: Tensor, was: Tensor) -> Tensor:
    return now if found_inf is None else torch.where(found_inf != 0, was.to(now.dtype), now)
