"""With what the forward for Hopper is launched."""

from typing import Any, NamedTuple

__all__ = ["HopperTiling", "hopper_tilings", "registers", "width_of"]


class HopperTiling(NamedTuple):
    """How the forward for Hopper is cut into programs, one a multiprocessor."""

    workers: int
    """Warpgroups that multiply, each 64 queries."""
    keys: int
    """Keys of a step."""
    stages: int
    """Steps whose keys and values are on the chip at a time."""
    turns: int
    """1: the warpgroups take turns in issuing products, so that some compute softmaxes meanwhile."""
    early: int
    """1: a branch's programs begin while the last ones of the branch before still run."""


def registers(workers: int) -> tuple[int, int, int]:
    """Registers of each thread: at the start of a program, of those that multiply, of the one that copies."""
    return {2: (168, 240, 24), 3: (128, 160, 32)}[workers]


def width_of(D: int) -> int:
    """The width that a head takes on the chip."""
    return 64 if D <= 64 else 128


def hopper_tilings(case: Any) -> list[HopperTiling]:
    """What the forward may be launched with: the default, then others."""
    if width_of(case.q.shape[-1]) == 64:
        found = [(2, 128, 3, 1, 1), (3, 128, 2, 1, 1), (2, 128, 3, 0, 1), (2, 128, 3, 1, 0), (3, 64, 4, 1, 1)]
    else:
        found = [(2, 128, 2, 0, 1), (2, 128, 2, 1, 1), (2, 128, 2, 1, 0), (3, 64, 4, 1, 1), (2, 64, 4, 1, 1)]
    return [HopperTiling(*numbers) for numbers in found]
