"""swiglu in Triton: one pass each way over rows [N, F] that lie one stride apart.

A program takes BLOCK elements in the order of y, whichever rows they belong to, so that no F leaves lanes
idle. Where no stride interrupts a tensor (FLAT) there are no rows at all. Strides and the total come in units
of ALIGN elements: the product tells the compiler what 16-byte accesses need.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bakeoff.kernels.layout import alignment

__all__ = ["Tiling", "launch", "tilings"]

_NARROW = tl.constexpr(1 << 30)  # features and a block in 32 bits


@triton.jit(do_not_specialize=["gate_units", "up_units", "units"])
def _forward(
    gate, up, y,
    gate_units: tl.int64, up_units: tl.int64, units: tl.int64,
    F: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = gate * sigmoid(gate) * up; without `up` it lies F elements behind gate, in the same rows.

    Reads gate and up, writes y: 3 * itemsize bytes and about 6 FLOPs an element.
    """
    at, inside, row, col = _elements(units, F, FLAT, ALIGN, BLOCK)
    here = row * (gate_units * ALIGN) + col
    g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
    if up is None:
        u = tl.load(gate + F + here, mask=inside, other=0.0).to(tl.float32)
    else:
        u = tl.load(up + (row * (up_units * ALIGN) + col), mask=inside, other=0.0).to(tl.float32)
    s, _ = _sigmoid(g, gate.dtype.element_ty == tl.float32)
    tl.store(y + at, (g * s * u).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["dy_units", "gate_units", "up_units", "units"])
def _backward(
    dy, gate, up, dgate, dup,
    dy_units: tl.int64, gate_units: tl.int64, up_units: tl.int64, units: tl.int64,
    F: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dup = dy * silu(gate), dgate = dy * up * s * (1 + gate * (1 - s)); either may be absent.

    Without `up` both go to dgate, rows of 2F. Reads dy, gate and up, writes dgate and dup: 5 * itemsize bytes
    and about 12 FLOPs an element.
    """
    at, inside, row, col = _elements(units, F, FLAT, ALIGN, BLOCK)
    here = row * (gate_units * ALIGN) + col
    grad = tl.load(dy + (row * (dy_units * ALIGN) + col), mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
    s, rest = _sigmoid(g, gate.dtype.element_ty == tl.float32)
    if up is None:
        u = tl.load(gate + F + here, mask=inside, other=0.0).to(tl.float32)
        there = row * (2 * F) + col
        slope = grad * u * s * (1.0 + g * rest)
        tl.store(dgate + there, slope.to(dgate.dtype.element_ty), mask=inside)
        tl.store(dgate + F + there, (grad * (g * s)).to(dgate.dtype.element_ty), mask=inside)
    else:
        if dgate is not None:
            u = tl.load(up + (row * (up_units * ALIGN) + col), mask=inside, other=0.0).to(tl.float32)
            slope = grad * u * s * (1.0 + g * rest)
            tl.store(dgate + at, slope.to(dgate.dtype.element_ty), mask=inside)
        if dup is not None:
            tl.store(dup + at, (grad * (g * s)).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def _elements(units, F: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    # The program's elements in y, which of them exist, their rows and columns.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    at = start + i
    inside = at < units * ALIGN
    if FLAT:
        row = tl.zeros([BLOCK], tl.int64)
        col = at
    else:
        first = start // F
        # 64-bit divisions are slow: one a program, and of what remains in 32 bits.
        begin = start - first * F
        if F < _NARROW:
            begin = begin.to(tl.int32)
        local = begin + i
        row = first + local // F
        col = local % F
    return at, inside, row, col


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    # s = sigmoid(x), and 1 - s. EXACT, for float32 results: tl.exp(-x) alone is off by up to |x| / 2 units in
    # the last place, x * log2(e) being rounded before 2 is raised to it, and 1 - s of large x has few digits.
    if EXACT:
        bounded = tl.minimum(tl.maximum(x, -104.0), 104.0)  # where exp is infinite or 0 in float32
        n = tl.floor(bounded * -1.4426950408889634 + 0.5)
        # ln 2 in two parts, the first short enough for its product with n to be exact.
        r = (-bounded - n * 0.693145751953125) - n * 1.428606820309417e-06
        e = tl.exp2(n) * tl.exp2(r * 1.4426950408889634)
        s = 1.0 / (1.0 + e)
        rest = tl.where(x > 0, e * s, 1.0 - s)
    else:
        s = tl.sigmoid(x)
        rest = 1.0 - s
    return s, rest


class Tiling(NamedTuple):
    """How a launch is cut into programs."""

    threads: int
    """Of a program."""
    accesses: int
    """16-byte loads that a thread has under way of each tensor."""


def tilings(case: Any) -> list[Tiling]:
    """What either kernel may be launched with: the default, then more work a thread, then more a program."""
    del case
    return [Tiling(128, 1), Tiling(128, 2), Tiling(256, 1), Tiling(256, 2), Tiling(512, 1), Tiling(64, 1)]


def launch(
    rows: int,
    features: int,
    itemsize: int,
    strides: Mapping[str, int],
    *,
    packed: bool,
    tiling: Tiling | None = None,
    lanes: int = 64 if torch.version.hip else 32,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid over rows of y, and the kernel's numbers and constants by name.

    `strides` are those between rows of the tensors that are read, by the names of the kernel's arguments. A
    warp has `lanes` threads.
    """
    threads, accesses = tiling or Tiling(128, 1)
    total = rows * features
    flat = rows == 1 or (not packed and all(stride == features for stride in strides.values()))
    align = alignment(total) if flat else alignment(features, *strides.values())
    block = threads * accesses * 16 // itemsize
    numbers: dict[str, Any] = {
        f"{name}_units": 0 if flat else step // align for name, step in strides.items()
    }
    numbers |= {
        "units": total // align,
        # A flat kernel serves every F, unless it finds `up` by it.
        "F": 0 if flat and not packed else features,
        "FLAT": flat,
        "ALIGN": align,
        "BLOCK": block,
        "num_warps": max(1, threads // lanes),
    }
    return (-(-total // block),), numbers
