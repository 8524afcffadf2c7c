"""A step of matrices as they come: one call for each shape; what is not contiguous is copied, and back."""

import torch
from torch import Tensor

from bakeoff.ops.muon.op import OP
from bakeoff.ops.muon.settings import Matrices, Settings
from bakeoff.select import TensorList, call

__all__ = ["take_step"]


def take_step(matrices: Matrices, how: Settings, impl: str | None, *, overlapping: bool = False) -> None:
    """Take one step with the candidate selected for each shape, or with `impl`.

    `overlapping` says whether parameters share memory, so that they go one after the other.
    """
    shapes: dict[object, list[int]] = {}
    for i, p in enumerate(matrices.params):
        shapes.setdefault((i, p.shape) if overlapping else p.shape, []).append(i)
    sums = None if how.sums is None else how.sums.new_empty(len(shapes), 4)
    for row, members in enumerate(shapes.values()):
        own = how if sums is None else how._replace(sums=sums[row])
        _take_one(Matrices(*[None if c is None else [c[i] for i in members] for c in matrices]), own, impl)  # type: ignore[arg-type]
    if sums is not None and how.sums is not None:
        how.sums.copy_(sums.sum(0))
    # Autograd must refuse what was saved of old values, and knows nothing of kernels that write by address.
    torch.autograd.graph.increment_version(matrices.params)


def _take_one(matrices: Matrices, how: Settings, impl: str | None) -> None:
    """A step of matrices of one shape."""
    if not matrices.params[0].numel():
        if how.sums is not None:
            how.sums.zero_()
        return
    back: list[tuple[Tensor, Tensor]] = []
    columns: list[TensorList | None] = []
    for name, column in zip(Matrices._fields, matrices, strict=True):
        dense = None if column is None else [t.contiguous() for t in column]
        if column is not None and dense is not None and name != "grads":  # gradients are only read
            back += [(t, d) for t, d in zip(column, dense, strict=True) if t is not d]
        columns.append(None if dense is None else TensorList.of(dense, f"muon_: {name}"))
    call(OP, *columns, *how, impl=impl)
    for target, source in back:
        target.copy_(source)
