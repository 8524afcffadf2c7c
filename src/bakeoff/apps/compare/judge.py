"""Whether two models differ by more than their seeds do: Welch's t-test (Welch 1947)."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

__all__ = ["CONFIDENCE", "Verdict", "t_quantile", "winner"]

CONFIDENCE = 0.95
_PARTS = 50_000
_MANY = 10_000.0
"""Degrees of freedom from which on the normal distribution is as good."""


class Verdict(msgspec.Struct, frozen=True):
    """What the scores of two models say; lower scores are better.

    `difference` is the mean of the first's less that of the second's, and lies within `half_width` of the
    true one with the confidence asked for, 95 %; None where too few seeds were run.
    """

    winner: Literal["first", "second"] | None
    difference: float | None
    half_width: float | None
    text: str


def winner(
    first: Sequence[float | None], second: Sequence[float | None], confidence: float = CONFIDENCE
) -> Verdict:
    """Which model has the lower scores (bits per byte, one a seed), outside seed noise.

    None stands for a run that ended without a finite score. With fewer than two seeds a model, or with such
    a run, there is no winner.
    """
    ours = [score for score in first if score is not None and math.isfinite(score)]
    theirs = [score for score in second if score is not None and math.isfinite(score)]
    lost = len(first) + len(second) - len(ours) - len(theirs)
    if lost:
        return Verdict(None, None, None, f"no winner: {lost} runs ended without a finite score")
    if not ours or not theirs:
        return Verdict(None, None, None, "no winner: a model has no runs")
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    shown = f"first - second = {difference:+.4f}"
    if min(len(ours), len(theirs)) < 2:
        text = (
            f"no winner: one seed does not show seed noise ({shown} bits/byte); "
            "use --seeds 2 or more (3 are advised)"
        )
        return Verdict(None, difference, None, text)
    half = _half_width(ours, theirs, confidence)
    shown += f" +- {half:.4f} bits/byte"
    if abs(difference) <= half:
        return Verdict(None, difference, half, f"no difference outside seed noise ({shown})")
    better: Literal["first", "second"] = "first" if difference < 0 else "second"
    return Verdict(better, difference, half, f"the {better} has fewer bits per byte ({shown})")


def _half_width(first: Sequence[float], second: Sequence[float], confidence: float) -> float:
    """Of the confidence interval of the difference of means; variances may differ (Satterthwaite 1946)."""
    a = statistics.variance(first) / len(first)
    b = statistics.variance(second) / len(second)
    if a + b == 0.0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return t_quantile(freedom, confidence) * math.sqrt(a + b)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = `confidence`, T of Student's distribution with `freedom` >= 1 degrees.

    With T = sqrt(freedom) * tan(a), a has a density proportional to cos(a)^(freedom - 1), which is summed up.

    >>> round(t_quantile(4), 3)
    2.776
    """
    freedom = min(freedom, _MANY)
    width = math.pi / 2 / _PARTS
    ends = (np.arange(_PARTS) + 1) * width
    mass = np.cumsum(np.cos(ends - width / 2) ** (freedom - 1))
    angle = float(np.interp(confidence, mass / mass[-1], ends))
    return math.sqrt(freedom) * math.tan(angle)
