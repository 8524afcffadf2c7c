"""The scale of attention's scores."""

import math
import reprlib

__all__ = ["check_scale"]


def check_scale(op: str, scale: object, said: str = "") -> None:
    """Raises TypeError or ValueError, with the fix, for a scale that makes no sense, which was `said`."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{op}: scale is {said or reprlib.repr(scale)}, expected a number or None")
    if not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale must be above 0 and finite, got {scale}; fold a sign into q")
