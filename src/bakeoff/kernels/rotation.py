"""Rotary position embedding inside a kernel, of heads that stand in a tile's rows."""

import triton
import triton.language as tl

__all__ = ["turn"]


@triton.jit
def turn(
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
    """Rows of x at `start` to rows of y at `out`; rows are whole heads, [R turned | D - R copied]."""
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
