"""How `channel_major.cu` is launched: few taps where positions lie side by side."""

from pathlib import Path

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.channel_major.rows import channels_last, pack, result_like
from bakeoff.kernels.cuda import DATA, cuda_kernel
from bakeoff.kernels.plan import Plan
from bakeoff.ops.long_conv.direct.cut import Cut, Laid
from bakeoff.ops.long_conv.direct.tilings import Tiling, channel_major

__all__ = [
    "SOURCE",
    "STRIDES",
    "TAPS_FIRST",
    "cut",
    "laid",
    "lanes",
    "macros",
    "positions_side_by_side",
    "readable",
]

SOURCE = Path(__file__).with_name("channel_major.cu")
STRIDES = "bc"
"""The dimensions of `Laid.strides`, by the kernels' names."""
TAPS_FIRST = False
"""Whether sums for the filters are [.., taps, C]."""
_VECTOR = 16  # bytes
_WARP = 32
_WAVES = 4  # of blocks at least, before a thread takes another piece: the last one may be nearly empty


def positions_side_by_side(u: Tensor) -> bool:
    """Whether positions, not channels, lie side by side in a result like u: mostly as in u."""
    b, t, c = u.stride()
    if t == 1 and b > 1 and c > 1:
        return True
    return not channels_last(u) and result_like(u).stride(1) == 1


def readable(plan: Plan, x: Tensor) -> Laid:
    """x with positions side by side and strides that fit into C's int; a copy if need be."""
    if x.stride(1) != 1:
        rows = pack(plan, x)
        return Laid(rows.data, rows.strides)
    if max(x.stride(0), x.stride(2)) < 1 << 31:
        return laid(x)
    T, C = x.shape[1:]
    return Laid(plan.derive(_channel_major_copy, x), (C * T, T))


def laid(x: Tensor) -> Laid:
    """x itself."""
    return Laid(x, (x.stride(0), x.stride(2)))


def cut(
    plan: Plan, u: Tensor, taps: int, gates: int, tensors: list[Laid], tiling: Tiling | None, backward: bool
) -> Cut:
    """The kernel, with accesses of whole vectors where all these tensors, like u, allow them."""
    (B, T, C), dtype = u.shape, u.dtype
    wide = T * dtype.itemsize % _VECTOR == 0 and all(_aligned(x, u) for x in tensors)
    chosen = tiling or channel_major(taps, gates, wide, backward)[0]
    group = lanes(T, dtype)
    groups = chosen.threads // group
    pieces = -(-T * dtype.itemsize // (_VECTOR * group))
    resident = groups * chosen.blocks * hardware.multiprocessors(u.get_device())
    share = max(1, min(chosen.pieces, B * pieces * C // (_WAVES * resident)))
    parts = -(-B * pieces // share)
    given = macros(chosen, group, wide, taps, gates, dtype, backward=backward)
    kernel = cuda_kernel(SOURCE, "differentiate" if backward else "convolve", plan.device, **given)
    numbers = {"T": T, "C": C, "all": B * pieces, "share": share, "pieces": pieces}
    return Cut(kernel, -(-parts * C // groups), chosen.threads, numbers, (parts, C, taps))


def lanes(T: int, dtype: torch.dtype) -> int:
    """The power of 2 of threads that share a piece: as many as a sequence has vectors, up to a warp."""
    vectors = -(-T * dtype.itemsize // _VECTOR)
    return min(1 << (vectors - 1).bit_length(), _WARP)


def macros(
    tiling: Tiling, lanes: int, wide: bool, taps: int, gates: int, dtype: torch.dtype, *, backward: bool
) -> dict[str, int]:
    """What `channel_major.cu` is compiled with."""
    return {
        "BACKWARD": backward, "TAPS": taps, "GATES": gates, "DATA": DATA[dtype], "LANES": lanes,
        "WIDE": wide, "VECTORS": tiling.reads, "THREADS": tiling.threads, "BLOCKS": tiling.blocks,
    }  # fmt: skip


def _channel_major_copy(x: Tensor) -> Tensor:
    return x.mT.contiguous()


def _aligned(x: Laid, u: Tensor) -> bool:
    """Whether each row of positions, of tensors like u, begins at a multiple of a vector."""
    b, c = x.strides
    steps = (b if u.shape[0] > 1 else 0) | (c if u.shape[2] > 1 else 0)
    return (x.data.data_ptr() | steps * u.itemsize) % _VECTOR == 0
