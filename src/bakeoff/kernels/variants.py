"""Launch configurations as values: what a kernel can be launched with, and how tables write it.

A variant names a tiling for each direction that has a choice: ``forward(rows=4,warps=8)
backward(rows=2,warps=4)``. A tiling is a NamedTuple of ints. The empty text stands for the defaults, which
are computed from the device.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Tiled", "Tiling", "Tilings", "parse", "text"]

Tiling = tuple[int, ...]
"""A NamedTuple of ints; each kernel has its own kind."""

_AXIS = re.compile(r"(\w+)\(((?:\w+=-?\d+,?)*)\)")


class Tilings(NamedTuple):
    """The tilings that one direction of a kernel op may be launched with."""

    kind: Callable[..., Tiling]
    """The NamedTuple."""
    of: Callable[[Any], Sequence[Tiling]]
    """Those for a `bakeoff.select.Case`: the analytical default first, then others, the most promising
    first."""


def text(variant: Mapping[str, Tiling]) -> str:
    """A variant as tables hold it."""
    parts = []
    for axis, tiling in sorted(variant.items(), reverse=True):  # forward before backward
        numbers: Mapping[str, int] = tiling._asdict()  # type: ignore[attr-defined]
        parts.append(f"{axis}({','.join(f'{name}={int(value)}' for name, value in numbers.items())})")
    return " ".join(parts)


def parse(written: str, kinds: Mapping[str, Callable[..., Tiling]]) -> dict[str, Tiling]:
    """The variant that `written` names; `kinds` gives the kind of tiling of each axis.

    Raises ValueError for a text that isn't of that form or names other axes or numbers.
    """
    variant: dict[str, Tiling] = {}
    for part in written.split():
        match = _AXIS.fullmatch(part)
        if match is None or match[1] not in kinds or match[1] in variant:
            raise ValueError(f"{written!r} is no variant of axes {', '.join(kinds)}")
        numbers = dict(pair.split("=") for pair in match[2].split(",") if pair)
        try:
            variant[match[1]] = kinds[match[1]](**{name: int(value) for name, value in numbers.items()})
        except TypeError as error:
            raise ValueError(f"{written!r} is no variant: {error}") from None
    return variant


class Tiled:
    """A function with one choice, the ``tiling`` it takes by name: an implementation with variants.

    Call it with the function's other arguments; the default tiling is the function's affair.
    """

    def __init__(self, function: Callable[..., Any], tilings: Tilings, tiling: Tiling | None = None) -> None:
        self.function, self.tilings, self.tiling = function, tilings, tiling
        self.variant = "" if tiling is None else text({"forward": tiling})
        """The launch configuration; "" for the default."""
        self.__name__, self.__module__ = function.__name__.strip("_"), function.__module__
        self._bound: dict[str, Tiled] = {"": self}

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, tiling=self.tiling)

    def variants(self, case: Any) -> dict[str, Sequence[Tiling]]:
        """The tilings that the function may be launched with for a case, the default first."""
        return {"forward": self.tilings.of(case)}

    def bind(self, written: str) -> "Tiled":
        """The function with the variant that `written` names."""
        bound = self._bound.get(written)
        if bound is None:
            chosen = parse(written, {"forward": self.tilings.kind})["forward"]
            bound = self._bound[written] = Tiled(self.function, self.tilings, chosen)
        return bound
