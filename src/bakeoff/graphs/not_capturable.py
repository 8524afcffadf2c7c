"""Why a step can't be captured, and the line that is to blame."""

import contextlib
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from bakeoff.errors import BakeoffError

__all__ = ["NotCapturable", "blamed_line"]

_INSIDE = (
    str(Path(torch.__file__).parent),
    f"{Path(__file__).parent}/",
    contextlib.__file__,
    warnings.__file__,
)


class NotCapturable(BakeoffError, RuntimeError):
    """The step can't become a CUDA graph.

    Attributes:
        reason: what is in the way and how to remove it.
        op: the first operation in the way (``aten::item``), or "".
        where: ``file:line: source`` of the call that led to it, or "".
        ran: whether the step was made all the same, uncaptured. If not, the step changed nothing on the
            device; clear the gradients before making it again.
        result: what the step returned, where it ran.
    """

    def __init__(
        self, reason: str, *, op: str = "", where: str = "", ran: bool = False, result: Any = None
    ) -> None:
        blamed = f" [{op} at {where}]" if op and where else f" [{op or where}]" if op or where else ""
        super().__init__(reason + blamed)
        self.reason, self.op, self.where, self.ran, self.result = reason, op, where, ran, result


def blamed_line(stack: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""
