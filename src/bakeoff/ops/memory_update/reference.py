"""The definition of memory_update, in plain PyTorch."""

import functools

import torch
from torch import Tensor

__all__ = ["loss_factor", "memory_update", "memory_update_"]


def memory_update(
    k: Tensor,
    v: Tensor,
    memory_w1: Tensor,
    memory_b1: Tensor,
    memory_w2: Tensor,
    memory_b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The new memory and momentum, four tensors each, then loss, norm and ok: `bakeoff.ops.memory_update`."""
    memory, momentum = (
        (memory_w1, memory_b1, memory_w2, memory_b2),
        (momentum_w1, momentum_b1, momentum_w2, momentum_b2),
    )
    wide = functools.reduce(torch.promote_types, (k.dtype, memory_w1.dtype, momentum_w1.dtype), torch.float32)
    rows = [k, v] if row_weight is None else [k, v, row_weight]
    rows, old, speed = ([t.to(wide) for t in some] for some in (rows, memory, momentum))
    lr, decay, forget = (gate.to(wide) for gate in (lr, decay, forget))
    factor = loss_factor(reduction, *v.shape[1:])
    with torch.no_grad():
        raw_loss, slopes = _loss_and_gradient(old, rows, factor)
        raw_norm = _norm(slopes)
        ok = torch.isfinite(raw_norm)
    # Where a group is skipped, its gradients are zeros: 0 * NaN in a backward would be NaN.
    known, known_speed, rows = (
        [torch.where(_each(ok, t), t, 0) for t in some] for some in (old, speed, rows)
    )
    loss, slopes = _loss_and_gradient(known, rows, factor)
    norm = _norm(slopes)
    rate = lr if max_norm is None else lr * (max_norm / (norm + 1e-6)).clamp(max=1)
    new_momentum, new_memory = [], []
    for i, g in enumerate(slopes):
        s_new = _each(decay, g) * known_speed[i] - _each(rate, g) * g
        m_new = (1 - _each(forget, g)) * known[i] + s_new
        taken = _each(ok, g)
        new_momentum.append(torch.where(taken, s_new, speed[i]).to(momentum_w1.dtype))
        new_memory.append(torch.where(taken, m_new, old[i]).to(memory_w1.dtype))
    return (
        *new_memory,
        *new_momentum,
        torch.where(ok, loss, raw_loss),
        torch.where(ok, norm, raw_norm),
        ok,
    )


def memory_update_(
    k: Tensor,
    v: Tensor,
    memory_w1: Tensor,
    memory_b1: Tensor,
    memory_w2: Tensor,
    memory_b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """What the memory, the momentum and `skipped` hold after the step, then loss, norm and ok."""
    *state, loss, norm, ok = memory_update(
        k, v, memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2,
        lr, decay, forget, max_norm, reduction, row_weight,
    )  # fmt: skip
    return (*state, None if skipped is None else skipped + ~ok, loss, norm, ok)


def loss_factor(reduction: str, N: int, Dv: int) -> float:
    """What the sum of squares over rows and features is multiplied by."""
    return 1.0 / max({"mean": N * Dv, "token_sum": N, "sum": 1}[reduction], 1)


def _loss_and_gradient(
    memory: list[Tensor], rows: list[Tensor], factor: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of each group, and its gradient with respect to the memory."""
    w1, b1, w2, b2 = memory
    k, v, *weight = rows
    z = k @ w1.mT + b1[:, None]
    s = torch.sigmoid(z)
    h = z * s
    e = h @ w2.mT + b2[:, None] - v
    weighted = e * weight[0][..., None] if weight else e
    dy = 2 * factor * weighted
    dz = (dy @ w2) * (s * (1 + z * (1 - s)))
    loss = factor * (weighted * e).sum((1, 2))
    return loss, (dz.mT @ k, dz.sum(1), dy.mT @ h, dy.sum(1))


def _norm(gradients: tuple[Tensor, ...]) -> Tensor:
    """The norm over all four, for each group; its derivative at 0 is 0."""
    together = torch.cat([g.flatten(1) for g in gradients], 1)
    norm: Tensor = torch.linalg.vector_norm(together, dim=1)
    return norm


def _each(gate: Tensor, t: Tensor) -> Tensor:
    """A number for each group, to be combined with `t` [G, ...]."""
    return gate.view(-1, *[1] * (t.dim() - 1))
