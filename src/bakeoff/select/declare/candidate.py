"""Candidates: the implementations of an op."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.select.declare import sources
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.installed import missing

__all__ = ["Candidate", "Implementation"]

Implementation = Callable[..., Any]
"""It takes the op's arguments by position."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op: `call` itself, or `load`, a function that imports and returns it.

    With `load`, declaring an op imports neither triton nor any third party.
    """

    name: str
    call: Implementation | None = None
    _: KW_ONLY
    load: Callable[[], Implementation] | None = None
    supports: Callable[[Case], str | None] = lambda case: None
    """Why this case can't be taken, or None."""
    requires: tuple[str, ...] = ()
    """Importable packages; the candidate is absent, with a reason, while one is missing."""
    has_backward: bool = True
    traceable: bool = True
    """Works inside torch.compile(fullgraph=True)."""
    capturable: bool = True
    """Works inside CUDA graph capture."""
    needs_warmup: bool = False
    """Works there only after a call on the same tensors outside of capture, in the same configuration."""
    deterministic: bool = True
    heeds_determinism: bool = False
    """Repeats itself bit for bit at least where torch.use_deterministic_algorithms is on, as PyTorch's own
    kernels do that look at it."""
    all_compiled: bool = False
    """All its code is torch.compile's and means nothing uncompiled, so that it is verified without poison."""
    baseline: bool = False
    """Measured for the record, never chosen."""
    min_capability: tuple[int, int] = (0, 0)
    """Least CUDA compute capability."""
    launches: Callable[[], int] | None = None
    """A counter that its own kernels advance; a candidate whose counter stands still is rejected."""

    def __post_init__(self) -> None:
        if (self.call is None) == (self.load is None):
            raise TypeError(
                f"candidate {self.name!r} needs either call=, the implementation, or load=, a function that "
                f"imports and returns it"
            )
        if not callable(self.call or self.load):
            raise TypeError(
                f"candidate {self.name!r}: {self.call or self.load!r} can't be called; to name what another "
                f"module holds, pass load=, a function that imports and returns it"
            )

    @cached_property
    def implementation(self) -> Implementation:
        """The callable that computes the op, imported on first use."""
        if self.call is not None:
            return self.call
        assert self.load is not None
        return self.load()

    @property
    def compiles(self) -> bool:
        """Whether what runs is torch.compile's code."""
        return self.name == "compiled" or self.all_compiled

    @property
    def third_party(self) -> bool:
        """Whether it runs another project's kernels."""
        return not {*self.requires} <= {"torch", "triton"}

    @cached_property
    def absent(self) -> str | None:
        """Why it can't be used on this installation at all, or None."""
        return next(filter(None, map(missing, self.requires)), None)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that its implementation stands in; none where they can't be read, as in a notebook."""
        return tuple(root.module for root in sources.roots(self.call, self.load) or ())

    @cached_property
    def source_hash(self) -> str:
        """Changes when code it runs through or the version of a required package changes (see `sources`).

        Where no source can be read the hash is for this object alone, so that no verdict outlives it.
        """
        return sources.source_hash(sources.roots(self.call, self.load), self.requires)

    def reasons(self, case: Case) -> list[str]:
        """Every reason why this candidate can't take `case`; empty when it can."""
        if self.absent:
            return [self.absent]
        reasons = []
        if case.needs_grad and not self.has_backward:
            reasons.append("has no backward")
        repeats = self.deterministic or self.heeds_determinism
        if torch.are_deterministic_algorithms_enabled() and not repeats:
            reasons.append("is not deterministic, and torch.use_deterministic_algorithms is on")
        if self.min_capability > (0, 0):
            if not case.device.startswith("cuda"):
                reasons.append(f"runs on CUDA, not on {case.device}")
            elif hardware.capability(hardware.index(case.device)) < self.min_capability:
                reasons.append(f"needs compute capability {'.'.join(map(str, self.min_capability))}")
        if "triton" in self.requires and (too_old := hardware.without_triton(case.device)):
            reasons.append(too_old)
        try:
            own = self.supports(case)
        except Exception as error:
            own = f"its supports() fails: {type(error).__name__}: {error}"
        if own and own not in reasons:
            reasons.append(own)
        return reasons
