"""The Triton kernel of `rotary` and its launch: queries and keys together.

The gradient is the rotation by the opposite angle, so one kernel serves forward and backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bakeoff.kernels.layout import alignment, tile_of
from bakeoff.kernels.rotation import turn

__all__ = ["Tiling", "dense_strides", "is_head_major", "launch", "tilings"]


@triton.jit(do_not_specialize=["T", "S", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "row"])
def _rotate(
    q,
    k,
    cos,
    sin,
    position_ids,
    q_out,
    k_out,
    T,
    S,
    q_b: tl.int64,
    q_t: tl.int64,
    q_h: tl.int64,
    k_b: tl.int64,
    k_t: tl.int64,
    k_h: tl.int64,
    row: tl.int64,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    IDS: tl.constexpr,
    Q_HEAD_MAJOR: tl.constexpr,
    K_HEAD_MAJOR: tl.constexpr,
    VECTOR: tl.constexpr,
    TABLE_VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn q and k, the heads of k following those of q on the grid."""
    # A program turns BLOCK_T tokens x BLOCK_H heads (which divide H and HK) of q or of k, each one row of a
    # 2-D tile. The rows of a token share its table row through L1.
    # Moves 2 * D * itemsize bytes a head, does 3 FLOPs a rotated element.
    Q_BLOCKS: tl.constexpr = H // BLOCK_H
    HEAD_BLOCKS: tl.constexpr = Q_BLOCKS + HK // BLOCK_H
    pid = tl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    token_block = pid // HEAD_BLOCKS
    t_blocks = tl.cdiv(T, BLOCK_T)
    b = (token_block // t_blocks).to(tl.int64)
    i = tl.arange(0, BLOCK_T * BLOCK_H)
    t = (token_block % t_blocks) * BLOCK_T + i // BLOCK_H
    live = t < T

    if IDS == 0:
        at = t
        known = live
    else:
        at = tl.load(position_ids + (b * T if IDS == 2 else 0) + t, mask=live, other=0)
        known = live & (at >= 0) & (at < S)
    p = tl.arange(0, BLOCK)
    table = tl.multiple_of(at.to(tl.int64) * row, TABLE_VECTOR)[:, None] + p[None, :]
    inside = known[:, None] & (p < HALF)[None, :]
    # An id outside the table must show: NaN.
    c = tl.load(cos + table, mask=inside, other=float("nan")).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=float("nan")).to(tl.float32)
    if CONJUGATE:
        s = -s

    t = t.to(tl.int64)
    if head_block < Q_BLOCKS:
        h = head_block * BLOCK_H + i % BLOCK_H
        start = tl.multiple_of(b * q_b + t * q_t + h * q_h, VECTOR)
        out = ((b * H + h) * T + t) * D if Q_HEAD_MAJOR else ((b * T + t) * H + h) * D
        turn(q, q_out, start, out, live, c, s, p, D, HALF, INTERLEAVED, BLOCK, REST)
    else:
        h = (head_block - Q_BLOCKS) * BLOCK_H + i % BLOCK_H
        start = tl.multiple_of(b * k_b + t * k_t + h * k_h, VECTOR)
        out = ((b * HK + h) * T + t) * D if K_HEAD_MAJOR else ((b * T + t) * HK + h) * D
        turn(k, k_out, start, out, live, c, s, p, D, HALF, INTERLEAVED, BLOCK, REST)


class Tiling(NamedTuple):
    """How a launch is cut into programs."""

    tile: int
    """Bytes of first halves that a program turns, or half of what it copies."""
    heads: int
    """Of a program, at most: a power of two that divides the heads of q and k, so that none needs a mask.
    One where heads are the outer dimension in memory: a tile is then one head's tokens."""
    access: int
    """Bytes of each half that a thread turns; it copies eight times as many."""


def tilings(case: Any) -> list[Tiling]:
    """What the kernel may be launched with: the default, then larger and smaller tiles, fewer heads of more
    tokens, more or less work a thread."""
    del case
    return [
        Tiling(4096, 64, 16),
        Tiling(2048, 64, 16),
        Tiling(8192, 64, 16),
        Tiling(4096, 64, 8),
        Tiling(8192, 64, 32),
        Tiling(1024, 64, 16),
        Tiling(4096, 4, 16),
        Tiling(4096, 1, 16),
        Tiling(8192, 4, 16),
        Tiling(16384, 64, 32),
        Tiling(512, 64, 16),
    ]


def blocks(
    T: int,
    H: int,
    HK: int,
    D: int,
    half: int,
    itemsize: int,
    head_major: bool,
    tiling: Tiling,
    lanes: int = 64 if torch.version.hip else 32,
) -> tuple[int, int, int, int]:
    """BLOCK_T, BLOCK_H, BLOCK and num_warps for T tokens (only T below the tile's height matters).

    A warp has `lanes` threads.
    """
    block, rest = tile_of(half), tile_of(D - 2 * half)
    rows = max(1, tiling.tile // (itemsize * max(block, rest // 2)))
    heads = H | HK
    block_h = 1 if head_major else min(rows, tiling.heads, heads & -heads or 1)
    block_t = min(rows // block_h, tile_of(T))
    turned, copied = block * itemsize // tiling.access, rest * itemsize // (8 * tiling.access)
    warps = block_t * block_h * max(turned, copied) // lanes
    return block_t, block_h, block, max(1, min(8, warps))


def launch(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    q_strides: Sequence[int],
    k_strides: Sequence[int],
    itemsize: int,
    table_shape: Sequence[int],
    row: int,
    *,
    position_ids: int,
    interleaved: bool,
    conjugate: bool,
    head_major: tuple[bool, bool],
    tiling: Tiling | None = None,
    lanes: int = 64 if torch.version.hip else 32,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid for q and k, whose last dimensions are contiguous, and the kernel's numbers and constants.

    Table rows lie `row` apart; `position_ids` is how many dimensions they have, or 0. `head_major` says for
    each result whether its memory is [B, H, T, D].
    """
    B, T, H, D = q_shape
    HK = k_shape[2]
    rows, half = table_shape
    # A dimension of one element may have any stride: 0 keeps what is known of the others.
    q_steps, k_steps = (
        [0 if size == 1 else step for size, step in zip(shape[:3], strides[:3], strict=True)]
        for shape, strides in ((q_shape, q_strides), (k_shape, k_strides))
    )
    tiling = tiling or tilings(None)[0]
    tokens_first = q_strides[1] < q_strides[2]
    block_t, block_h, block, warps = blocks(T, H, HK, D, half, itemsize, tokens_first, tiling, lanes)
    names = ("q_b", "q_t", "q_h", "k_b", "k_t", "k_h")
    numbers: dict[str, Any] = dict(zip(names, (*q_steps, *k_steps), strict=True))
    numbers |= {
        "T": T,
        "S": rows,
        "row": row,
        "H": H,
        "HK": HK,
        "D": D,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "CONJUGATE": conjugate,
        "IDS": position_ids,
        "Q_HEAD_MAJOR": head_major[0],
        "K_HEAD_MAJOR": head_major[1],
        "VECTOR": alignment(*q_steps, *k_steps),
        "TABLE_VECTOR": alignment(row),
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK": block,
        "REST": tile_of(D - 2 * half),
        "num_warps": warps,
    }
    return (B * -(-T // block_t) * ((H + HK) // block_h),), numbers


def dense_strides(shape: Sequence[int], head_major: bool) -> tuple[int, ...]:
    """Of a dense [B, T, H, D], or of a dense [B, H, T, D] seen as one."""
    _, T, H, D = shape
    return (H * T * D, D, T * D, 1) if head_major else (T * H * D, H * D, D, 1)


def is_head_major(x: torch.Tensor) -> bool:
    """Whether time runs faster than heads in memory, as in a transposed [B, H, T, D]."""
    return x.stride(1) < x.stride(2)
