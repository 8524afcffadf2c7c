"""Calls apart: nothing of one call may show in another.

Models hold many calls at once. A candidate that is right by itself may still put the next result where the
last one lies, or what its backward needs, or remember something by the address of its input.
"""

from collections.abc import Iterable
from typing import Any

import torch

from bakeoff.select.contests.copies import Copies, Rejected, tensors_in
from bakeoff.select.contests.results import outputs_of, results
from bakeoff.select.contests.verify import judged
from bakeoff.select.contests.yardstick import Yardstick
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op

__all__ = ["keep_apart"]


def keep_apart(op: Op, candidate: Candidate, stick: Yardstick) -> None:
    """Raises `Rejected` where two calls of a candidate that is right by itself get into each other's way,
    forward or backward."""
    here, there = Copies(op, stick.args), Copies(op, [_others(a) for a in stick.args])
    first = outputs_of(candidate.implementation, here.args)
    second = outputs_of(candidate.implementation, there.args)
    later = results(second, there.args, stick.cotangents, stick.names)
    earlier = results(first, here.args, stick.cotangents, stick.names)
    given = _storages([*here.args, *there.args, *stick.cotangents])
    for name, tensor in earlier.items():
        if _storages([tensor]) & _storages(later.values()) - given:
            kind = "gradient" if name.startswith("gradient") else "result"
            raise Rejected(f"returns the memory of an earlier {kind} ({stick.where})")
    when = "with another call between its forward and its backward"
    _judge(op, candidate, when, earlier | here.new_values(), stick)
    with torch.no_grad():
        for a, other in zip(stick.args, there.args, strict=True):
            if isinstance(other, TensorList):
                torch._foreach_copy_([t.data for t in other], list(a))
            elif isinstance(other, torch.Tensor) and _writable(other):
                other.data.copy_(a)  # which an optimizer or an exchange of weights may do: no version tells
    outputs = outputs_of(candidate.implementation, there.args)
    again = results(outputs, there.args, stick.cotangents, stick.names) | there.new_values()
    when = "after other values lay where its inputs are (does it remember by address?)"
    _judge(op, candidate, when, again, stick)


def _judge(op: Op, candidate: Candidate, when: str, found: dict[str, torch.Tensor], stick: Yardstick) -> None:
    for name, tensor in found.items():
        try:
            judged(op, candidate, name, tensor, stick)
        except Rejected as error:
            raise Rejected(f"{when}, {error}") from None


def _others(arg: Any) -> Any:
    """Other values in the same layout: a tensor's own one place on, half of those of a list; as they are
    where elements share memory."""
    if isinstance(arg, TensorList):
        return TensorList.of(torch._foreach_mul(arg, 0.5)) if arg.meta.dtype.is_floating_point else arg
    if not isinstance(arg, torch.Tensor) or not _writable(arg):
        return arg
    other = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    other.copy_(arg.detach().reshape(-1).roll(1).view(arg.shape))
    return other.requires_grad_(arg.requires_grad)


def _writable(tensor: torch.Tensor) -> bool:
    return all(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors_in(list(tensors))} - {0}
