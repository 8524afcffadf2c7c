"""Copies of a call's arguments in hostile memory, for a candidate to be run on."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bakeoff.select.contests.lists import fenced_list, rows_of, same_memory
from bakeoff.select.contests.poison import fenced, fresh_version, unchanged, written_inside
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op

__all__ = ["Copies", "Rejected", "as_tensor", "tensors_in"]


class Rejected(Exception):
    """Why a candidate is out, in one line."""


class Copies:
    """Copies of arguments, between fences; `args` are what the candidate gets.

    So is each tensor of a list. What the op's `mutates` names may change, within its own elements; everything
    else must stay as it is.
    """

    def __init__(self, op: Op, originals: Sequence[Any], shift: int = 0) -> None:
        """`shift`: how many elements tensors lie away from aligned memory; those of lists never do."""
        self.op, self.originals = op, originals
        self.args: list[Any] = []
        self._memory: dict[str, Tensor] = {}
        self._before: dict[str, tuple[list[Tensor], list[int]]] = {}
        for name, original in zip(op.params, originals, strict=True):
            if isinstance(original, TensorList):
                copies, self._memory[name] = fenced_list(original)
                self.args.append(TensorList.of(copies, name))
                self._before[name] = copies, [t.data_ptr() for t in copies]
            elif isinstance(original, Tensor):
                self.args.append(fenced(original, shift))
            else:
                self.args.append(original)

    def check(self, where: str) -> None:
        """Raises `Rejected` where something was written that the op doesn't write."""
        for name, copy, original in zip(self.op.params, self.args, self.originals, strict=True):
            if isinstance(original, TensorList):
                self._check_list(name, copy, original, where)
            elif isinstance(original, Tensor):
                mutated = name in self.op.mutates
                if not (written_inside if mutated else unchanged)(copy, original):
                    raise Rejected(_written(name, mutated, where))
                if not mutated and copy._version != fresh_version():
                    raise Rejected(
                        f"bumps the version of its input {name}: no backward can use it then ({where})"
                    )

    def _check_list(self, name: str, copy: list[Any], original: TensorList, where: str) -> None:
        (before, addresses), mutated = self._before[name], name in self.op.mutates
        for i, tensor in enumerate(before):
            if len(copy) != len(before) or copy[i] is not tensor:
                raise Rejected(f"replaces tensors in the list {name} ({where})")
            moved = tensor.data_ptr() != addresses[i]
            if moved or tensor.dtype != original.meta.dtype or tensor.shape != original[i].shape:
                raise Rejected(f"gives {name}[{i}] other memory or another dtype or shape ({where})")
        if not same_memory(self._memory[name], before if mutated else original):
            raise Rejected(_written(name, mutated, where))

    def new_values(self) -> dict[str, Tensor]:
        """What the arguments in `mutates` now hold or stand for, each in one tensor, by its name in
        messages."""
        named = dict(zip(self.op.params, self.args, strict=True))
        values = {}
        for name, original in zip(self.op.params, self.originals, strict=True):
            if name in self.op.mutates and original is not None:
                stands_for = self.op.stands_for.get(name)
                value = stands_for(named) if stands_for else named[name]
                values[f"new {name}"] = as_tensor(value, original)
        return values


def _written(name: str, mutated: bool, where: str) -> str:
    return f"writes outside of {name} ({where})" if mutated else f"modifies its input {name} ({where})"


def as_tensor(value: Any, original: Any) -> Tensor:
    """`value`, a tensor or a list, in a tensor of its own; a list may be a part of one like `original`."""
    return value.detach().clone() if isinstance(value, Tensor) else rows_of(value, original.meta)


def tensors_in(args: Sequence[Any]) -> list[Tensor]:
    """All tensors among arguments, those in lists too."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, TensorList):
            found += arg
    return found
