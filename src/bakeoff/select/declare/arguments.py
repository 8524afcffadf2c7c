"""What an op's arguments must be, declared: shapes by letters, dtypes, numbers, flags, choices.

::

    check = Arguments("long_conv", {
        "u": Tensor("B T C", hint="one sequence is u[None]"),
        "h": Tensor("C L+"),
        "gate": Tensor("as u", optional=True),
        "causal": Flag(),
    })

A letter has one size in all shapes of a call, ``+`` after it asks for at least one element, ``...`` stands
for any leading dimensions, a number for itself, and ``as u`` for u's whole shape. Arguments are checked in
the order of their declaration. What rules can't say is left to `Op.check`.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.lists import ListMeta

__all__ = [
    "ANY_FLOATING",
    "BYTES",
    "COMPLEX",
    "FLOATING",
    "INTEGER",
    "REAL",
    "Arguments",
    "Choice",
    "Dtypes",
    "Flag",
    "Number",
    "Rule",
    "Tensor",
    "Tensors",
    "refuse_flag",
]


@dataclass(frozen=True)
class Dtypes:
    """Some dtypes, and what a caller does who has another one; ``{name}`` in the text is the argument's."""

    allow: Callable[[torch.dtype], bool]
    advice: str


FLOATING = Dtypes(
    lambda dtype: dtype.is_floating_point and dtype.itemsize >= 2,
    "convert it to a floating point dtype of at least 16 bits",
)
ANY_FLOATING = Dtypes(lambda dtype: dtype.is_floating_point, "convert it to a floating point dtype")
BYTES = Dtypes(lambda dtype: dtype == torch.uint8, "expected bytes: pass {name}.to(torch.uint8)")
INTEGER = Dtypes(lambda dtype: dtype in (torch.int32, torch.int64), "expected int32 or int64")
REAL = Dtypes(lambda dtype: dtype in (torch.float32, torch.float64), "expected float32: {name}.float()")
COMPLEX = Dtypes(
    lambda dtype: dtype in (torch.complex64, torch.complex128),
    "expected complex64; reals [..., 2] become complex by torch.view_as_complex({name})",
)


Sizes = dict[str, tuple[int, str]]
"""What letters mean in a call so far, and by which argument."""


class Rule:
    """What one argument must be."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        """Raises TypeError or ValueError, with the fix."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tensor(Rule):
    """A tensor."""

    shape: str
    dtypes: Dtypes = FLOATING
    optional: bool = False
    """Whether it may be None."""
    dtype_of: str = ""
    """An earlier argument that has the same dtype."""
    hint: str = ""
    """What a caller does whose shape is another."""
    hint_kind: str = ""
    """What a caller does who passes no tensor."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        value = case.args[name]
        if value is None and self.optional:
            return
        if not isinstance(value, TensorMeta):
            kind = f"; {self.hint_kind}" if self.hint_kind else ""
            raise TypeError(f"{op}: {name} must be a tensor, got {reprlib.repr(value)}{kind}")
        if not self.dtypes.allow(value.dtype):
            raise TypeError(f"{op}: {name} is {value.dtype}; {self.dtypes.advice.format(name=name)}")
        other = case.args.get(self.dtype_of)
        if isinstance(other, TensorMeta) and value.dtype != other.dtype:
            raise TypeError(
                f"{op}: {name} is {value.dtype} and {self.dtype_of} {other.dtype}: cast one of them"
            )
        expected = self._mismatch(name, value.shape, case, sizes)
        if expected:
            fix = f"; {self.hint}" if self.hint else ""
            raise ValueError(f"{op}: {name} has shape {value.shape}, expected {expected}{fix}")

    def _mismatch(self, name: str, shape: tuple[int, ...], case: Case, sizes: Sizes) -> str:
        """What the shape should be where it isn't; else "", and letters that it explains are in `sizes`."""
        if self.shape.startswith("as "):
            model = self.shape.removeprefix("as ")
            other = case.args[model]
            assert isinstance(other, TensorMeta)
            return "" if shape == other.shape else f"{model}'s, {other.shape}"
        words = self.shape.split()
        tail = words[1:] if words[:1] == ["..."] else words
        letters = [word.rstrip("+") for word in tail]
        own = shape[len(shape) - len(tail) :] if words != tail else shape
        fits = len(own) == len(tail) and all(
            size == (int(letter) if letter.isdigit() else sizes.get(letter, (size, name))[0])
            and not (word.endswith("+") and size < 1)
            for word, letter, size in zip(tail, letters, own, strict=True)
        )
        if fits:
            for letter, size in zip(letters, own, strict=True):
                sizes.setdefault(letter, (size, name))
            return ""
        known = [
            f"{letter} = {sizes[letter][0]} as of {sizes[letter][1]}"
            for letter in dict.fromkeys(letters)
            if letter in sizes and not letter.isdigit()
        ]
        least = [f"{letter} >= 1" for word, letter in zip(tail, letters, strict=True) if word != letter]
        described = f"[{', '.join([*(['...'] if words != tail else []), *letters])}]"
        return described + (f" with {', '.join([*known, *least])}" if known or least else "")


@dataclass(frozen=True)
class Tensors(Rule):
    """A list of tensors of one dtype."""

    dtypes: Dtypes = FLOATING
    like: str = ""
    """An earlier list that has as many tensors of the same sizes."""
    optional: bool = False
    """Whether it may be None."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        value = case.args[name]
        if value is None and self.optional:
            return
        if not isinstance(value, ListMeta):
            raise TypeError(f"{op}: {name} must be a list of tensors, got {case.said(name)}")
        other = case.args.get(self.like)
        if isinstance(other, ListMeta) and value.count != other.count:
            raise ValueError(
                f"{op}: {value.count} tensors in {name}, expected one for each of {other.count} in "
                f"{self.like}"
            )
        if not self.dtypes.allow(value.dtype):
            raise TypeError(f"{op}: {name} are {value.dtype}; {self.dtypes.advice.format(name=name)}")
        if isinstance(other, ListMeta) and value.numel != other.numel:
            raise ValueError(
                f"{op}: {name} have {value.numel} elements together and {self.like} {other.numel}; each "
                f"tensor must have the shape of the one in {self.like} that it belongs to"
            )


def refuse_flag(op: str, name: str, value: object) -> None:
    """Raises TypeError for True or False in place of a number, which they are in Python, not in kernels."""
    if isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value}, expected a number")


@dataclass(frozen=True)
class Number(Rule):
    """A finite number, of at least `least` and below `below`."""

    least: float = -math.inf
    below: float = math.inf
    optional: bool = False
    """Whether it may be None."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        value = case.args[name]
        if value is None and self.optional:
            return
        refuse_flag(op, name, value)
        if not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ValueError(f"{op}: {name} must be a finite number, got {case.said(name)}")
        if value < self.least:
            raise ValueError(f"{op}: {name} must be >= {self.least:g}, got {value}")
        if value >= self.below:
            raise ValueError(f"{op}: {name} must be below {self.below:g}, got {value}")


@dataclass(frozen=True)
class Flag(Rule):
    """True or False."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        if not isinstance(case.args[name], bool):
            raise TypeError(f"{op}: {name} is {case.said(name)}, expected True or False")


@dataclass(frozen=True)
class Choice(Rule):
    """One of some words."""

    words: tuple[str, ...]
    optional: bool = False
    """Whether it may be None."""

    def check(self, op: str, name: str, case: Case, sizes: Sizes) -> None:
        if case.args[name] is None and self.optional:
            return
        if case.args[name] not in self.words:
            raise ValueError(f"{op}: {name} is {case.said(name)}, expected one of {', '.join(self.words)}")


class Arguments:
    """The rules of an op's arguments, as `Op.check`.

    Raises TypeError or ValueError, with the fix, for the first argument that breaks its rule, then whatever
    `relations` raises.
    """

    def __init__(
        self, op: str, rules: Mapping[str, Rule], relations: Callable[[Case], None] = lambda case: None
    ) -> None:
        self.op, self.rules, self.relations = op, dict(rules), relations

    def __call__(self, case: Case) -> None:
        sizes: Sizes = {}
        for name, rule in self.rules.items():
            rule.check(self.op, name, case, sizes)
        self.relations(case)
