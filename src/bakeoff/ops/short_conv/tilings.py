"""How short_conv's kernels are cut into programs: the defaults, what else may be faster, and the launches.

Both directions are bound by memory. Longer walks fetch and recompute less of what two walkers share; more
positions at a time have more accesses under way, in more registers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import alignment

__all__ = [
    "Tiling",
    "backward_launch",
    "backward_tilings",
    "forward_launch",
    "forward_tilings",
    "state_launch",
    "sum_launch",
]

_LANES = 64 if torch.version.hip else 32  # threads of a warp
_FILL = 1  # programs that a multiprocessor should have before their walks grow
_SHARES = 16  # programs of a multiprocessor that share the sums of a filter's gradient


class Tiling(NamedTuple):
    """How [B, T, C] is cut into tiles."""

    ahead: int
    """Positions that a walker asks for together."""
    loops: int
    """How often it does."""
    channels: int
    """Of a program at most: a power of two."""
    bytes: int
    """Of a thread's access."""
    warps: int
    """Of a program at most."""


def forward_tilings(case: Any) -> list[Tiling]:
    """What the forward may be launched with: the default, then other walks, then other tiles."""
    default = _for_case(case, _FORWARD)
    walks = ((4, 4), (8, 1), (4, 1), (4, 8), (2, 8), (8, 4), (1, 1))
    return _others(default, walks)


def backward_tilings(case: Any) -> list[Tiling]:
    """What the backward may be launched with, the default first."""
    default = _for_case(case, _BACKWARD)
    walks = ((4, 32), (4, 8), (4, 4), (2, 32), (2, 16), (2, 4), (4, 1), (1, 64))
    return _others(default, walks)


_FORWARD = Tiling(8, 2, 128, 16, 4)
_BACKWARD = Tiling(4, 16, 128, 8, 4)


def _others(default: Tiling, walks: tuple[tuple[int, int], ...]) -> list[Tiling]:
    found = [default]
    found += [default._replace(ahead=ahead, loops=loops) for ahead, loops in walks]
    found += [default._replace(bytes=24 - default.bytes)]
    found += [
        default._replace(ahead=ahead, loops=loops, bytes=24 - default.bytes) for ahead, loops in walks[:3]
    ]
    found += [default._replace(channels=count) for count in (256, 64, 512)]
    found += [default._replace(warps=count) for count in (8, 2, 1)]
    return list(dict.fromkeys(found))


def _for_case(case: Any, tiling: Tiling) -> Tiling:
    B, T, C = case.x.shape
    return _filling(B, T, C, case.x.dtype.itemsize, tiling, multiprocessors(case.device))


def _filling(B: int, T: int, C: int, itemsize: int, tiling: Tiling, sms: int) -> Tiling:
    """Shorter walks where sequences are as short, or the device would not be filled otherwise."""
    while (walk := tiling.ahead * tiling.loops) > 1:
        rows, block, _ = _tile(T, C, itemsize, tiling)
        if walk <= T and B * -(-T // (rows * walk)) * -(-C // block) >= _FILL * sms:
            break
        if tiling.loops > 1:
            tiling = tiling._replace(loops=tiling.loops // 2)
        else:
            tiling = tiling._replace(ahead=tiling.ahead // 2)
    return tiling


def _tile(T: int, C: int, itemsize: int, tiling: Tiling) -> tuple[int, int, int]:
    """Walkers, channels and warps of a program; no more walkers than a sequence has work for."""
    each = max(1, tiling.bytes // itemsize)
    block = min(triton.next_power_of_2(C), tiling.channels)
    most = max(1, tiling.warps * _LANES * each // block)
    rows = min(most, triton.next_power_of_2(-(-T // (tiling.ahead * tiling.loops))))
    return rows, block, max(1, min(tiling.warps, rows * block // (_LANES * each)))


def forward_launch(
    shape: tuple[int, int, int],
    W: int,
    itemsize: int,
    items: int,
    strides: Mapping[str, int],
    sms: int,
    tiling: Tiling | None,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and numbers and constants by the kernel's names, for `items` sequences."""
    B, C = shape[0], shape[2]
    tiling = tiling or _filling(*shape, itemsize, _FORWARD, sms)
    tiles, numbers = _numbers(shape, W, itemsize, strides, tiling)
    return ((B * tiles + items * (W > 1)) * -(-C // numbers["BLOCK"]),), {**numbers, "N": items}


def backward_launch(
    shape: tuple[int, int, int],
    W: int,
    itemsize: int,
    strides: Mapping[str, int],
    sms: int,
    tiling: Tiling | None,
) -> tuple[tuple[int], int, dict[str, Any]]:
    """As `forward_launch`; between the two, how many programs have the same channels."""
    B, C = shape[0], shape[2]
    tiling = tiling or _filling(*shape, itemsize, _BACKWARD, sms)
    tiles, numbers = _numbers(shape, W, itemsize, strides, tiling)
    blocks = -(-C // numbers["BLOCK"])
    share = max(1, B * tiles * blocks // (_SHARES * sms))
    programs = -(-B * tiles // share)
    return (programs * blocks,), programs, {**numbers, "share": share}


def _numbers(
    shape: tuple[int, int, int], W: int, itemsize: int, strides: Mapping[str, int], tiling: Tiling
) -> tuple[int, dict[str, Any]]:
    """Tiles of a sequence, and what the kernels have in common."""
    B, T, C = shape
    rows, block, warps = _tile(T, C, itemsize, tiling)
    numbers = _units(C, block, strides) | {
        "B": B, "T": T, "W": W, "AHEAD": tiling.ahead, "LOOPS": tiling.loops, "ROWS": rows,
        "num_warps": warps,
    }  # fmt: skip
    return -(-T // (rows * tiling.loops * tiling.ahead)), numbers


def _units(C: int, block: int, strides: Mapping[str, int]) -> dict[str, Any]:
    align = alignment(C, *strides.values())
    units: dict[str, Any] = {f"{name}_units": step // align for name, step in strides.items()}
    return units | {"C_units": C // align, "BLOCK": block, "EVEN": C % block == 0, "ALIGN": align}


def state_launch(
    T: int, C: int, W: int, items: int, strides: Mapping[str, int]
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and numbers of the gradient of `items` sequences' states."""
    rows, block = min(4, triton.next_power_of_2(items)), min(triton.next_power_of_2(C), 128)
    grid = (-(-items // rows) * -(-C // block),)
    numbers = _units(C, block, strides)
    return grid, numbers | {"T": T, "N": items, "W": W, "ROWS": rows, "num_warps": 4}


def sum_launch(C: int, W: int, partials: int) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and numbers of the sum over programs."""
    rows, block = 32, 64
    return (-(-C // block) * (W + 1),), {
        "P": partials, "C": C, "W": W, "ROWS": rows, "BLOCK": block, "num_warps": 4,
    }  # fmt: skip
