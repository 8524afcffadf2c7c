"""The candidates made of PyTorch's own parts. None waits for the device."""

import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group, Guard, Hyper, factor_of, grouped, join, rate_of, split
from bakeoff.ops.adamw.reference import direction, moved, sums_of

__all__ = ["compiled", "foreach", "fused", "loop", "norm"]


def loop(*args: Any) -> None:
    """The definition, tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    group, how = grouped(args)
    weights = _weights(group)
    rate, factor = rate_of(how), factor_of(how)
    skip = None if how.found_inf is None else how.found_inf != 0
    before = _before(group, how)
    _advance(group.step, how.found_inf)
    for i, (w, g, m, v) in enumerate(zip(weights, group.grads, group.exp_avg, group.exp_avg_sq, strict=True)):
        wide = torch.promote_types(torch.promote_types(w.dtype, m.dtype), torch.float32)
        t = group.step[i if len(group.step) > 1 else 0].double()
        new = moved(
            w.to(wide), g.to(wide) * factor, m.to(wide), v.to(wide), t, rate,
            how.beta1, how.beta2, how.eps, how.weight_decay,
        )  # fmt: skip
        for old, now in zip((w, m, v), new, strict=True):
            old.copy_(now if skip is None else torch.where(skip, old, now.to(old.dtype)))
    _sum_up(group, how, before)
    _store(group, weights)


def foreach(*args: Any) -> None:
    """PyTorch's horizontally fused functions, as torch.optim.AdamW(foreach=True) uses them under capture."""
    group, how = grouped(args)
    weights = _weights(group)
    before = _before(group, how)
    _advance(group.step, None)
    _foreach(
        weights, group.grads, group.exp_avg, group.exp_avg_sq, _scalars(group, weights, how), *_betas(how)
    )
    _sum_up(group, how, before)
    _store(group, weights)


def fused(*args: Any) -> None:
    """torch._fused_adamw_, the kernel of torch.optim.AdamW(fused=True)."""
    group, how = grouped(args)
    weights, grads = _weights(group), group.grads
    before = _before(group, how)
    _advance(group.step, how.found_inf)
    steps = group.step if len(group.step) == len(weights) else group.step * len(weights)
    rate, factor = rate_of(how), factor_of(how._replace(maximize=False))
    # Its own grad_scale would write the scaled gradients back.
    grads = _scaled(grads, factor, weights[0].dtype)
    torch._fused_adamw_(
        weights, grads, group.exp_avg, group.exp_avg_sq, [], steps,
        lr=_fit(rate, weights), beta1=how.beta1, beta2=how.beta2,
        weight_decay=how.weight_decay, eps=how.eps, amsgrad=False, maximize=how.maximize,
        grad_scale=None, found_inf=None if how.found_inf is None else (how.found_inf != 0).float(),
    )  # fmt: skip
    _sum_up(group, how, before)
    _store(group, weights)


def compiled(*args: Any) -> None:
    """torch.compile of `foreach`: one compilation for each list of shapes."""
    group, how = grouped(args)
    weights = _weights(group)
    _advance(group.step, None)
    lists = (weights, list(group.grads), list(group.exp_avg), list(group.exp_avg_sq))
    shapes = [(w.shape, w.dtype, g.dtype, m.dtype) for w, g, m, _ in zip(*lists, strict=True)]
    betas = _betas(how)
    step = _unit((len(group.step), *betas, *shapes))
    scalars = _scalars(group, weights, how)
    if how.weight_decay and not isinstance(scalars.keep, Tensor):  # a number would be compiled in
        scalars = scalars._replace(keep=torch.full_like(scalars.sizes[0], scalars.keep))
    step(*lists, scalars, *betas)
    _store(group, weights)


@lru_cache(maxsize=64)
def _unit(_: tuple[Any, ...]) -> Callable[..., None]:
    """A code object of its own: torch.compile gives up after a few recompilations of one."""
    twin = types.FunctionType(_foreach.__code__.replace(), _foreach.__globals__, _foreach.__name__)
    return torch.compile(twin, fullgraph=True, dynamic=False)


class _Scalars(NamedTuple):
    """What an update multiplies and divides by, ready before the lists are walked: inside a fused kernel the
    powers would be taken anew, in float64, for every element."""

    keep: Any
    """1 - rate * weight decay."""
    factor: Any
    """What gradients are multiplied by."""
    sizes: list[Any]
    """-rate / (1 - beta1^t), one a tensor."""
    roots: list[Any]
    """sqrt(1 - beta2^t), one a tensor."""


def _scalars(group: Group, weights: list[Tensor], how: Hyper) -> _Scalars:
    rate = rate_of(how)
    counts = torch.stack(group.step).double()
    sizes = list(_fit(rate / (how.beta1**counts - 1), weights).unbind())
    roots = list(_fit((1 - how.beta2**counts).sqrt(), weights).unbind())
    if len(sizes) < len(weights):
        sizes, roots = sizes * len(weights), roots * len(weights)
    keep = 1 - rate * how.weight_decay if how.weight_decay else 1.0
    return _Scalars(_fit(keep, weights), _fit(factor_of(how), weights), sizes, roots)


def _betas(how: Hyper) -> tuple[float, float, float]:
    return how.beta1, how.beta2, how.eps


def _foreach(
    weights: list[Tensor],
    grads: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    scalars: _Scalars,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    grads = _scaled(grads, scalars.factor, m[0].dtype)
    if isinstance(scalars.keep, Tensor) or scalars.keep != 1.0:
        torch._foreach_mul_(weights, scalars.keep)
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    below = list(torch._foreach_sqrt(v))
    torch._foreach_div_(below, scalars.roots)
    torch._foreach_add_(below, eps)
    torch._foreach_div_(below, scalars.sizes)
    torch._foreach_addcdiv_(weights, m, below)


def norm(
    grads: Sequence[Tensor],
    max_norm: float | None,
    skip_nonfinite: bool,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    skipped: Tensor | None,
) -> Guard:
    """The global norm by PyTorch's foreach functions, in float32 (float64 for float64)."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(grads), 2, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(wide) for n in norms]))
    if grad_scale is not None:
        total = total / grad_scale
    coefficient = torch.ones_like(total) if max_norm is None else (max_norm / (total + 1e-6)).clamp(max=1.0)
    skip = torch.zeros_like(total, dtype=torch.bool)
    if skip_nonfinite:
        skip = ~torch.isfinite(total)
    if found_inf is not None:
        skip = skip | (found_inf != 0).reshape(())
    if skipped is not None:
        skipped += skip
    return Guard(total, coefficient, skip.to(total.dtype))


def _before(group: Group, how: Hyper) -> list[Tensor] | None:
    """g*u_prev, g^2 and p^2 of each tensor, summed, where sums are wanted."""
    if how.sums is None:
        return None
    factor, nothing = factor_of(how), torch.zeros((), device=how.sums.device)
    found = []
    for w, g, u in zip(_weights(group), group.grads, _directions(group, how), strict=True):
        found.append(sums_of(g.to(u.dtype) * factor, u, w.to(u.dtype), nothing))
    return found


def _sum_up(group: Group, how: Hyper, before: list[Tensor] | None) -> None:
    """Adds u^2 of the step that was made, and writes the sums: zeros if it was skipped."""
    if before is None or how.sums is None:
        return
    for found, u in zip(before, _directions(group, how), strict=True):
        found[3] = u.square().sum()
    total = torch.stack(before).double().sum(0)
    how.sums.copy_(total if how.found_inf is None else torch.where(how.found_inf != 0, 0.0, total))


def _directions(group: Group, how: Hyper) -> Iterator[Tensor]:
    """What the rate multiplies in the step that `group.step` counts, of its moments."""
    for i, (m, v) in enumerate(zip(group.exp_avg, group.exp_avg_sq, strict=True)):
        t = group.step[i if len(group.step) > 1 else 0].double()
        wide = torch.promote_types(m.dtype, torch.float32)
        yield direction(m.to(wide), v.to(wide), t, how.beta1, how.beta2, how.eps)


def _advance(steps: list[Tensor], found_inf: Tensor | None) -> None:
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        undone = (found_inf != 0).to(steps[0].dtype).reshape(())
        torch._foreach_sub_(steps, [undone] * len(steps))


def _weights(group: Group) -> list[Tensor]:
    """What the update moves: the parameters, or the wider weights behind them."""
    if group.master is None:
        return list(group.params)
    if group.master[0].dtype == torch.int16:
        return [join(p, r) for p, r in zip(group.params, group.master, strict=True)]
    return list(group.master)


def _store(group: Group, weights: list[Tensor]) -> None:
    """Round wider weights to the parameters."""
    if group.master is None:
        return
    if group.master[0].dtype != torch.int16:
        torch._foreach_copy_(group.params, group.master)
        return
    for param, remainder, weight in zip(group.params, group.master, weights, strict=True):
        high, low = split(weight)
        param.copy_(high)
        remainder.copy_(low)


def _scaled(grads: list[Tensor], factor: float | Tensor, dtype: torch.dtype) -> list[Tensor]:
    """factor * g in `dtype`, in new tensors where that changes anything."""
    grads = [g.to(dtype) for g in grads]
    if isinstance(factor, Tensor) or factor != 1.0:
        grads = [g.to(dtype) for g in torch._foreach_mul(grads, _fit(factor, grads))]  # scalars get promoted
    return grads


def _fit(value: float | Tensor, weights: list[Tensor]) -> Any:
    """A scalar in a dtype that PyTorch's horizontally fused functions take beside `weights`."""
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float64 if weights[0].dtype == torch.float64 else torch.float32)
