"""The op inside a compiled region: how torch.compile's users meet it, timed and verified in place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bakeoff.select.declare.candidate import Candidate

__all__ = ["in_region"]


def in_region(candidate: Candidate) -> Candidate:
    """`candidate` in a region of torch.compile with pointwise neighbours, so that losing their fusion counts.

    The neighbours multiply by a 1 that the compiler can't see, so that the results stay the candidate's own.
    """
    call = candidate.implementation
    ones: dict[torch.device, torch.Tensor] = {}

    def region(one: torch.Tensor, *args: Any) -> Any:
        outputs = call(*[a * one if _is_floating(a) else a for a in args])
        if outputs is None:
            return None
        several = isinstance(outputs, tuple | list)
        scaled = tuple(
            out * one if _is_floating(out) else out for out in (outputs if several else (outputs,))
        )
        return scaled if several else scaled[0]

    compiled: Callable[..., Any] = torch.compile(region, fullgraph=True)

    def run(*args: Any) -> Any:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
        if device not in ones:
            ones[device] = torch.ones((), device=device)
        return compiled(ones[device], *args)

    return replace(candidate, name="compiled", call=run, load=None, launches=None)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
