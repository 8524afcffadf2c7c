"""The exact results that candidates are judged by: those of the reference in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bakeoff.select.contests.copies import as_tensor
from bakeoff.select.contests.results import outputs_of, results
from bakeoff.select.declare.lists import TensorList
from bakeoff.select.declare.op import Op

__all__ = ["each", "exact_results"]

_PIECE = 1 << 25  # elements of the largest float64 piece


def exact_results(
    op: Op, args: list[Any], cotangents: list[torch.Tensor], names: list[str]
) -> dict[str, torch.Tensor]:
    """The reference in float64, in pieces of dimension 0, or of some tensors of each list, so that any size
    fits: outputs and gradients of batched arguments are joined, gradients of shared arguments summed, both
    exactly in float64."""
    cuts, items = _pieces(op, args)
    batched = [
        name in op.batched and (len(arg) == items if isinstance(arg, TensorList) else _has_rows(arg))
        for name, arg in zip(op.params, args, strict=True)
    ]
    joined: dict[str, list[torch.Tensor]] = {}
    shared: dict[str, torch.Tensor] = {}
    for cut in cuts:
        part = [
            each(_wide, _cut(arg, cut) if flag and cut else arg)
            for arg, flag in zip(args, batched, strict=True)
        ]
        outputs = outputs_of(op.reference, part)
        written = dict(zip(op.mutates, outputs, strict=False))
        outputs = outputs[len(op.mutates) :]
        dys = [(dy[cut] if cut else dy).to(out.dtype) for dy, out in zip(cotangents, outputs, strict=True)]
        for name, tensor in results(outputs, part, dys, names).items():
            argument = name.removeprefix("gradient of ")
            if name.startswith("gradient") and argument not in op.batched:
                shared[name] = shared[name] + tensor if name in shared else tensor
            else:
                joined.setdefault(name, []).append(tensor)
        for name, value in written.items():
            place = op.params.index(name)
            if value is not None and batched[place]:
                joined.setdefault(f"new {name}", []).append(as_tensor(value, args[place]))
            elif value is not None:  # every piece gives the same
                shared[f"new {name}"] = as_tensor(value, args[place])
    whole = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in joined.items()}
    return {name: _floating(tensor) for name, tensor in {**whole, **shared}.items()}


def _pieces(op: Op, args: list[Any]) -> tuple[list[slice] | list[None], int]:
    """Cuts of what is batched into pieces of at most `_PIECE` elements, where it has more; and how many items
    there are to cut."""
    batched = [arg for name, arg in zip(op.params, args, strict=True) if name in op.batched]
    lists = [arg for arg in batched if isinstance(arg, TensorList)]
    if lists:
        sizes: Sequence[int] = max(lists, key=lambda arg: arg.meta.numel).sizes
    else:
        largest = max(filter(_has_rows, batched), key=torch.Tensor.numel, default=torch.empty(1))
        sizes = [largest[:1].numel()] * largest.shape[0]
    if sum(sizes) <= _PIECE or len(sizes) < 2:
        return [None], len(sizes)
    starts, held = [0], 0
    for i, size in enumerate(sizes):
        if held and held + size > _PIECE:
            starts.append(i)
            held = 0
        held += size
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)], len(sizes)


def _cut(arg: Any, piece: slice) -> Any:
    return TensorList.of(arg[piece]) if isinstance(arg, TensorList) else arg[piece]


def _has_rows(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() > 0


def each(change: Callable[[torch.Tensor], torch.Tensor], arg: Any) -> Any:
    """An argument with its tensors changed, whether it is one or a list of them."""
    if isinstance(arg, TensorList):
        return TensorList.of([change(t) for t in arg])
    return change(arg) if isinstance(arg, torch.Tensor) else arg


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    if tensor.dtype.is_complex:
        detached = detached.to(torch.complex128)
    elif tensor.dtype.is_floating_point:
        detached = detached.double()
    return detached.requires_grad_(tensor.requires_grad)


def _floating(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor.double()
