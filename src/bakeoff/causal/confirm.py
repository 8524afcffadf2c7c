"""A second look at an alarm, in float64, where a leak stays and rounding goes.

A transform over time rounds all positions by the largest of them, which noise in the parameters can't tell:
where activations differ in size, an edit of the large ones moves the small ones by rounding alone. Only
float32 (or float64) is ever rounded so; what is rounded to 16 bits is rounded place by place.
"""

from collections.abc import Callable

import torch

from bakeoff.causal.copies import device_of
from bakeoff.causal.subject import Subject
from bakeoff.select.explain import choices
from bakeoff.select.policy import using

__all__ = ["confirmed"]

_FINEST = 2.0**-20  # steps above it are not float32's
_STAYS = 0.01  # part of a change that stays in float64 only if it is a leak: rounding shrinks by 2^29
_MOST = 64  # tolerances that rounding can exceed: strongly perturbed models reach 5


def confirmed(subject: Subject, size: float, tolerance: float, look: Callable[[Subject], float]) -> str | None:
    """What to add to the report of an alarm, a change of `size`; None where the alarm is false.

    ``look(subject)`` gives the change again. False alarms are those of float32 that float64 doesn't see, with
    the same candidates of every op or, where these take no float64, with others that move as much in float32.
    """
    if subject.step > _FINEST:
        return ""
    ran = choices(lambda: look(subject))[1]
    try:
        exact = subject.exact()
        with torch.autocast(device_of(subject.model).type, enabled=False):
            stays, instead = choices(lambda: look(exact))
    except Exception as error:  # whatever a model raises in another dtype
        return f"; its float64 copy, to tell a leak from rounding, fails: {type(error).__name__}: {error}"
    if stays > _STAYS * size:
        return ""
    note = f"; its float64 copy changes by {stays:.3g}, so this is float32's own"
    if size > _MOST * tolerance:
        return note
    if instead == ran or _moves(subject, dict(instead), look) > size / 4:
        return None
    kernels = ", ".join(f"{op} by {candidate}" for op, candidate in sorted(ran - instead))
    return f"{note}: it ran {kernels}, which the copy can't; `bakeoff.using` forces another candidate"


def _moves(subject: Subject, candidates: dict[str, str], look: Callable[[Subject], float]) -> float:
    """The change with these candidates; 0 where they can't run."""
    try:
        with using(**candidates):  # type: ignore[arg-type]
            return look(subject)
    except Exception:
        return 0.0
