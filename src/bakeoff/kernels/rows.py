"""Whole rows in registers, for Triton kernels: how they are read, and sums over the rows of many programs.

A row in registers is a tuple of pieces of BLOCK columns, all of which are asked for before the first is used.
BLOCK is a power of two, and the last piece may be cut short: rows of 5,120 are 5 pieces of 1,024 columns,
where one block of 8,192 would leave 3 of 8 threads without work.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel

__all__ = ["add_up", "columns", "every", "read", "room_for_sums", "store_sums", "sum_tiling"]


@triton.jit
def read(x, start, live, D: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Rows of D from `start` [ROWS, 1] on, where they are `live`, as a tuple of [ROWS, BLOCK]."""
    pieces = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        cols, inside = columns(i, D, BLOCK)
        pieces += (tl.load(x + start + cols, mask=inside & live, other=0.0, eviction_policy=POLICY),)
    return pieces


@triton.jit
def columns(i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """The columns [1, BLOCK] of the i-th piece, and which exist: a constant, hence free, where all do."""
    cols = (i * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = tl.full([1, BLOCK], True, tl.int1) if (i + 1) * BLOCK <= D else cols < D
    return cols, inside


@triton.jit
def every(ROWS: tl.constexpr):
    """A mask of all of ROWS rows."""
    return tl.full([ROWS, 1], True, tl.int1)


@triton.jit
def store_sums(partial, dw, D: tl.constexpr, BLOCK: tl.constexpr):
    """To `partial` [D] the sums of dw's pieces over their rows."""
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        cols, inside = columns(i, D, BLOCK)
        total = tl.sum(dw[i], axis=0, keep_dims=True).to(partial.dtype.element_ty)
        tl.store(partial + cols, total, mask=inside)


@triton.jit(do_not_specialize=["P"])
def _add_up(
    first, first_total, second, second_total, P: tl.int32,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """total[d] = sum of partial[p, d] over p, always in the same order; a block of columns a program. There
    may be two such sums: axis 1 of the grid."""
    if second is None:  # noqa: SIM114  a constant
        _add_up_columns(first, first_total, P, D, BLOCK_P, BLOCK_D)
    elif tl.program_id(1) == 0:
        _add_up_columns(first, first_total, P, D, BLOCK_P, BLOCK_D)
    else:
        _add_up_columns(second, second_total, P, D, BLOCK_P, BLOCK_D)


@triton.jit
def _add_up_columns(partial, total, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    found = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in tl.range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < D)[None, :]
        found += tl.load(partial + rows[:, None].to(tl.int64) * D + cols[None, :], mask=mask, other=0.0)
    tl.store(total + cols, tl.sum(found, axis=0).to(total.dtype.element_ty), mask=cols < D)


_add_up_kernel = TritonKernel(_add_up)


def room_for_sums(plan: Plan, totals: Sequence[Tensor | None], programs: int) -> list[Tensor | None]:
    """Where each program leaves its part of every one of `totals` [D] that isn't None: [programs, D] in
    float32. A program that has every row needs nobody to add up after it: it fills the total itself."""
    if programs == 1:
        return list(totals)
    return [None if t is None else plan.empty((programs, t.numel()), torch.float32) for t in totals]


def add_up(plan: Plan, partials: Sequence[Tensor | None], totals: Sequence[Tensor | None]) -> None:
    """Launch the sums of what programs have left in `room_for_sums`, of up to two totals."""
    pairs = [(part, t) for part, t in zip(partials, totals, strict=True) if t is not None and part is not t]
    if not pairs:
        return
    (first, first_total), (second, second_total) = [*pairs, (None, None)][:2]
    P, D = first.shape
    block_p, block_d, warps = sum_tiling(D)
    plan.launch(
        _add_up_kernel, (-(-D // block_d), len(pairs)), first=first, first_total=first_total, second=second,
        second_total=second_total, P=P, D=D, BLOCK_P=block_p, BLOCK_D=block_d, num_warps=warps,
    )  # fmt: skip


def sum_tiling(D: int) -> tuple[int, int, int]:
    """Partials and columns of a tile of the final sum, and its warps."""
    return (512, 8, 8) if D < 2048 else (256, 32, 4)
