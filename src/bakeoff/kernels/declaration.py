"""What a kernel op is declared to be, and what follows from it: arguments, results, what is saved."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.plan import Planner
from bakeoff.kernels.variants import Tilings

__all__ = ["Declaration", "constants", "derived", "parameters", "reached", "twice"]

_SCHEMA: dict[Any, str] = {
    float: "float", float | None: "float?", int: "SymInt", int | None: "SymInt?", bool: "bool", str: "str",
    str | None: "str?", torch.dtype: "ScalarType",
}  # fmt: skip
"""Types of arguments as torch.library writes them."""


@dataclass(frozen=True)
class Declaration:
    """The arguments of `bakeoff.kernels.op.kernel_op`, and what they amount to."""

    name: str
    results: Callable[..., Any]
    forward: Planner
    backward: Planner | None
    derivative: Callable[..., Mapping[str, Any]] | None
    names: tuple[str, ...]
    keeps: Callable[..., Sequence[Tensor]] | None
    kept: tuple[str, ...]
    kept_for: tuple[str, ...]
    gradients: Mapping[str, Callable[[Any], Tensor]]
    like: Mapping[str, str]
    shares: Mapping[str, str]
    reuses: Mapping[str, str]
    depends: Mapping[str, Sequence[str]]
    materialize: bool
    views: Mapping[str, Callable[..., Tensor]]
    tilings: Mapping[str, Tilings]

    kinds: dict[str, str] = field(init=False)
    """How each argument is passed: "Tensor", "Tensor?", or a type of torch.library's schemas."""
    differentiable: tuple[str, ...] = field(init=False)
    """The arguments that have gradients."""
    saved: tuple[str, ...] = field(init=False)
    """The arguments, results and kept tensors that the backward asks for."""
    scalars: tuple[str, ...] = field(init=False)
    """The arguments that are no tensors."""
    returned: tuple[str, ...] = field(init=False)
    """The results that kernels fill, then those that are views."""
    asked: dict[str, int] = field(init=False)
    """What `derivative` takes, and the place of each in what it may ask for."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(self.results)
        kinds = {name: _kind(self.name, name, hints.get(name)) for name in parameters(self.results)}
        tensors = [name for name, kind in kinds.items() if kind.startswith("Tensor")]
        asked = parameters(self.backward or self.derivative)
        differentiable = [name for name in tensors if f"d{name}" in asked]
        if self.derivative is not None:  # it returns gradients by name; which, its first call would tell
            differentiable = [*self.gradients]
        self._set("kinds", kinds)
        self._set("differentiable", tuple(differentiable))
        self._set("saved", tuple(name for name in (*tensors, *self.names, *self.kept) if name in asked))
        self._set("scalars", tuple(name for name in kinds if name not in tensors))
        self._set("returned", (*self.names, *self.views))
        given = [*[f"d{name}" for name in self.returned], *self.saved, *self.scalars, "wanted", "op"]
        self._set("asked", {name: given.index(name) for name in parameters(self.derivative)})
        unknown = {*self.kept_for, *self.like, *self.like.values()} - {*differentiable}
        if unknown:
            raise TypeError(f"{self.name}: kept_for and like name {sorted(unknown)}, which have no gradients")
        if self.views and self.materialize:
            raise TypeError(f"{self.name}: no zeros can arrive for views; declare it with materialize=False")
        unsaved = {*self.reuses, *self.reuses.values()} - {*self.saved}
        if unsaved:
            raise TypeError(
                f"{self.name}: reuses names {sorted(unsaved)}, which the backward doesn't ask for"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    @property
    def backward_values(self) -> tuple[str, ...]:
        """What a backward is called with, in order."""
        arriving = [f"d{name}" for name in self.returned]
        filled = [f"d{name}" for name in self.differentiable]
        return (*arriving, *self.saved, *self.scalars, *filled)

    def view(self, name: str, given: Sequence[Any]) -> Tensor:
        """The view that is the result `name`, of the op's arguments."""
        view = self.views[name]
        return view(*[given[self.arguments.index(argument)] for argument in parameters(view)])

    def gradient_like(self, name: str) -> Callable[[Any], Tensor]:
        """What allocates the gradient of an argument, given a tensor of its shape and dtype."""
        return self.gradients.get(name, empty_like)

    def laid_out_like(self, name: str) -> int:
        """The place among `differentiable` of the argument from which a gradient is allocated."""
        return self.differentiable.index(self.like.get(name, name))


def constants(declared: Declaration, made: Sequence[Tensor], needed: Mapping[str, bool]) -> list[Tensor]:
    """The results that depend on no argument that needs a gradient."""
    results = dict(zip(declared.returned, made, strict=False))
    return [
        results[name]
        for name, on in declared.depends.items()
        if name in results and not any(needed[a] for a in on)
    ]


def reached(declared: Declaration, arriving: Sequence[Any], wanted: Sequence[bool]) -> list[bool]:
    """Which of the gradients that are wanted depend on what arrives."""
    if all(dy is not None for dy in arriving):
        return list(wanted)
    used = [name for name, dy in zip(declared.returned, arriving, strict=True) if dy is not None]
    if any(name not in declared.depends for name in used):
        return list(wanted)
    on = {argument for name in used for argument in declared.depends[name]}
    return [want and name in on for name, want in zip(declared.differentiable, wanted, strict=True)]


def derived(
    declared: Declaration,
    op: Callable[..., Any],
    arriving: Sequence[Any],
    saved: Sequence[Any],
    scalars: Sequence[Any],
    wanted: Sequence[str],
) -> Mapping[str, Any]:
    """What the op's `derivative` returns; `op` is how it may call the op itself."""
    assert declared.derivative is not None
    values = (*arriving, *saved, *scalars, wanted, op)
    return declared.derivative(**{name: values[place] for name, place in declared.asked.items()})


def twice(name: str) -> str:
    """What an op says that is asked for a second derivative."""
    op = name.split(".")[0]
    return (
        f"{op}'s kernels can't be differentiated twice; pass impl='eager' or use bakeoff.using({op}='eager')"
    )


def parameters(function: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return () if function is None else tuple(inspect.signature(function).parameters)


def _kind(op: str, name: str, hint: Any) -> str:
    if hint is Tensor:
        return "Tensor"
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and Tensor in typing.get_args(hint):
        return "Tensor?"
    if hint in _SCHEMA:
        return _SCHEMA[hint]
    known = (getattr(kind, "__name__", str(kind)) for kind in _SCHEMA)
    expected = ", ".join(["Tensor", "Tensor | None", *known])
    raise TypeError(f"{op}: argument {name} is declared as {hint}, expected one of {expected}")
