"""The backward of `qkv_rotary`: one gradient of [q | k | v] from those of its three parts.

Without weights it reads what arrives for q', k' and v and writes as much: 2 passes over [q | k | v], 4 bytes
an element in bf16. With weights it also reads q and k. (Apart, the parts' gradients are written, and read and
written again where they are joined.) Forward is the kernel of `rotary`, on two views.

A tile is BLOCK_T tokens x BLOCK_H heads, each one row, as in `rotary`.
"""

import triton
import triton.language as tl

from bakeoff.kernels.rotation import turn
from bakeoff.ops.rotary.normed.kernels import _angles, _heads, _tokens, _walk

__all__: list[str] = []


@triton.jit(
    do_not_specialize=[
        "T", "S", "gq_b", "gq_t", "gq_h", "gk_b", "gk_t", "gk_h", "gv_b", "gv_t", "gv_h", "row",
    ]
)  # fmt: skip
def _rotate_back(
    gq, gk, gv, cos, sin, position_ids, dqkv, T: tl.int32, S: tl.int32, gq_b: tl.int64, gq_t: tl.int64,
    gq_h: tl.int64, gk_b: tl.int64, gk_t: tl.int64, gk_h: tl.int64, gv_b: tl.int64, gv_t: tl.int64,
    gv_h: tl.int64, row: tl.int64, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, IDS: tl.constexpr, VECTOR: tl.constexpr, TABLE_VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of q, of k or of v a program: turned by the opposite angles, or copied; zeros where nothing
    arrives.

    Moves 2 * D * itemsize bytes a head; 3 FLOPs a rotated element.
    """
    Q_BLOCKS: tl.constexpr = H // BLOCK_H
    K_BLOCKS: tl.constexpr = HK // BLOCK_H
    block = tl.program_id(0) % (Q_BLOCKS + 2 * K_BLOCKS)
    b, t, live = _tokens(tl.program_id(0) // (Q_BLOCKS + 2 * K_BLOCKS), T, BLOCK_T, BLOCK_H)
    out = ((b * T + t) * (H + 2 * HK) + _heads(block, BLOCK_T, BLOCK_H)) * D
    if block < Q_BLOCKS:
        h = _heads(block, BLOCK_T, BLOCK_H)
        _turn_rows(
            gq, dqkv, cos, sin, position_ids, b, t, h, out, live, T, S, gq_b, gq_t, gq_h, row, D, HALF,
            INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK, REST, WIDTH,
        )  # fmt: skip
    elif block < Q_BLOCKS + K_BLOCKS:
        h = _heads(block - Q_BLOCKS, BLOCK_T, BLOCK_H)
        _turn_rows(
            gk, dqkv, cos, sin, position_ids, b, t, h, out, live, T, S, gk_b, gk_t, gk_h, row, D, HALF,
            INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK, REST, WIDTH,
        )  # fmt: skip
    else:
        h = _heads(block - Q_BLOCKS - K_BLOCKS, BLOCK_T, BLOCK_H)
        start = tl.multiple_of(b * gv_b + t * gv_t + h * gv_h, VECTOR)
        _copy_rows(gv, dqkv, start, out, live, D, WIDTH)


@triton.jit
def _turn_rows(
    dy, dx, cos, sin, position_ids, b, t, h, out, live, T, S, dy_b, dy_t, dy_h, row,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, IDS: tl.constexpr, VECTOR: tl.constexpr,
    TABLE_VECTOR: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.multiple_of(b * dy_b + t * dy_t + h * dy_h, VECTOR)
    if dy is None:
        _copy_rows(dy, dx, start, out, live, D, WIDTH)
    else:
        c, s = _angles(cos, sin, position_ids, b, t, live, T, S, row, HALF, IDS, TABLE_VECTOR, BLOCK)
        turn(dy, dx, start, out, live, c, -s, tl.arange(0, BLOCK), D, HALF, INTERLEAVED, BLOCK, REST)


@triton.jit
def _copy_rows(x, y, start, out, live, D: tl.constexpr, WIDTH: tl.constexpr):
    # Rows of x at `start` to rows of y at `out`, or zeros.
    d = tl.arange(0, WIDTH)
    mask = live[:, None] & (d < D)[None, :]
    if x is None:
        rows = tl.zeros([out.shape[0], WIDTH], y.dtype.element_ty)
    else:
        rows = tl.load(x + start[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(y + out[:, None] + d[None, :], rows, mask=mask)


@triton.jit(
    do_not_specialize=[
        "B", "T", "S", "gq_b", "gq_t", "gq_h", "gk_b", "gk_t", "gk_h", "gv_b", "gv_t", "gv_h", "q_b", "q_t",
        "q_h", "k_b", "k_t", "k_h", "row", "eps", "offset",
    ]
)  # fmt: skip
def _normed_back(
    gq, gk, gv, q, k, cos, sin, position_ids, q_weight, k_weight, dqkv, q_partial, k_partial,
    B: tl.int32, T: tl.int32, S: tl.int32, gq_b: tl.int64, gq_t: tl.int64, gq_h: tl.int64, gk_b: tl.int64,
    gk_t: tl.int64, gk_h: tl.int64, gv_b: tl.int64, gv_t: tl.int64, gv_h: tl.int64, q_b: tl.int64,
    q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64, row: tl.int64,
    eps: tl.float32, offset: tl.float32,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    IDS: tl.constexpr, VECTOR: tl.constexpr, TABLE_VECTOR: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the tiles of q, over those of k and over those of v, with the weights'
    gradients in registers.

    What they do with q and k is what the backward of `rotary` does; where nothing arrives for one, its part
    of dqkv is zeros. Moves 3 * D * itemsize bytes a head of q and k, 2 a head of v; 11 FLOPs an element of q
    and k and 3 a rotated one.
    """
    OUT: tl.constexpr = H + 2 * HK
    dk = dqkv if dqkv is None else dqkv + H * D
    if gq is not None:
        _walk(
            gq, q, q_weight, dqkv, q_partial, cos, sin, position_ids, B, T, S, gq_b, gq_t, gq_h, q_b, q_t,
            q_h, row, eps, offset, H, OUT, D, HALF, INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK_T, BLOCK_H,
            BLOCK, REST, STAGES,
        )  # fmt: skip
    elif dqkv is not None:
        _copy_heads(
            gq, dqkv, B, T, gq_b, gq_t, gq_h, H, OUT, D, VECTOR, BLOCK_T, BLOCK_H, WIDTH, STAGES
        )  # fmt: skip
    if gk is not None:
        _walk(
            gk, k, k_weight, dk, k_partial, cos, sin, position_ids, B, T, S, gk_b, gk_t, gk_h, k_b,
            k_t, k_h, row, eps, offset, HK, OUT, D, HALF, INTERLEAVED, IDS, VECTOR, TABLE_VECTOR, BLOCK_T,
            BLOCK_H, BLOCK, REST, STAGES,
        )  # fmt: skip
    elif dqkv is not None:
        _copy_heads(gk, dk, B, T, gk_b, gk_t, gk_h, HK, OUT, D, VECTOR, BLOCK_T, BLOCK_H, WIDTH, STAGES)
    if dqkv is not None:
        dv = dqkv + (H + HK) * D
        _copy_heads(gv, dv, B, T, gv_b, gv_t, gv_h, HK, OUT, D, VECTOR, BLOCK_T, BLOCK_H, WIDTH, STAGES)


@triton.jit
def _copy_heads(
    x, y, B, T, x_b, x_t, x_h, H: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # This program's tiles of H heads, copied, or zeros. A token of y is OUT heads after the one before.
    HEAD_BLOCKS: tl.constexpr = H // BLOCK_H
    tiles = B * tl.cdiv(T, BLOCK_T) * HEAD_BLOCKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        b, t, live = _tokens(tile // HEAD_BLOCKS, T, BLOCK_T, BLOCK_H)
        h = _heads(tile % HEAD_BLOCKS, BLOCK_T, BLOCK_H)
        start = tl.multiple_of(b * x_b + t * x_t + h * x_h, VECTOR)
        _copy_rows(x, y, start, ((b * T + t) * OUT + h) * D, live, D, WIDTH)
