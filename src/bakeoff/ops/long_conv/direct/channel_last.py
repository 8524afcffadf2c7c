"""How `channel_last.cu` is launched: few taps where channels lie side by side."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.cuda import DATA, cuda_kernel
from bakeoff.kernels.plan import Plan
from bakeoff.ops.long_conv.direct.cut import Cut, Laid
from bakeoff.ops.long_conv.direct.tilings import Tiling, channel_last

__all__ = ["SOURCE", "STRIDES", "TAPS_FIRST", "cut", "laid", "macros", "readable"]

SOURCE = Path(__file__).with_name("channel_last.cu")
STRIDES = "bt"
"""The dimensions of `Laid.strides`, by the kernels' names."""
TAPS_FIRST = True
"""Whether sums for the filters are [.., taps, C]."""
_EDGE = 0.5  # what reading a value at a piece's edge costs, in positions


def readable(plan: Plan, x: Tensor) -> Laid:
    """x with channels side by side and offsets in a sequence that fit into C's int; a copy if need be."""
    fits = x.stride(2) == 1 and max(x.stride(0), x.stride(1) * x.shape[1]) < 1 << 31
    return laid(x if fits else plan.contiguous(x))


def laid(x: Tensor) -> Laid:
    """x itself."""
    return Laid(x, (x.stride(0), x.stride(1)))


def cut(
    plan: Plan, u: Tensor, taps: int, gates: int, tensors: list[Laid], tiling: Tiling | None, backward: bool
) -> Cut:
    """The kernel, for as many channels a thread as the accesses to all these tensors, like u, allow."""
    B, T, C = u.shape
    chosen = tiling or channel_last(taps, gates, u.itemsize, backward)[0]
    together = chosen.channels
    while together > 1 and not all(_aligned(x.data, together) for x in tensors):
        together //= 2
    chosen = chosen._replace(channels=together)
    given = macros(chosen, taps, gates, u.dtype, backward=backward)
    kernel = cuda_kernel(SOURCE, "differentiate" if backward else "convolve", plan.device, **given)
    groups, multiprocessors = C // together, hardware.multiprocessors(u.get_device())
    pieces, length = _pieces(chosen, B, T, taps, groups, multiprocessors)
    numbers = {"T": T, "groups": groups, "all": B * pieces, "pieces": pieces, "length": length}
    programs = B * pieces
    if backward:
        share = -(-groups * B * pieces // (chosen.blocks * multiprocessors * chosen.threads))
        programs = -(-B * pieces // share)
        numbers |= {"programs": programs, "share": share}
    return Cut(kernel, -(-groups * programs // chosen.threads), chosen.threads, numbers, (programs, taps, C))


def macros(tiling: Tiling, taps: int, gates: int, dtype: torch.dtype, *, backward: bool) -> dict[str, int]:
    """What `channel_last.cu` is compiled with."""
    return {
        "BACKWARD": backward, "TAPS": taps, "GATES": gates, "DATA": DATA[dtype], "CHANNELS": tiling.channels,
        "STEPS": tiling.reads, "THREADS": tiling.threads, "BLOCKS": tiling.blocks,
    }  # fmt: skip


def _aligned(x: Tensor, channels: int) -> bool:
    """Whether so many channels of every position are one aligned access."""
    B, T, C = x.shape
    steps = C | (x.stride(0) if B > 1 else 0) | (x.stride(1) if T > 1 else 0)
    return steps % channels == 0 and x.data_ptr() % (channels * x.itemsize) == 0


@lru_cache(maxsize=4096)
def _pieces(tiling: Tiling, B: int, T: int, taps: int, groups: int, multiprocessors: int) -> tuple[int, int]:
    """Into how many pieces sequences are cut, at the least cost in waves of blocks; the pieces' length."""
    room, steps = tiling.blocks * multiprocessors, tiling.reads

    def length(pieces: int) -> int:
        return -(-T // (pieces * steps)) * steps

    def cost(pieces: int) -> float:
        blocks = -(-groups * B * pieces // tiling.threads)
        return -(-blocks // room) * (length(pieces) + _EDGE * taps)

    most = max(1, T // max(taps, 4 * steps))
    best = min(range(min(tiling.pieces, most), most + 1), key=cost)
    return best, length(best)
