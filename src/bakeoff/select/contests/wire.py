"""What goes over the wire between a process and its worker, and what of it is believed."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
import torch

from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Op

__all__ = [
    "GARBAGE",
    "Answer",
    "Request",
    "answers_in",
    "decode_dtype",
    "encode_dtype",
    "read_request",
    "unlike_asked",
    "written",
]

_LONGEST = 1 << 26  # bytes of an answer


class Request(msgspec.Struct):
    """A contest to hold."""

    op: str
    case: Case
    regimes: tuple[str, ...]
    budget_s: float
    skip: dict[str, str]
    for_the_record: bool
    thorough: bool
    deterministic: bool
    threads: int
    matmul_precision: str
    number: int = 0
    """Of the contests that this worker was asked for."""


class Answer(msgspec.Struct):
    """One line from the worker: a stage that begins, that it is ready to measure, the verdicts, or an error
    that ends the contest."""

    number: int = 0
    """Of the request that it answers."""
    stage: str = ""
    ready: bool = False
    verdicts: list[Verdict] | None = None
    error: str = ""
    lost: str = ""
    """The candidate that broke the device, if one did; the worker ends after saying so."""


GARBAGE = Answer(error="no answer")
"""Stands for a line that is none."""


def answers_in(lines: BinaryIO) -> Iterator[Answer]:
    """The answers in a pipe until it is closed, or until something else is written to it."""
    while line := lines.readline(_LONGEST):
        try:
            yield msgspec.json.decode(line, type=Answer)
        except (msgspec.DecodeError, RecursionError):
            if line.endswith(b"\n") or len(line) == _LONGEST:
                yield GARBAGE
            return  # else a line cut off by the worker's death


def written(request: Request) -> bytes | None:
    """The line of a request; None for one that would not be the same at the other end."""
    line = msgspec.json.encode(request, enc_hook=encode_dtype)
    return line if read_request(line) == request else None


def read_request(line: bytes) -> Request:
    """What `written` has written."""
    return msgspec.json.decode(line, type=Request, dec_hook=decode_dtype)


def unlike_asked(op: Op, request: Request, verdicts: list[Verdict]) -> str:
    """How verdicts differ from those that were asked for, or ""."""
    keys = [key(op, op.bucket(request.case), regime) for regime in request.regimes]
    if [verdict.key for verdict in verdicts] != keys:
        return f"are about {[verdict.key for verdict in verdicts]}, not about {keys}"
    for verdict in verdicts:
        if [trial.candidate for trial in verdict.trials] != [*op.by_name]:
            return f"judge {[trial.candidate for trial in verdict.trials]}, not {[*op.by_name]}"
        if verdict.winner not in verdict.timings:
            return f"let {verdict.winner!r} win, which was not measured"
    return ""


def encode_dtype(value: Any) -> Any:
    """For msgspec: a dtype by its name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(type(value))


def decode_dtype(kind: type, value: Any) -> Any:
    """For msgspec: the dtype of that name."""
    if kind is torch.dtype:
        return getattr(torch, value)
    raise NotImplementedError(kind)
