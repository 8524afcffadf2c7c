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

__all__ = [
    "CHUNK",
    "BackwardTiling",
    "ForwardTiling",
    "backward_tilings",
    "forward_tilings",
    "padded",
    "shares",
]

CHUNK = 64
"""Positions of a chunk: one constant, so that torch.compile can give buffers symbolic sizes."""


class ForwardTiling(NamedTuple):
    """How the forward is cut into programs."""

    warps: int
    """Of a program, each of whose threads has one channel."""
    unroll: int
    """Positions whose inputs are read together; a multiple of four."""
    group: int
    """Poles of one program of `_local`; a power of two."""


class BackwardTiling(NamedTuple):
    """How the backward is cut into programs."""

    warps: int
    """As in the forward, and so are `unroll` and `group`."""
    unroll: int
    group: int
    grad_group: int
    """Poles of one program of `_backward_poles`; a power of two."""
    busy: int
    """Warps of `_backward_poles` on a multiprocessor: into as many parts are the chunks dealt."""


def forward_tilings(C: int, K: int, lanes: int) -> list[ForwardTiling]:
    """What the forward may be launched with: the default, then those that differ from it least.

    A warp has `lanes` threads.
    """
    poles = padded(K)
    default = ForwardTiling(_warps(C, lanes), 8, min(poles, 8))
    warps, group = default.warps, default.group
    others = [
        default._replace(unroll=16),
        default._replace(unroll=4),
        default._replace(warps=warps // 2),
        default._replace(warps=warps * 2),
        default._replace(group=group // 2),
        default._replace(warps=warps // 2, unroll=16),
        default._replace(warps=warps // 2, group=group // 2),
        default._replace(group=group // 4),
        default._replace(warps=1),
    ]
    kept = [tiling for tiling in others if tiling.warps >= 1 and tiling.group >= 1]
    return [*dict.fromkeys([default, *kept])]


def backward_tilings(C: int, K: int, lanes: int) -> list[BackwardTiling]:
    """What the backward may be launched with: the default, then those that differ from it least."""
    poles = padded(K)
    default = BackwardTiling(_warps(C, lanes), 8, min(poles, 8), min(poles, 2), 16)
    warps, group = default.warps, default.group
    others = [
        default._replace(busy=32),
        default._replace(busy=8),
        default._replace(unroll=4),
        default._replace(unroll=16),
        default._replace(grad_group=1),
        default._replace(warps=warps // 2),
        default._replace(warps=warps * 2),
        default._replace(group=group // 2),
        default._replace(grad_group=1, busy=32),
        default._replace(warps=warps // 2, busy=32),
        default._replace(unroll=4, busy=32),
    ]
    kept = [tiling for tiling in others if tiling.warps >= 1 and tiling.group >= 1]
    return [*dict.fromkeys([default, *kept])]


def _warps(C: int, lanes: int) -> int:
    """Of a program: as many as channels need, up to four."""
    warps = 1
    while warps < 4 and lanes * warps < C:
        warps *= 2
    return warps


def shares(chunks: int, C: int, K: int, tiling: BackwardTiling, multiprocessors: int, lanes: int) -> int:
    """Into how many parts `chunks`, those of all sequences, are dealt for the poles' gradients."""
    programs = -(-C // (lanes * tiling.warps)) * (padded(K) // tiling.grad_group)
    return min(chunks, max(1, multiprocessors * tiling.busy // tiling.warps // programs))


def padded(K: int) -> int:
    """The least power of two that is not below K."""
    return 1 << (K - 1).bit_length()
