"""The Triton kernel of `rotary_append_`."""

import triton
import triton.language as tl

from bakeoff.kernels.rotation import turn

__all__ = ["NUMBERS"]

NUMBERS = [
    "T", "S", "row", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "v_b", "v_t", "v_h", "kc_b", "kc_h", "kc_s",
    "vc_b", "vc_h", "vc_s",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _append(
    q, k, v, k_cache, v_cache, cos, sin, at, y, T: tl.int32, S: tl.int64, row: tl.int64, q_b: tl.int64,
    q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64, v_b: tl.int64, v_t: tl.int64,
    v_h: tl.int64, kc_b: tl.int64, kc_h: tl.int64, kc_s: tl.int64, vc_b: tl.int64, vc_h: tl.int64,
    vc_s: tl.int64, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ALIGN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turns a token's queries, and turns and stores its keys, or stores its values."""
    # A program has HEADS heads of q, of k or of v. Moves 2 * itemsize bytes an element of all three.
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + HEADS - 1) // HEADS
    which = tl.program_id(0) % (Q_BLOCKS + 2 * K_BLOCKS)
    token = tl.program_id(0) // (Q_BLOCKS + 2 * K_BLOCKS)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    place = tl.load(at).to(tl.int64) + t
    kept = (place >= 0) & (place < S)
    i = tl.arange(0, HEADS)
    p = tl.arange(0, BLOCK)
    inside = tl.broadcast_to((p < HALF)[None, :], (HEADS, BLOCK))
    if which < Q_BLOCKS + K_BLOCKS:
        table = tl.broadcast_to((t * row + p)[None, :], (HEADS, BLOCK))
        c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
        if which < Q_BLOCKS:
            h = (which * HEADS + i).to(tl.int64)
            start = (b * q_b + t * q_t + h * q_h) * ALIGN
            out = ((b * T + t) * H + h) * D
            turn(q, y, start, out, h < H, c, s, p, D, HALF, False, BLOCK, REST)
        else:
            h = ((which - Q_BLOCKS) * HEADS + i).to(tl.int64)
            start = (b * k_b + t * k_t + h * k_h) * ALIGN
            out = (b * kc_b + h * kc_h + place * kc_s) * ALIGN
            turn(k, k_cache, start, out, (h < K) & kept, c, s, p, D, HALF, False, BLOCK, REST)
    else:
        h = ((which - Q_BLOCKS - K_BLOCKS) * HEADS + i).to(tl.int64)
        d = tl.arange(0, WIDTH)
        live = ((h < K) & kept)[:, None] & (d < D)[None, :]
        start = (b * v_b + t * v_t + h * v_h) * ALIGN
        out = (b * vc_b + h * vc_h + place * vc_s) * ALIGN
        values = tl.load(v + start[:, None] + d[None, :], mask=live, other=0.0)
        tl.store(v_cache + out[:, None] + d[None, :], values, mask=live)
