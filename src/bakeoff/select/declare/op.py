"""Ops: declared once, read by the public call, the contest, the tests, the benchmark and the docs."""

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bakeoff.errors import Unsupported
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case, Cost, TensorMeta
from bakeoff.select.declare.lists import TensorList, as_list, is_list

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
    draw_among: Callable[[str, Case, torch.Generator], torch.Tensor | None] | None = None
    """The same for values that depend on the rest of the case, as classes do on how many there are."""
    settings: frozenset[str] = frozenset()
    """Numbers that no choice depends on, such as a learning rate that changes at every step. All that are
    above 0 and finite are one kind of call, of which `check` sees the first alone."""
    averages: bool = False
    """Whether its results are averages of many rows of its arguments, as those of attention are. A row of
    such a result may cancel to nothing while its rounding errors are as large as those of other rows: they
    are measured against the whole tensor where the row is smaller. Inputs chosen to break kernels stay where
    a softmax of their products means something."""
    mutates: tuple[str, ...] = ()
    """The arguments that an in-place op writes. Its reference writes nothing: it returns what each of them
    holds after the call (None for one that is None), in this order, and then what the op returns."""
    stands_for: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """For an argument of `mutates` whose bits mean little by themselves, a number split over two tensors say:
    what it stands for, given all arguments by name. That is what the reference returns for it, and what is
    compared."""
    rounded: frozenset[str] = frozenset()
    """Arguments that eager rounds to 16 bits before it computes, though they may be float32: draws that
    differ in the last bits of float32 alone would all round alike."""
    home: str = ""
    """Where another process imports it: ``"module:attribute"``; by default ``bakeoff.ops.<name>.op:OP``."""

    params: tuple[str, ...] = field(init=False)
    """Argument names in the order candidates take them."""
    by_name: dict[str, Candidate] = field(init=False)
    floats: frozenset[str] = field(init=False)
    """The arguments that the definition annotates with float."""
    lists: frozenset[str] = field(init=False)
    """The arguments that the definition annotates with list: lists of tensors."""

    def __post_init__(self) -> None:
        derived = {
            "home": self.home or f"bakeoff.ops.{self.name}.op:OP",
            "params": tuple(inspect.signature(self.reference).parameters),
            "by_name": {candidate.name: candidate for candidate in self.candidates},
            "floats": _annotated_with(self.reference, float),
            "lists": _annotated_with(self.reference, list),
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
        args = self.with_lists(args)
        values = {key: self._described(key, arg) for key, arg in zip(self.params, args, strict=True)}
        placed = (arg for arg in args if isinstance(arg, torch.Tensor | TensorList))
        device = next((str(arg.device) for arg in placed), "cpu")
        return Case(values, device, name)

    def _described(self, name: str, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return TensorMeta.of(arg)
        if isinstance(arg, TensorList):
            return arg.meta
        return self.scalar(name, arg)

    def with_lists(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with each list as a `TensorList`, which is what implementations get."""
        if not self.lists:
            return args
        return [
            as_list(arg, f"{self.name}: {name}") if name in self.lists and is_list(arg) else arg
            for name, arg in zip(self.params, args, strict=True)
        ]

    def scalar(self, name: str, value: Any) -> Any:
        """The `value` of argument `name` as keys hold it: for a float argument 1 becomes 1.0, since the memo
        of decisions takes the two for equal."""
        if type(value) is not int or name not in self.floats:
            return value
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf


def _annotated_with(function: Callable[..., Any], kind: type) -> frozenset[str]:
    """The arguments annotated with `kind`, with or without parameters, or with a union that holds it."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that can't be resolved
        return frozenset()
    held = {name: (hint, typing.get_origin(hint), *typing.get_args(hint)) for name, hint in hints.items()}
    return frozenset(
        name
        for name, parts in held.items()
        if name != "return" and any(kind in (part, typing.get_origin(part)) for part in parts)
    )
