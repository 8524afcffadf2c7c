"""pole_scan in Triton: a channel's poles walk through time in one thread's registers.

Time is cut into chunks of L positions. `edges` walks all chunks at once from zero states and passes states
from chunk to chunk; `forward` walks the chunks again from their true states and writes y. `backward` does the
same in reverse for u, and for the poles walks forward once more, carrying Z and its derivative.

A walk costs 4 K to 16 K float32 FMAs a position and reads u once; at K = 8 that is of the order of what
the memory takes, and unlike matrix products on tensor cores it is float32 throughout.

Precision: roundings add up along a walk, for a constant input all in the same direction, and a rounded p is a
slightly different pole. So walks take two or four positions at once, with that power of p to twice float32's
precision; what happens once a chunk is computed in float64, and so is the end of a walk for the poles.

Tiles are [KP poles, BLOCK channels] with BLOCK = the threads of a program: the compiler then keeps all poles
of a channel in one thread, and sums over poles exchange nothing. C is a run-time number, because knowing it
makes the compiler read tables four channels at a time, which destroys that layout.

Buffers, complex numbers as two rows, re and im: table [TABLE_ROWS, KP, C] float32, whose rows `poles` names;
powers [4, KP, C] float64 = p^L and p^(length of the last chunk); edges and handed [B, G, 2, KP, C] float32 =
states at the chunks' beginnings and ends; partial [SHARES, 4, KP, C] float64 = sums for the poles' gradients.
"""

from typing import NamedTuple

__all__ = ["CHUNK", "UNROLL", "Tiling", "padded", "tiling"]

CHUNK = 64
"""Positions of a chunk: one constant, so that torch.compile can give buffers symbolic sizes."""

UNROLL = 8
"""Positions whose inputs are read together; a multiple of four."""


class Tiling(NamedTuple):
    """How a case is cut."""

    poles: int
    """K rounded up to a power of two."""
    block: int
    """Channels of a program, one a thread."""
    warps: int
    group: int
    """Poles of one program of the parameters' gradients (and of up to four times as many in `_local`)."""
    shares: int
    """Into how many parts the chunks are dealt for the parameters' gradients."""


def tiling(B: int, T: int, C: int, K: int, sms: int, lanes: int = 32) -> Tiling:
    """Programs of up to four warps; shares so that the parameters' gradients occupy `sms` multiprocessors."""
    poles = padded(K)
    warps = 1
    while warps < 4 and lanes * warps < C:
        warps *= 2
    block = lanes * warps
    group = min(poles, 2)
    programs = -(-C // block) * (poles // group)
    shares = min(B * -(-T // CHUNK), max(1, sms * 16 // warps // programs))
    return Tiling(poles, block, warps, group, shares)


def padded(K: int) -> int:
    """The least power of two that is not below K."""
    return 1 << (K - 1).bit_length()
