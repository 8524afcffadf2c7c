"""The Triton kernel of `rotary` and its launch: queries and keys together.

The gradient is the rotation by the opposite angle, so one kernel serves forward and backward.

Measured on an H100 (torch 2.11, triton 3.6; graph replay over rotated inputs): 4x4096x32x128 bf16, halves,
forward 185.1 us and with backward 368.9 us, of which cloning q and k took 181.9 us each way: 98 % of a copy.
16x256x8x48: 6.6 and 13.6 us, where the clones took 7.8.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bakeoff.launch import Launcher

__all__ = ["Plan", "config", "dense", "is_head_major", "plan", "rotate", "rotate_kernel"]


@triton.jit(do_not_specialize=["T", "S", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "row"])
def rotate_kernel(
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
        _turn(q, q_out, start, out, live, c, s, p, D, HALF, INTERLEAVED, BLOCK, REST)
    else:
        h = (head_block - Q_BLOCKS) * BLOCK_H + i % BLOCK_H
        start = tl.multiple_of(b * k_b + t * k_t + h * k_h, VECTOR)
        out = ((b * HK + h) * T + t) * D if K_HEAD_MAJOR else ((b * T + t) * HK + h) * D
        _turn(k, k_out, start, out, live, c, s, p, D, HALF, INTERLEAVED, BLOCK, REST)


@triton.jit
def _turn(
    x,
    y,
    start,
    out,
    live,
    c,
    s,
    p,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    # Rows of x at `start` to rows of y at `out`; rows are whole heads, [R turned | D - R copied].
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        mask = live[:, None] & (both < 2 * HALF)[None, :]
        pairs = tl.load(x + start[:, None] + both[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (start.shape[0], BLOCK, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (start.shape[0], 2 * BLOCK))
        tl.store(y + out[:, None] + both[None, :], turned.to(y.dtype.element_ty), mask=mask)
    else:
        mask = live[:, None] & (p < HALF)[None, :]
        source = x + start[:, None] + p[None, :]
        target = y + out[:, None] + p[None, :]
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (a * c - b * s).to(y.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=mask)
    if 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, REST)
        mask = live[:, None] & (rest < D)[None, :]
        kept = tl.load(x + start[:, None] + rest[None, :], mask=mask, other=0.0)
        tl.store(y + out[:, None] + rest[None, :], kept, mask=mask)


_launch = Launcher(rotate_kernel)


def config(
    T: int,
    H: int,
    HK: int,
    D: int,
    half: int,
    itemsize: int,
    head_major: bool,
    *,
    tile: int = 4096,
    lanes: int = 64 if torch.version.hip else 32,
) -> tuple[int, int, int, int]:
    """BLOCK_T, BLOCK_H, BLOCK and num_warps for T tokens (only T below the tile's height matters).

    `tile` is how many bytes of first halves a program turns, or half of what it copies. BLOCK_H is a power of
    two that divides H and HK, so that head blocks need no mask; when heads are the outer dimension in memory,
    a tile is one head's tokens. A thread, of which a warp has `lanes`, turns 16 bytes of each half, which it
    reads at a time, or copies 128.

    Measured on an H100 (results/h100/rotary-tilings.csv): tiles of 512 to 8,192 bytes, 4 to 32 bytes a
    thread, hints of what to keep in the cache, q and k in one program. Within 3 % of the fastest for all
    shapes of the grid but odd heads (12 %). 8 bytes a thread gain 1 % on most, but lose 3 to 7 % on short
    rows, narrow tables and with position_ids.
    """
    block, rest = _power(half), _power(D - 2 * half)
    rows = max(1, tile // (itemsize * max(block, rest // 2)))
    heads = H | HK
    block_h = 1 if head_major else min(rows, heads & -heads or 1)
    block_t = min(rows // block_h, _power(T))
    warps = block_t * block_h * max(block * itemsize // 16, rest * itemsize // 128) // lanes
    return block_t, block_h, block, max(1, min(8, warps))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Plan(NamedTuple):
    """What a launch needs beside its tensors; a function of shapes and strides alone."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """The kernel's runtime integers, in its order."""
    constants: dict[str, Any]
    """Its constexprs, in its order, and the launch options."""
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    """Of the results."""


@functools.lru_cache(maxsize=4096)
def plan(
    tiling: Callable[..., tuple[int, int, int, int]],
    itemsize: int,
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    q_strides: tuple[int, int, int, int],
    k_strides: tuple[int, int, int, int],
    table_shape: tuple[int, int],
    row: int,
    ids: int,
    interleaved: bool,
    conjugate: bool,
    head_major: tuple[bool, bool] | None,
) -> Plan:
    """The launch for q and k (last dimension contiguous), table rows `row` apart, `ids`-dimensional ids.

    `tiling` is `config`. `head_major` says for each result whether its memory is [B, H, T, D]; by default it
    is if the argument's is.
    """
    B, T, H, D = q_shape
    HK = k_shape[2]
    rows, half = table_shape
    q_head_major, k_head_major = head_major or (q_strides[1] < q_strides[2], k_strides[1] < k_strides[2])
    block_t, block_h, block, warps = tiling(T, H, HK, D, half, itemsize, q_strides[1] < q_strides[2])
    numbers = (*q_strides[:3], *k_strides[:3])
    # The greatest power of two, up to 16, that divides all strides: it allows 16-byte accesses.
    together = functools.reduce(int.__or__, numbers, 16)
    constants = {
        "H": H,
        "HK": HK,
        "D": D,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "CONJUGATE": conjugate,
        "IDS": ids,
        "Q_HEAD_MAJOR": q_head_major,
        "K_HEAD_MAJOR": k_head_major,
        "VECTOR": together & -together,
        "TABLE_VECTOR": (row | 16) & -(row | 16),
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK": block,
        "REST": _power(D - 2 * half),
        "num_warps": warps,
    }
    return Plan(
        (B * -(-T // block_t) * ((H + HK) // block_h), 1, 1),
        (T, rows, *numbers, row),
        constants,
        _dense_strides(q_shape, q_head_major),
        _dense_strides(k_shape, k_head_major),
    )


def _dense_strides(shape: tuple[int, ...], head_major: bool) -> tuple[int, ...]:
    _, T, H, D = shape
    return (H * T * D, D, T * D, 1) if head_major else (T * H * D, H * D, D, 1)


def is_head_major(x: torch.Tensor) -> bool:
    """Whether time runs faster than heads in memory, as in a transposed [B, H, T, D]."""
    return x.stride(1) < x.stride(2)


def dense(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised result for `x`: dense, in the same order of time and heads."""
    return x.new_empty_strided(x.shape, _dense_strides(x.shape, is_head_major(x)))


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    position_ids: torch.Tensor | None,
    conjugate: bool,
    head_major: tuple[bool, bool] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch: `q` and `k` turned by their angles, or by the opposite ones when `conjugate`.

    `head_major` as in `plan`.
    """
    q_strides, k_strides = q.stride(), k.stride()
    if q_strides[3] != 1:
        q = q.contiguous()
        q_strides = q.stride()
    if k_strides[3] != 1:
        k = k.contiguous()
        k_strides = k.stride()
    row, column = cos.stride()
    if column != 1 or sin.stride() != (row, 1):
        cos, sin = cos.contiguous(), sin.contiguous()
        row = cos.stride(0)
    if position_ids is None:
        ids, positions = 0, cos
    else:
        ids, positions = position_ids.dim(), position_ids.contiguous()
    launch = plan(
        config,
        q.itemsize,
        q.shape,
        k.shape,
        q_strides,
        k_strides,
        cos.shape,
        row,
        ids,
        interleaved,
        conjugate,
        head_major,
    )
    # empty_like costs half of what empty_strided does, and gives the same for a dense argument.
    q_out = (
        torch.empty_like(q)
        if q_strides == launch.q_strides
        else q.new_empty_strided(q.shape, launch.q_strides)
    )
    k_out = (
        torch.empty_like(k)
        if k_strides == launch.k_strides
        else k.new_empty_strided(k.shape, launch.k_strides)
    )
    if launch.grid[0]:
        _launch(launch.grid, q, k, cos, sin, positions, q_out, k_out, *launch.numbers, **launch.constants)
    return q_out, k_out
