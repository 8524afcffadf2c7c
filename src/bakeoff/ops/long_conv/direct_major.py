"""Few taps where positions lie side by side (channel-major data): launches of `kernels/direct_major.cu`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff import cuda
from bakeoff.ops.long_conv.direct import DATA, KERNELS, Direct, Launch, filters
from bakeoff.ops.long_conv.rows import channels_last, room_like, rows
from bakeoff.ops.long_conv.run import Arguments, Gradients, Method

__all__ = ["SOURCE", "DirectMajor", "EitherLayout", "Tiling", "lanes", "options", "tiling"]

SOURCE = "ops/long_conv/kernels/direct_major.cu"
_VECTOR = 16  # bytes
_WARP = 32
_WAVES = 4  # of blocks at least, before a thread takes another piece: the last one may be nearly empty


class Tiling(NamedTuple):
    """How a kernel cuts channels and time."""

    vectors: int
    """A thread reads before it uses the first."""
    threads: int
    blocks: int
    """Wanted on a multiprocessor."""
    share: int
    """Pieces a group of threads takes, one after another, where there are enough for all."""


def tiling(kernel: str, taps: int, gates: int, wide: bool) -> Tiling:
    """How `kernel` is cut for so many taps, with or without gates, with wide loads or single ones: for 4 taps
    by sweeps on an H100 (results/h100/direct-along-time.csv), with more what fits into registers and keeps
    some 32 KiB on their way to a multiprocessor."""
    vectors = 2 if wide and taps <= 8 else 1
    if kernel == "convolve":
        if taps <= 16:
            return Tiling(vectors, 128, 8 if taps <= (4 if gates else 8) else 5, 4)
        return Tiling(vectors, 64, 8, 16)
    if taps <= 8:
        return Tiling(vectors, 128, 4 if gates else 8 if taps <= 4 else 5, 8)
    return Tiling(vectors, 128 if taps <= 16 else 64, 3 if gates else 4, 8 if taps <= 16 else 16)


def lanes(T: int, dtype: torch.dtype) -> int:
    """The power of 2 of threads that share a piece: as many as a sequence has vectors, up to a warp."""
    vectors = -(-T * dtype.itemsize // _VECTOR)
    return min(1 << (vectors - 1).bit_length(), _WARP)


def options(
    kernel: str, how: Tiling, lanes: int, wide: bool, taps: int, gates: int, dtype: torch.dtype
) -> list[str]:
    """What `kernels/direct_major.cu` is compiled with."""
    given = {"BACKWARD": KERNELS.index(kernel), "TAPS": taps, "GATES": gates, "DATA": DATA[dtype]}
    given |= {"LANES": lanes, "WIDE": int(wide)}
    given |= {"VECTORS": how.vectors, "THREADS": how.threads, "BLOCKS": how.blocks}
    return [f"-D{name}={value}" for name, value in given.items()]


class EitherLayout:
    """`direct`, on data whose positions or else channels lie side by side. See
    `bakeoff.ops.long_conv.run.Method`."""

    def __init__(self) -> None:
        self.last, self.major = Direct(), DirectMajor()

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied)."""
        return self._method(given.u).forward(given, keep)

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        return self._method(given.u).backward(dout, given, y, wanted)

    def _method(self, u: Tensor) -> Method:
        return self.major if _in_rows(u) else self.last


class DirectMajor:
    """See `bakeoff.ops.long_conv.run.Method`; for u whose positions lie side by side. Nothing is packed."""

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied)."""
        out = room_like(given.u)
        y = room_like(given.u) if keep else None
        read = [given.u, given.gate_in, given.gate_out]
        _run("convolve", given, read, [out, y])
        return out, y

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        found = [room_like(given.u) if wanted[i] else None for i in (0, 3, 4)]
        read = [dout, given.u, given.gate_in, given.gate_out, y]
        sums = _run("differentiate", given, read, found, wanted[1] or wanted[2])
        du, dgate_in, dgate_out = found
        dh = dskip = None
        if sums is not None:
            dh = sums.to(given.h.dtype)
            dskip = None if given.skip is None else sums[:, 0].to(given.skip.dtype)
        return Gradients(du, dh, dskip, dgate_in, dgate_out)


def _run(
    kernel: str,
    given: Arguments,
    read: Sequence[Tensor | None],
    written: Sequence[Tensor | None],
    tunes: bool = False,
) -> Tensor | None:
    """Fills the rooms in `written`. If it `tunes`, h's gradient [C, taps] in float64."""
    u, (h, skip) = given.u, filters(given)
    read = [None if x is None else _readable(x) for x in read]
    wide = u.shape[1] * u.itemsize % _VECTOR == 0 and all(x is None or _aligned(x) for x in (*read, *written))
    gates = (given.gate_in is not None) + 2 * (given.gate_out is not None)
    how = _launch(kernel, wide, *u.shape, h.shape[1], gates, u.dtype, u.device)
    partial = h.new_empty((how.programs, *h.shape)) if tunes else None
    room = next((x for x in written if x is not None), None)
    how.module.launch(
        kernel, how.blocks, how.threads, 0,
        *read, h, skip, *written, *([partial] if kernel == "differentiate" else []),
        *how.numbers, *h.stride(), *_steps(*read, room),
    )  # fmt: skip
    return None if partial is None else partial.sum(0, dtype=torch.float64)


@lru_cache(maxsize=4096)
def _launch(
    kernel: str,
    wide: bool,
    B: int,
    T: int,
    C: int,
    taps: int,
    gates: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    how, group = tiling(kernel, taps, gates, wide), lanes(T, dtype)
    module = _module(kernel, how, group, wide, taps, gates, dtype, device)
    groups = how.threads // group
    pieces = -(-T * dtype.itemsize // (_VECTOR * group))
    room = groups * how.blocks * cuda.limits(device).multiprocessors
    share = max(1, min(how.share, B * pieces * C // (_WAVES * room)))
    parts = -(-B * pieces // share)
    numbers = (T, C, B * pieces, share, pieces)
    return Launch(module, -(-parts * C // groups), how.threads, parts, numbers)


@lru_cache(maxsize=256)
def _module(
    kernel: str,
    how: Tiling,
    lanes: int,
    wide: bool,
    taps: int,
    gates: int,
    dtype: torch.dtype,
    device: torch.device,
) -> cuda.Module:
    return cuda.Module(SOURCE, [kernel], options(kernel, how, lanes, wide, taps, gates, dtype), device)


def _in_rows(u: Tensor) -> bool:
    """Whether positions, not channels, lie side by side in room for a result like u: mostly as in u."""
    to_b, to_t, to_c = u.stride()
    if to_t == 1 and to_b > 1 and to_c > 1:
        return True
    return not channels_last(u) and room_like(u).stride(1) == 1


def _readable(x: Tensor) -> Tensor:
    """x with positions side by side and steps that fit into C's int; a copy if need be."""
    if x.stride(1) != 1:
        return rows(x).mT[:, : x.shape[1]]
    return x if max(x.stride(0), x.stride(2)) < 1 << 31 else x.mT.contiguous().mT


def _aligned(x: Tensor) -> bool:
    """Whether each row of positions begins at a multiple of a vector."""
    return (x.data_ptr() | (x.stride(0) | x.stride(2)) * x.itemsize) % _VECTOR == 0


def _steps(*tensors: Tensor | None) -> list[int]:
    """From sequence to sequence and from channel to channel, of each."""
    return [step for x in tensors for step in ((0, 0) if x is None else (x.stride(0), x.stride(2)))]
