"""PyTorch's own memory_update: ``eager``, differentiated by autograd, and ``manual``, whose backward is the
closed form.

16-bit rows are multiplied in their dtype, as a user's own code would; all else is float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.autocast import without_autocast
from bakeoff.ops.memory_update.reference import loss_factor

__all__ = ["eager", "in_place", "manual"]

_Update = tuple[Tensor, ...]


class _Rows(NamedTuple):
    """What the rows of a step make of the memory, before the factor of the loss."""

    z: Tensor
    h: Tensor
    e: Tensor
    dy: Tensor
    dh: Tensor
    dz: Tensor


def eager(*args: Any) -> _Update:
    """Autograd differentiates it. Where gradients are wanted the step is computed twice, first to learn which
    groups are skipped."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    with without_autocast(args[0]):
        return _eager(args, wants)


def _eager(args: Sequence[Any], wants: bool) -> _Update:
    k, v, *memory = args[:6]
    momentum, (lr, decay, forget, max_norm, reduction, row_weight) = args[6:10], args[10:]
    factor = loss_factor(reduction, *v.shape[1:])
    seen = [k, v, *memory, row_weight]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not wants):
        loss, norm, slopes = _step(seen, factor)
    ok, length, known_state = torch.isfinite(norm), norm, [*memory, *momentum]
    if wants:
        known_state = [torch.where(_each(ok, t), t, 0) for t in known_state]
        known = [t if t is None else torch.where(_each(ok, t), t, 0) for t in seen]
        loss_known, length, slopes = _step(known, factor)
        loss, norm = torch.where(ok, loss_known, loss), torch.where(ok, length, norm)
    moved = _moved(known_state, slopes, lr, decay, forget, length, max_norm)
    state = [
        torch.where(_each(ok, old), new.to(old.dtype), old)
        for new, old in zip(moved, [*memory, *momentum], strict=True)
    ]
    return (*state, loss, norm, ok)


def in_place(*args: Any) -> _Update:
    """One step, written over the memory and the momentum."""
    *given, skipped = args
    with without_autocast(given[0]):
        *state, loss, norm, ok = _eager(given, False)
    for target, new in zip(given[2:10], state, strict=True):
        target.copy_(new)
    if skipped is not None:
        skipped.add_(~ok)
    return loss, norm, ok


def manual(*args: Any) -> _Update:
    """The closed form of the backward recomputes what it needs from the arguments: nothing else is kept."""
    with without_autocast(args[0]):
        return _ClosedForm.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


# The step --------------------------------------------------------------------------------------------------


def _step(seen: Sequence[Any], factor: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss, the gradient's norm and the gradient of each group."""
    rows = _rows(*seen)
    loss = factor * (rows.dy * rows.e).sum((1, 2))
    slopes = _gradient(seen[0], rows, factor)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in slopes], 1), dim=1)
    return loss, norm, slopes


def _rows(
    k: Tensor, v: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, row_weight: Tensor | None
) -> _Rows:
    """Row-wise values; z and h in the dtype of products, the rest wide."""
    dtype, wide = _dtypes(k, w1)
    k, w1, b1, w2, b2 = (t.to(dtype) for t in (k, w1, b1, w2, b2))
    z = torch.baddbmm(b1[:, None], k, w1.mT)
    h = torch.nn.functional.silu(z)
    e = torch.baddbmm(b2[:, None], h, w2.mT).to(wide) - v.to(wide)
    dy = e if row_weight is None else e * row_weight.to(wide)[..., None]
    dh = torch.bmm(dy.to(dtype), w2).to(wide)
    return _Rows(z, h, e, dy, dh, dh * _slope(z.to(wide)))


def _gradient(k: Tensor, rows: _Rows, factor: float) -> list[Tensor]:
    dtype, wide = rows.h.dtype, rows.e.dtype
    products = (
        torch.bmm(rows.dz.to(dtype).mT, k.to(dtype)).to(wide), rows.dz.sum(1),
        torch.bmm(rows.dy.to(dtype).mT, rows.h).to(wide), rows.dy.sum(1),
    )  # fmt: skip
    return [2 * factor * g for g in products]


def _moved(
    state: Sequence[Tensor],
    slopes: Sequence[Tensor],
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    norm: Tensor,
    max_norm: float | None,
) -> list[Tensor]:
    """The new memory and momentum of groups that are not skipped."""
    wide = norm.dtype
    rate, kept, decay = lr.to(wide) * _scale(norm, max_norm), 1 - forget.to(wide), decay.to(wide)
    momentum = [_each(decay, s) * s - _each(rate, g) * g for s, g in zip(state[4:], slopes, strict=True)]
    memory = [_each(kept, m) * m + s for m, s in zip(state[:4], momentum, strict=True)]
    return [*memory, *momentum]


def _scale(norm: Tensor, max_norm: float | None) -> Tensor:
    """What clipping multiplies the gradient by."""
    return torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)


# The closed form of its derivative -------------------------------------------------------------------------


class _ClosedForm(torch.autograd.Function):
    """The step, with a backward that is written out."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        tensors = [a if isinstance(a, Tensor) else None for a in args]
        ctx.numbers = args[13:15]
        made = _eager(args, wants=False)
        ctx.save_for_backward(*tensors, *made[-2:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made[-1])
        return made

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        *tensors, norm, ok = ctx.saved_tensors
        with without_autocast(tensors[0]):
            grads = _gradients(tensors, norm, ok, ctx.numbers, arriving)
        return tuple(
            grad.to(t.dtype) if t is not None and grad is not None and need else None
            for grad, t, need in zip(grads, tensors, ctx.needs_input_grad, strict=True)
        )


def _gradients(args: Any, norm: Tensor, ok: Tensor, numbers: Any, arriving: Any) -> tuple[Any, ...]:
    """The gradient of every argument. What arrives for a result y is called y_bar."""
    k, v, *memory = args[:6]
    momentum, (lr, decay, forget), row_weight = args[6:10], args[10:13], args[15]
    seen = [k, v, *memory, row_weight]
    (max_norm, reduction), wide = numbers, norm.dtype
    factor = loss_factor(reduction, *v.shape[1:])
    memory_bar = [_wide(t, m, wide) for t, m in zip(arriving[:4], memory, strict=True)]
    total = [_wide(t, s, wide) + m for t, s, m in zip(arriving[4:8], momentum, memory_bar, strict=True)]
    loss_bar, norm_bar = (_wide(t, norm, wide) for t in arriving[8:10])
    rows = _rows(*seen)
    slopes = _gradient(k, rows, factor)
    scale = _scale(norm, max_norm)
    lr, decay, forget = (gate.to(wide) for gate in (lr, decay, forget))
    along = _dot(slopes, total)
    # d scale / d norm, where the clip is active, and the norm's own derivative g / norm, which at 0 is 0.
    bend = 0.0 if max_norm is None else torch.where(scale < 1, lr * scale / (norm + 1e-6) * along, 0)
    pull = torch.where(norm > 0, (bend + norm_bar) / norm, 0)
    push = -lr * scale
    # The cotangent of the gradient before the factor of the loss.
    u = [2 * factor * (_each(push, t) * t + _each(pull, g) * g) for t, g in zip(total, slopes, strict=True)]
    dk, dv, dweight, through = _through_rows(k, memory, row_weight, rows, u, 2 * factor * loss_bar)
    kept = [_each(1 - forget, m) * m for m in memory_bar]
    taken: list[Any] = [dk, dv, *[a + b for a, b in zip(kept, through, strict=True)]]
    taken += [_each(decay, t) * t for t in total]
    taken += [-scale * along, _dot(momentum, total), -_dot(memory, memory_bar)]
    speed_bar = [_wide(t, s, wide) for t, s in zip(arriving[4:8], momentum, strict=True)]
    skipped: list[Any] = [0, 0, *memory_bar, *speed_bar, 0, 0, 0]
    grads = [torch.where(_each(ok, a), a, b) for a, b in zip(taken, skipped, strict=True)]
    dweight = None if dweight is None else torch.where(ok[:, None], dweight, 0)
    return (*grads, None, None, dweight)


def _through_rows(
    k: Tensor,
    memory: Sequence[Tensor],
    row_weight: Tensor | None,
    rows: _Rows,
    u: Sequence[Tensor],
    loss_bar: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """The gradients of k, v, row_weight and of the memory, as far as they go through the step's gradient.

    `u` is the cotangent of the gradient (dW1, db1, dW2, db2), `loss_bar` that of the loss, doubled.
    """
    dtype, wide = _dtypes(k, memory[0])
    z, h, e, dy, dh, dz = rows
    zw = z.to(wide)
    u1, c1, u2, c2 = u
    w1, w2, u1, u2, k = (t.to(dtype) for t in (memory[0], memory[2], u1, u2, k))
    dz_bar = _product(k, u1.mT) + c1[:, None]
    dh_bar = (dz_bar * _slope(zw)).to(dtype)
    dy_bar = _product(h, u2.mT) + c2[:, None] + _product(dh_bar, w2.mT)
    dweight = None
    if row_weight is not None:
        dweight = (dy_bar * e + 0.5 * _each(loss_bar, e) * e * e).sum(2)
        dy_bar = dy_bar * row_weight.to(wide)[..., None]
    e_bar = dy_bar + _each(loss_bar, dy) * dy
    narrow, dy = e_bar.to(dtype), dy.to(dtype)
    h_bar = _product(dy, u2) + _product(narrow, w2)
    z_bar = dz_bar * dh * _bend(zw) + h_bar * _slope(zw)
    z_bar_narrow, dz = z_bar.to(dtype), dz.to(dtype)
    dk = _product(dz, u1) + _product(z_bar_narrow, w1)
    through = [
        _product(z_bar_narrow.mT, k), z_bar.sum(1),
        _product(dy.mT, dh_bar) + _product(narrow.mT, h), e_bar.sum(1),
    ]  # fmt: skip
    return dk, -e_bar, dweight, through


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).to(torch.promote_types(a.dtype, torch.float32))


def _slope(z: Tensor) -> Tensor:
    """The first derivative of silu."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _bend(z: Tensor) -> Tensor:
    """The second derivative of silu."""
    s = torch.sigmoid(z)
    return s * (1 - s) * (2 + z * (1 - 2 * s))


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two memories, for each group."""
    products = [(x * y).flatten(1).sum(1) for x, y in zip(a, b, strict=True)]
    return products[0] + products[1] + products[2] + products[3]


def _wide(arriving: Tensor | None, like: Tensor, wide: torch.dtype) -> Tensor:
    """What arrives for a result, zeros where nothing does."""
    return torch.zeros_like(like, dtype=wide) if arriving is None else arriving.to(wide)


def _dtypes(k: Tensor, w1: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of products, and the one of all else."""
    wide = torch.promote_types(torch.promote_types(k.dtype, w1.dtype), torch.float32)
    return (k.dtype if k.dtype.itemsize == 2 else wide), wide


def _each(number: Tensor, t: Tensor) -> Tensor:
    """A number for each group, to be combined with `t` [G, ...]."""
    return number.view(-1, *[1] * (t.dim() - 1))
