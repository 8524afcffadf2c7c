"""Ops: declared once, read by the public call, the contest, the tests, the benchmark and the docs."""

import inspect
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bakeoff.errors import Unsupported
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case, Cost, TensorMeta

__all__ = ["Op"]


@dataclass(frozen=True, eq=False)
class Op:
    """A mathematical function with one definition, its `reference`, and the candidates that compute it.

    `candidates` stand from the simplest to the most complex; the first is the incumbent, plain PyTorch, and
    takes every valid case. ``bakeoff.select.call(op, ...)`` runs one of them.
    """

    name: str
    reference: Callable[..., Any]
    candidates: tuple[Candidate, ...]
    check: Callable[[Case], None]
    """Raises with the fix in the message when the arguments don't make sense."""
    bucket: Callable[[Case], Case]
    """The representative case that a contest runs for this one: row counts rounded, layout made canonical."""
    cost: Callable[[Case], Cost]
    cases: Callable[[], list[Case]]
    """The grid that tests and benchmarks walk over (on "cuda"; tests shrink it)."""
    heuristic: Callable[[Case, str], str]
    """(case, regime) -> candidate name, for a case that no table knows."""
    features: dict[str, int]
    """Per tensor argument: how many trailing dimensions are exact features; the leading ones count rows."""
    batched: frozenset[str]
    """Arguments whose dimension 0 holds independent items (so the float64 reference may run in pieces);
    every output must be batched too."""
    draw: Callable[[str, TensorMeta, torch.Generator], torch.Tensor | None] | None = None
    """An argument's own values (name, meta, generator) where random normal ones make no sense, else None."""
    prepare: Callable[[Callable[..., Any], Sequence[Any]], Callable[[], Any]] | None = None
    """(an implementation, arguments) -> the call to time, for an op whose everyday call differs from the
    functional one that is verified: one that updates in place, say. None: the implementation on the
    arguments."""
    home: str = ""
    """Where another process imports it: ``"module:attribute"``; by default ``bakeoff.ops.<name>.op:OP``."""

    params: tuple[str, ...] = field(init=False)
    """Argument names in the order candidates take them."""
    by_name: dict[str, Candidate] = field(init=False)
    floats: frozenset[str] = field(init=False)
    """The arguments that the definition annotates with float."""

    def __post_init__(self) -> None:
        derived = {
            "home": self.home or f"bakeoff.ops.{self.name}.op:OP",
            "params": tuple(inspect.signature(self.reference).parameters),
            "by_name": {candidate.name: candidate for candidate in self.candidates},
            "floats": _annotated_with_float(self.reference),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the way to fill in a field of a frozen dataclass

    @property
    def incumbent(self) -> Candidate:
        return self.candidates[0]

    def candidate(self, name: str) -> Candidate:
        """The candidate called `name`, or an error that lists the ones there are."""
        if not isinstance(name, str) or name not in self.by_name:
            raise Unsupported(f"{self.name} has no candidate {name!r}; it has {', '.join(self.by_name)}")
        return self.by_name[name]

    def case(self, args: Sequence[Any], name: str = "") -> Case:
        """The case that a call with these arguments makes."""
        values = {
            key: TensorMeta.of(arg) if isinstance(arg, torch.Tensor) else self.scalar(key, arg)
            for key, arg in zip(self.params, args, strict=True)
        }
        device = next((str(arg.device) for arg in args if isinstance(arg, torch.Tensor)), "cpu")
        return Case(values, device, name)

    def scalar(self, name: str, value: Any) -> Any:
        """The `value` of argument `name` as keys hold it: for a float argument 1 becomes 1.0, since the memo
        of decisions takes the two for equal."""
        if type(value) is not int or name not in self.floats:
            return value
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf


def _annotated_with_float(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments annotated with float, or with a union that holds it."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that can't be resolved
        return frozenset()
    return frozenset(name for name, hint in hints.items() if float in (hint, *typing.get_args(hint)))
