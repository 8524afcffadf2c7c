"""Two kernel ops as one candidate."""

from collections.abc import Sequence
from typing import Any, Self

from bakeoff.kernels.op import KernelOp
from bakeoff.kernels.variants import Tiling

__all__ = ["KernelPair"]


class KernelPair:
    """An op without and one with a residual, both launched alike; ``__call__`` takes the one that a call asks
    for."""

    def __init__(self, plain: KernelOp, added: KernelOp) -> None:
        self.plain, self.added = plain, added
        self._bound: dict[str, Any] = {"": self}

    def variants(self, case: Any) -> dict[str, Sequence[Tiling]]:
        """The tilings that each direction may be launched with for a case, the default first."""
        return self.plain.variants(case)  # those of the other are the same

    def bind(self, text: str) -> Self:
        """The candidate with the variant that `text` names."""
        if text not in self._bound:
            self._bound[text] = type(self)(self.plain.bind(text), self.added.bind(text))
        bound: Self = self._bound[text]
        return bound
