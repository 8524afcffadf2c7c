"""What went wrong with a candidate, as one line for its verdict."""

import torch

from bakeoff.errors import ContestError
from bakeoff.select.contests.copies import Rejected

__all__ = ["DeviceLost", "printable", "reason"]


class DeviceLost(ContestError):
    """A candidate broke the CUDA context; nothing more can run in this process."""

    def __init__(self, candidate: str, reason: str) -> None:
        super().__init__(f"{candidate}: {reason}")
        self.candidate, self.reason = candidate, reason


def reason(candidate: str, error: Exception) -> str:
    """Why `candidate` (its name, with its variant where it is one) is out.

    Raises:
        DeviceLost: the error is one that ends the CUDA context.
    """
    if isinstance(error, Rejected):
        return str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "CUDA out of memory"
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"(its text can't be had: {type(unprintable).__name__})"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # a heading says nothing alone
    said = f"{type(error).__name__}: {first[:300]}"
    if "CUDA error" in first or "CUDA driver error" in first:
        raise DeviceLost(candidate, said) from error
    return said


def printable(text: str) -> str:
    """`text` as one line that is safe to print and to keep in a table."""
    return "".join(c if c.isprintable() else " " for c in text)
