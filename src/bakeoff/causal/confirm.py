"""A second look at an alarm, in float64, where a leak stays and rounding goes.

A transform over time rounds all positions by the largest of them, which noise in the parameters can't tell:
where activations differ in size, an edit of the large ones moves the small ones by rounding alone. Only
float32 (or float64) is ever rounded so; what is rounded to 16 bits is rounded place by place.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bakeoff.causal.answers import Called
from bakeoff.causal.subject import Call, Computed, Subject
from bakeoff.select import find_op
from bakeoff.select.choose.explain import choices
from bakeoff.select.choose.policy import using

__all__ = ["FINEST", "computes_in_float64", "confirmed", "exactly"]

FINEST = 2.0**-20  # steps above it are not float32's
_STAYS = 0.01  # part of a change that stays in float64 only if it is a leak: rounding shrinks by 2^29
_LOOSE = 2**12  # tolerances that another kernel's precision can exceed: tf32's step is 2^13 of float32's
_MOST = 64  # tolerances that rounding can exceed: strongly perturbed models reach 5

Look = Callable[[Subject], tuple[float, float]]


def confirmed(subject: Subject, ratio: float, look: Look, *, same_shape: bool = True) -> str | None:
    """What to add to the report of an alarm, a change `ratio` times what rounding explains; None where the
    alarm is false.

    ``look(subject)`` gives the change again: its ratio and its size. False alarms are those of float32 that a
    float64 copy on plain PyTorch doesn't see, while plain PyTorch does in float32: what goes with a kernel is
    the kernel's leak. Where the shapes compared differ, so do the kernels and their precision: then all that
    float64 denies is a false alarm, of any type.
    """
    if subject.step > FINEST and same_shape:
        return ""
    if isinstance(subject.model, Called):  # which has no float64 copy
        return None if ratio <= _MOST else ""
    ran = choices(lambda: look(subject))
    try:
        with exactly(subject, ran) as exact:
            stays, size = look(exact)
    except Exception as error:  # noqa: BLE001 (a model may raise anything in another dtype)
        if not same_shape and ratio <= _LOOSE:
            return None
        return f"; its float64 copy, to tell a leak from rounding, fails: {type(error).__name__}: {error}"
    if stays > _STAYS * ratio:
        return ""
    if not same_shape:
        return None
    note = f"; its float64 copy changes by {size:.3g}, so this is float32's own"
    kernels = ran - _plain(ran).items()
    if ratio <= _MOST:
        with using(**_plain(ran)):
            if not kernels or look(subject)[0] > ratio / 4:
                return None
    named = ", ".join(f"{op} by {candidate}" for op, candidate in sorted(kernels))
    return f"{note}: the copy ran plain PyTorch, the model {named}" if kernels else note


def _plain(ran: set[tuple[str, str]]) -> dict[str, Any]:
    """Plain PyTorch for each op of these."""
    return {op: find_op(op).incumbent.name for op, _ in ran}


@contextlib.contextmanager
def exactly(subject: Subject, ran: set[tuple[str, str]]) -> Iterator[Subject]:
    """A float64 copy, and the surrounding in which it computes on plain PyTorch, without autocast."""
    with using(**_plain(ran)), torch.autocast(subject.rows.device.type, enabled=False):
        yield subject.exact()


def computes_in_float64(exact: Subject) -> bool:
    """Whether a float64 copy stays in float64 from its inputs to its outputs."""
    with Computed() as computed:
        exact.logits(exact.rows[:1], Call())
    return not computed.dtypes - {torch.float64, torch.complex128}
