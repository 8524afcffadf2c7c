"""What a call gives: its outputs and the gradients of its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["gradients", "named_outputs", "outputs_of", "results", "wants_grad"]


def outputs_of(call: Callable[..., Any], args: list[Any]) -> list[torch.Tensor]:
    """What `call` returns, as a list; nothing for an op that only writes."""
    result = call(*args)
    if result is None:
        return []
    return list(result) if isinstance(result, tuple | list) else [result]


def results(
    outputs: list[torch.Tensor], args: list[Any], cotangents: list[torch.Tensor], names: list[str]
) -> dict[str, torch.Tensor]:
    """`outputs` and the gradients of the arguments called `names`, by what they are called in messages; those
    that do not exist are left out."""
    found = zip(names, gradients(outputs, args, cotangents), strict=True)
    slopes = {f"gradient of {name}": slope for name, slope in found if slope is not None}
    return named_outputs(outputs) | slopes


def named_outputs(outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`outputs` by what they are called in messages."""
    return {"output" if len(outputs) == 1 else f"output {i}": out.detach() for i, out in enumerate(outputs)}


def gradients(
    outputs: Sequence[torch.Tensor],
    args: Sequence[Any],
    cotangents: Sequence[torch.Tensor],
    *,
    keep: bool = False,
) -> list[torch.Tensor | None]:
    """The gradient of each argument that wants one; None where there is none. `keep` what backward needs, so
    that it may run again."""
    wanted = [a for a in args if wants_grad(a)]
    pairs = [(out, dy) for out, dy in zip(outputs, cotangents, strict=True) if out.requires_grad]
    if not wanted or not pairs:
        return [None] * len(wanted)
    roots, dys = zip(*pairs, strict=True)
    return list(torch.autograd.grad(roots, wanted, dys, allow_unused=True, retain_graph=keep))


def wants_grad(arg: Any) -> bool:
    """Whether an argument is a tensor whose gradient is asked for."""
    return isinstance(arg, torch.Tensor) and arg.requires_grad
