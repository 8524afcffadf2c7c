"""A second look at an alarm, in float64, where a leak stays and rounding goes.

A transform over time rounds all positions by the largest of them, which noise in the parameters can't tell:
where activations differ in size, an edit of the large ones moves the small ones by rounding alone. Only
float32 (or float64) is ever rounded so; what is rounded to 16 bits is rounded place by place.
"""

from collections.abc import Callable
from typing import Any

import torch

from bakeoff.causal.copies import device_of
from bakeoff.causal.subject import Subject
from bakeoff.select import find_op
from bakeoff.select.choose.explain import choices
from bakeoff.select.choose.policy import using

__all__ = ["confirmed"]

_FINEST = 2.0**-20  # steps above it are not float32's
_STAYS = 0.01  # part of a change that stays in float64 only if it is a leak: rounding shrinks by 2^29
_MOST = 64  # tolerances that rounding can exceed: strongly perturbed models reach 5


def confirmed(
    subject: Subject, size: float, tolerance: float, look: Callable[[Subject], float]
) -> str | None:
    """What to add to the report of an alarm, a change of `size`; None where the alarm is false.

    ``look(subject)`` gives the change again. False alarms are those of float32 that a float64 copy on plain
    PyTorch doesn't see, while plain PyTorch does in float32: what goes with a kernel is the kernel's leak.
    """
    if subject.step > _FINEST:
        return ""
    ran = choices(lambda: look(subject))
    plain: dict[str, Any] = {op: find_op(op).incumbent.name for op, _ in ran}
    try:
        exact = subject.exact()
        with using(**plain), torch.autocast(device_of(subject.model).type, enabled=False):
            stays = look(exact)
    except Exception as error:  # noqa: BLE001 (a model may raise anything in another dtype)
        return f"; its float64 copy, to tell a leak from rounding, fails: {type(error).__name__}: {error}"
    if stays > _STAYS * size:
        return ""
    note = f"; its float64 copy changes by {stays:.3g}, so this is float32's own"
    kernels = ran - plain.items()
    if size <= _MOST * tolerance:
        with using(**plain):
            if not kernels or look(subject) > size / 4:
                return None
    named = ", ".join(f"{op} by {candidate}" for op, candidate in sorted(kernels))
    return f"{note}: the copy ran plain PyTorch, the model {named}" if kernels else note
