"""Muon's step for matrices, in plain PyTorch: momentum, orthogonalised by Newton-Schulz iterations."""

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Hyper, factor_of, rate_of
from bakeoff.ops.adamw.reference import sums_of

__all__ = ["muon_step", "orthogonalised"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SCALE = 0.2
"""Brings the root mean square of an update's elements to about AdamW's (Liu et al. 2025)."""


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest half-orthogonal matrices, roughly: singular values in about [0.7, 1.2].

    X = M/|M|, then `steps` times X <- a X + (b A + c A^2) X with A = X X', in bfloat16 on CUDA.

    Args:
        matrices: [N, rows, columns], floating.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x: Tensor = wide.to(torch.promote_types(wide.dtype, torch.float32))
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    done: Tensor = x.mT if tall else x
    return done.to(matrices.dtype)


def muon_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum: list[Tensor],
    directions: list[Tensor] | None,
    how: Hyper,
) -> None:
    """One step on every matrix, in place: m = beta1 m + (1 - beta1) g; u = 0.2 sqrt(max(rows, columns)) *
    orthogonalised((1 - beta1) g + beta1 m); p = p (1 - lr weight_decay) - lr u.

    Matrices of one shape go together. Where how.found_inf is not 0 nothing changes. `directions` hold the u
    of the last step, which how.sums need, and take up the new ones.
    """
    rate, factor = rate_of(how), factor_of(how)
    skip = None if how.found_inf is None else how.found_inf != 0
    shapes: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(params):
        shapes.setdefault(p.shape, []).append(i)
    found = []
    for shape, members in shapes.items():
        g = torch.stack([grads[i].to(momentum[i].dtype) for i in members]) * factor
        m = torch.stack([momentum[i] for i in members])
        m = m + (g - m) * (1.0 - how.beta1)
        u = orthogonalised(g + (m - g) * how.beta1) * (_SCALE * max(shape) ** 0.5)
        for k, i in enumerate(members):
            p = params[i]
            if how.sums is not None and directions is not None:
                found.append(sums_of(g[k].float(), directions[i].float(), p.float(), u[k].float()))
            moved = (p.to(u.dtype) * (1.0 - rate * how.weight_decay) - rate * u[k]).to(p.dtype)
            written = [(p, moved), (momentum[i], m[k])]
            if directions is not None:
                written.append((directions[i], u[k].to(directions[i].dtype)))
            for old, now in written:
                old.copy_(now if skip is None else torch.where(skip, old, now))
    if how.sums is not None:
        total = torch.stack(found).sum(0)
        how.sums.copy_(total if skip is None else torch.where(skip, 0.0, total))
