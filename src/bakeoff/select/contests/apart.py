"""Calls apart: nothing of one call may show in another.

Models hold many calls at once. A candidate that is right by itself may still put the next result where the
last one lies, or what its backward needs, or remember something by the address of its input.
"""

from collections.abc import Iterable
from typing import Any

import torch

from bakeoff.select.contests.poison import fenced
from bakeoff.select.contests.verify import Rejected, Yardstick, judge, outputs_of, results
from bakeoff.select.declare.candidate import Candidate

__all__ = ["keep_apart"]


def keep_apart(candidate: Candidate, stick: Yardstick) -> None:
    """Raises `Rejected` where two calls of a candidate that is right by itself get into each other's way,
    forward or backward."""
    here = [fenced(a) if isinstance(a, torch.Tensor) else a for a in stick.args]
    there = [_rolled(a) if isinstance(a, torch.Tensor) else a for a in here]
    first, second = outputs_of(candidate.implementation, here), outputs_of(candidate.implementation, there)
    later = results(second, there, stick.cotangents, stick.names)
    earlier = results(first, here, stick.cotangents, stick.names)
    given = _storages([*here, *there, *stick.cotangents])
    for name, tensor in earlier.items():
        if _storages([tensor]) & _storages(later.values()) - given:
            kind = "gradient" if name.startswith("gradient") else "result"
            raise Rejected(f"returns the memory of an earlier {kind} ({stick.where})")
    _judge("with another call between its forward and its backward", earlier, stick)
    with torch.no_grad():
        for a, other in zip(here, there, strict=True):
            if isinstance(other, torch.Tensor) and _writable(other):
                other.copy_(a)
    again = results(outputs_of(candidate.implementation, there), there, stick.cotangents, stick.names)
    _judge("after other values lay where its inputs are (does it remember by address?)", again, stick)


def _judge(when: str, found: dict[str, torch.Tensor], stick: Yardstick) -> None:
    for name, tensor in found.items():
        try:
            judge(name, tensor, stick)
        except Rejected as error:
            raise Rejected(f"{when}, {error}") from None


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one place on, in memory of their own and the same layout; as they are where elements
    share memory."""
    other = fenced(tensor)
    if _writable(tensor):
        with torch.no_grad():
            other.copy_(tensor.detach().reshape(-1).roll(1).view(tensor.shape))
    return other


def _writable(tensor: torch.Tensor) -> bool:
    return all(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)} - {0}
