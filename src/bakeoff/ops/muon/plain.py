"""The candidates made of PyTorch's own parts: matrices of one shape as one batch."""

import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import factor_of, rate_of
from bakeoff.ops.adamw.reference import sums_of
from bakeoff.ops.muon.settings import COEFFICIENTS, EPS, Matrices, Settings, arguments, size_of

__all__ = ["compiled", "eager", "iterated", "orthogonalised"]


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest half-orthogonal matrices, roughly: singular values in about [0.7, 1.2].

    X = M/(|M| + 1e-7), then `steps` times X <- a X + (b A + c A^2) X with A = X X', on the smaller side; in
    bfloat16 on CUDA, in float32 elsewhere, in float64 for float64.

    Args:
        matrices: [N, rows, columns], floating.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.
    """
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    x = wide / (wide.norm(dim=(1, 2), keepdim=True) + EPS)
    return iterated(x.bfloat16() if x.dtype == torch.float32 and x.is_cuda else x, steps).to(matrices.dtype)


def iterated(x: Tensor, steps: int) -> Tensor:
    """The iterations, in the dtype of x [N, rows, columns], whose singular values are at most 1."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Numbers(NamedTuple):
    """What a step multiplies by: numbers, or scalars on the device."""

    keep: Any
    """1 - rate * weight decay."""
    rate: Any
    """The rate times the size of an orthogonal matrix."""
    factor: Any
    """What gradients are multiplied by."""


def eager(*args: Any) -> None:
    """The definition, batched."""
    matrices, how = arguments(args)
    _step(*matrices, how, _numbers(matrices, how))


def compiled(*args: Any) -> None:
    """torch.compile of `eager`: one compilation for each number of matrices and shape."""
    matrices, how = arguments(args)
    numbers, device = _numbers(matrices, how), matrices.params[0].device
    # A number would be compiled in.
    numbers = _Numbers(*[n if isinstance(n, Tensor) else torch.full((), n, device=device) for n in numbers])
    kinds = [(column[0].shape, column[0].dtype) for column in matrices if column is not None]
    fixed = how._replace(lr=0.0, clip_coef=None, grad_scale=None, lr_mult=None, found_inf=None, sums=None)
    step = _unit((len(matrices.params), device, *kinds, *fixed, how.found_inf is None))
    lists = [None if column is None else list(column) for column in matrices]
    step(*lists, fixed._replace(found_inf=how.found_inf), numbers)


@lru_cache(maxsize=64)
def _unit(_: tuple[Any, ...]) -> Callable[..., None]:
    """A code object of its own: torch.compile gives up after a few recompilations of one."""
    twin = types.FunctionType(_step.__code__.replace(), _step.__globals__, _step.__name__)
    return torch.compile(twin, fullgraph=True, dynamic=False)


def _numbers(matrices: Matrices, how: Settings) -> _Numbers:
    rate = rate_of(how)
    size = size_of(matrices.params[0].shape, how.scale)
    single = torch.float64 if matrices.momentum[0].dtype == torch.float64 else torch.float32
    found = (1.0 - rate * how.weight_decay, rate * size, factor_of(how))
    return _Numbers(*[n.to(single) if isinstance(n, Tensor) else n for n in found])


def _step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum: list[Tensor],
    direction: list[Tensor] | None,
    how: Settings,
    numbers: _Numbers,
) -> None:
    """One step on every matrix, in place. Where how.found_inf is not 0 nothing changes."""
    wide = torch.promote_types(torch.promote_types(params[0].dtype, momentum[0].dtype), torch.float32)
    skip = None if how.found_inf is None else how.found_inf != 0
    g = torch.stack([g.to(wide) for g in grads]) * numbers.factor
    m = torch.stack([m.to(wide) for m in momentum]) * how.momentum_decay + g
    u = orthogonalised(g + m * how.momentum_decay if how.nesterov else m, how.steps)
    size = size_of(params[0].shape, how.scale)
    if how.sums is not None:
        before = [torch.zeros_like(u[0])] * len(params) if direction is None else direction
        found = [sums_of(g[k], before[k].to(wide), p.to(wide), u[k] * size) for k, p in enumerate(params)]
        total = torch.stack(found).sum(0)
        how.sums.copy_(total if skip is None else torch.where(skip, 0.0, total))
    for k, p in enumerate(params):
        written = [(p, p.to(wide) * numbers.keep - u[k] * numbers.rate), (momentum[k], m[k])]
        if direction is not None:
            written.append((direction[k], u[k] * size))
        for old, now in written:
            old.copy_(now if skip is None else torch.where(skip, old, now.to(old.dtype)))
