"""Calls apart: nothing of one call may show in another.

Models hold many calls at once. A candidate that is right by itself may still put the next result where the
last one lies, or what its backward needs, or remember a result by the address of its input.
"""

from typing import Any

import torch

from bakeoff.select.op import Candidate
from bakeoff.select.poison import fenced
from bakeoff.select.verify import Rejected, Yardstick, judge, outputs_of, results, same_bits

__all__ = ["keep_apart"]


def keep_apart(candidate: Candidate, stick: Yardstick) -> None:
    """Raises `Rejected` where two calls of a candidate that is right by itself get into each other's way."""
    args = [fenced(a) if isinstance(a, torch.Tensor) else a for a in stick.args]
    others = [_rolled(a) if isinstance(a, torch.Tensor) else a for a in args]
    outputs = outputs_of(candidate.call, args)
    between = outputs_of(candidate.call, others)
    if _storages(between) & _storages(outputs) - _storages(args) - _storages(others):
        raise Rejected(f"returns the memory of an earlier result ({stick.where})")
    for name, tensor in results(outputs, args, stick.cotangents, stick.names).items():
        try:
            judge(name, tensor, stick)
        except Rejected as error:
            raise Rejected(f"with another call between its forward and its backward, {error}") from None
    if not candidate.deterministic:
        return
    with torch.no_grad():
        for a, other in zip(args, others, strict=True):
            if isinstance(a, torch.Tensor) and _writable(a):
                a.copy_(other)
    for new, again in zip(between, outputs_of(candidate.call, args), strict=True):
        if not same_bits(new, again):
            raise Rejected(f"remembers a result by the address of its input ({stick.where})")


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


def _storages(tensors: list[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)} - {0}
