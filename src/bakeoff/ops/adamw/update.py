"""A step and a norm of lists as they come: what implementations can't take as it lies is copied or cut up."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group, Guard, Hyper
from bakeoff.ops.adamw.op import NORM, OP
from bakeoff.select import TensorList, call

__all__ = ["guard", "overlap", "take_step"]


def take_step(group: Group, how: Hyper, impl: str | None, *, overlapping: bool) -> None:
    """Take one step with the candidate selected for this group, or with `impl`.

    `overlapping` says whether parameters share memory (see `overlap`). Layouts may differ: what doesn't lie
    as its parameter does is copied, and back; where parameters share memory one entry at a time, as each must
    see what the one before has written.
    """
    entries = list(_entries(group)) if overlapping else [group]
    sums = how.sums.new_empty(len(entries), 4) if overlapping and how.sums is not None else None
    for i, part in enumerate(entries):
        own = how if sums is None else how._replace(sums=sums[i])
        dense, copies = _densified(part)
        call(OP, *dense, *own, impl=impl)
        for target, source in copies:
            target.copy_(source)
    if sums is not None and how.sums is not None:
        how.sums.copy_(sums.sum(0))
    # Autograd must refuse what was saved of old values, and knows nothing of kernels that write by address.
    torch.autograd.graph.increment_version(
        group.params if group.master is None else [*group.params, *group.master]
    )


def guard(
    grads: Sequence[TensorList],
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skipped: Tensor | None = None,
    impl: str | None = None,
) -> Guard:
    """Judge the gradients of one device by their global norm, which is in the result.

    Args:
        grads: a list for each dtype.
        max_norm: the norm that clip_coef brings larger gradients down to; None: clip_coef is 1.
        skip_nonfinite: whether a norm that is not finite sets found_inf.
        found_inf, grad_scale: as GradScaler sets them: merged into the result, and divided out of the norm.
        skipped: int64 scalar, advanced by one where found_inf is set.
        impl: the candidate to run; by default the selected one.
    """
    dense = [_without_gaps(listed) for listed in grads]
    if len(dense) > 1:  # the norm of all is the norm of the norms
        norms = [call(NORM, listed, None, False, None, None, None, impl=impl)[0] for listed in dense]
        widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
        dense = [TensorList.of([norm.to(widest) for norm in norms])]
    return Guard(*call(NORM, dense[0], max_norm, skip_nonfinite, found_inf, grad_scale, skipped, impl=impl))


def _without_gaps(tensors: TensorList) -> TensorList:
    if tensors.meta.contiguous or all(map(_is_dense, tensors)):
        return tensors
    return TensorList.of([t if _is_dense(t) else t.contiguous() for t in tensors])


def overlap(params: list[Tensor]) -> bool:
    """Whether two parameters share memory, so that their updates must run one after the other."""
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent(p)) for p in params if p.numel())
    return any(low < end for (_, end), (low, _) in itertools.pairwise(spans))


def _extent(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _entries(group: Group) -> Iterator[Group]:
    """Every entry as a group of its own; a counter shared by all advances with the last one."""
    count = len(group.params)
    earlier = [group.step[0].clone() for _ in range(count - len(group.step))]
    for i, step in enumerate(earlier + list(group.step)):
        own = slice(i, i + 1)
        master = None if group.master is None else group.master[own]
        yield Group(
            group.params[own], group.grads[own], group.exp_avg[own], group.exp_avg_sq[own], [step], master
        )


class _Copies(NamedTuple):
    group: Group
    back: list[tuple[Tensor, Tensor]]
    """(original, dense copy) of tensors that the update writes."""


def _densified(group: Group) -> _Copies:
    """The group with every entry's tensors dense and in one order, by copies where they are not."""
    columns = [group.params, group.grads, group.exp_avg, group.exp_avg_sq]
    if group.master is not None:
        columns.append(group.master)
    if all(column.__class__ is TensorList and column.meta.contiguous for column in columns):
        return _Copies(group, [])
    fresh = [list(column) for column in columns]
    back = []
    for i, entry in enumerate(zip(*columns, strict=True)):
        model = entry[0] if _is_dense(entry[0]) else torch.empty(entry[0].shape, device="meta")
        for column, tensor in enumerate(entry):
            if tensor.stride() == model.stride():
                continue
            copy = torch.empty_strided(model.shape, model.stride(), dtype=tensor.dtype, device=tensor.device)
            fresh[column][i] = copy.copy_(tensor)
            if column != 1:  # gradients are only read
                back.append((tensor, copy))
    master = fresh[4] if group.master is not None else None
    return _Copies(Group(fresh[0], fresh[1], fresh[2], fresh[3], group.step, master), back)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
