"""From lists of tensors to the candidate that updates them: the list form of selection."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group, Guard, Hyper
from bakeoff.ops.adamw.op import NORM, OP, Norm, Stacked, norm_case, update_case
from bakeoff.select import Case, Op
from bakeoff.select.choose import hot
from bakeoff.select.choose.dispatch import able, decide

__all__ = ["DTYPES", "guard", "overlap", "update"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What parameters, gradients and moments may be."""


def update(group: Group, how: Hyper, impl: str | None, *, overlapping: bool) -> None:
    """Take one step with the candidate selected for this group, or with `impl`.

    `overlapping` says whether parameters share memory (see `overlap`). The tensors of a list have one
    device and one dtype. Layouts may differ: what doesn't lie as its parameter does is copied, and back;
    where parameters share memory one entry at a time, as each must see what the one before has written.
    """
    if not group.params:
        return
    first = group.params[0]
    known = (
        len(group.params), sum([p.numel() for p in group.params]), first.device,
        first.dtype, group.grads[0].dtype, group.exp_avg[0].dtype,
        None if group.master is None else group.master[0].dtype,
        how.clip_coef is not None or how.grad_scale is not None, how.found_inf is not None, overlapping,
    )  # fmt: skip
    chosen: Stacked = _chosen(OP, known, update_case, impl)
    for part in _entries(group) if overlapping else (group,):
        dense, copies = _densified(part)
        chosen.update(dense, how)
        for target, source in copies:
            target.copy_(source)
    # Kernels that write by address are unknown to autograd, which must refuse what was saved of old values.
    torch.autograd.graph.increment_version(
        group.params if group.master is None else group.params + group.master
    )


def guard(
    grads: list[Tensor],
    max_norm: float | None,
    skip_nonfinite: bool,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    skipped: Tensor | None,
    impl: str | None = None,
) -> Guard:
    """Judge the gradients of one device by their global norm, which is in the result.

    Args:
        max_norm: the norm that clip_coef brings larger gradients down to; None: clip_coef is 1.
        skip_nonfinite: whether a norm that is not finite sets found_inf.
        found_inf, grad_scale: as GradScaler sets them: merged into the result, and divided out of the norm.
        skipped: int64 scalar, advanced by one where found_inf is set.
        impl: the candidate to run; by default the selected one.
    """
    dtype = functools.reduce(torch.promote_types, {g.dtype for g in grads})
    known = (len(grads), sum([g.numel() for g in grads]), grads[0].device, dtype)
    chosen: Norm = _chosen(NORM, known, norm_case, impl)
    dense = [g if g.is_contiguous() or _is_dense(g) else g.contiguous() for g in grads]
    judged: Guard = chosen.guard(dense, max_norm, skip_nonfinite, found_inf, grad_scale, skipped)
    return judged


def _chosen(op: Op, known: tuple[Any, ...], make: Callable[..., Case], impl: str | None) -> Any:
    """The candidate for a group, as for any call; what is `known` of the group stands for its fingerprint."""
    if impl is not None:
        return able(op, make(*known), impl).implementation
    fingerprint: tuple[Any, ...] = (op, torch._C._get_deterministic_algorithms(), *known)
    if known[2].type == "cuda" and hot.capturing():
        fingerprint = hot.under_capture(fingerprint)
    chosen = hot.current().get(fingerprint)
    return decide(op, make(*known), fingerprint) if chosen is None else chosen


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
    earlier = [group.steps[0].clone() for _ in range(count - len(group.steps))]
    for i, step in enumerate(earlier + group.steps):
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
    if all(t.is_contiguous() for column in columns for t in column):
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
    return _Copies(Group(fresh[0], fresh[1], fresh[2], fresh[3], group.steps, master), back)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
