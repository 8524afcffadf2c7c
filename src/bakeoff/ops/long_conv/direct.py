"""Few taps, one product after another: the launches of `kernels/direct.cu`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff import cuda
from bakeoff.ops.long_conv.rows import room_like
from bakeoff.ops.long_conv.run import Arguments, Gradients

__all__ = ["DATA", "KERNELS", "SOURCE", "Direct", "Launch", "Tiling", "filters", "options", "tiling"]

SOURCE = "ops/long_conv/kernels/direct.cu"
KERNELS = ("convolve", "differentiate")
DATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EDGE = 0.5  # what reading a value at a piece's edge costs, in positions


class Tiling(NamedTuple):
    """How a kernel cuts channels and time."""

    steps: int
    threads: int
    blocks: int
    """Wanted on a multiprocessor."""


def tiling(kernel: str, taps: int, gates: int) -> Tiling:
    """How `kernel` is cut for so many taps, with or without gates: by sweeps with 4, 16, 32 and 64 taps on an
    H100 (results/h100/direct.csv)."""
    if kernel == "convolve":
        return Tiling(8, 64, 5 if taps <= 8 else 4)
    if taps <= 8:
        return Tiling(8, 64, 8 if gates else 12)
    if taps <= 16:
        return Tiling(8, 64, 6)
    return Tiling(8 if taps <= 32 else 6, 64, 4)


def options(kernel: str, how: Tiling, taps: int, gates: int, dtype: torch.dtype) -> list[str]:
    """What `kernels/direct.cu` is compiled with."""
    given = {"BACKWARD": KERNELS.index(kernel), "TAPS": taps, "GATES": gates, "DATA": DATA[dtype]}
    given |= {"STEPS": how.steps, "THREADS": how.threads, "BLOCKS": how.blocks}
    return [f"-D{name}={value}" for name, value in given.items()]


class Direct:
    """See `bakeoff.ops.long_conv.run.Method`. Nothing is packed."""

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied)."""
        out = room_like(given.u)
        y = room_like(given.u) if keep else None
        read = [_readable(x) for x in (given.u, given.gate_in, given.gate_out)]
        h, skip = filters(given)
        how = _launch("convolve", *_signature(given))
        how.module.launch(
            "convolve", how.blocks, how.threads, 0,
            *read, h, skip, out, y, *how.numbers, *h.stride(), *_steps(*read, out),
        )  # fmt: skip
        return out, y

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        rooms = [room_like(given.u) if wanted[i] else None for i in (0, 3, 4)]
        read = [_readable(x) for x in (dout, given.u, given.gate_in, given.gate_out, y)]
        h, skip = filters(given)
        how = _launch("differentiate", *_signature(given))
        tunes = wanted[1] or wanted[2]
        # Its sum is h's gradient.
        partial = h.new_empty((how.programs, h.shape[1], h.shape[0])) if tunes else None
        room = next((x for x in rooms if x is not None), None)
        how.module.launch(
            "differentiate", how.blocks, how.threads, 0,
            *read, h, skip, *rooms, partial, *how.numbers, *h.stride(), *_steps(*read, room),
        )  # fmt: skip
        du, dgate_in, dgate_out = rooms
        dh = dskip = None
        if partial is not None:
            sums = partial.sum(0)
            dh = torch.empty_like(given.h, memory_format=torch.contiguous_format).copy_(sums.t())
            dskip = None if given.skip is None else sums[0].to(given.skip.dtype)
        return Gradients(du, dh, dskip, dgate_in, dgate_out)


class Launch(NamedTuple):
    """Of one kernel, as far as it depends on metadata alone."""

    module: cuda.Module
    blocks: int
    threads: int
    programs: int
    """Blocks, or groups of threads, with the same channels."""
    numbers: tuple[int, ...]
    """How the work is cut, as the kernel takes it."""


@lru_cache(maxsize=4096)
def _launch(
    kernel: str, B: int, T: int, C: int, taps: int, gates: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    how = tiling(kernel, taps, gates)
    module = _module(kernel, how, taps, gates, dtype, device)
    room = how.blocks * cuda.limits(device).multiprocessors
    columns = -(-C // how.threads)
    pieces = _pieces(columns * B, T, taps, how.steps, room)
    length = -(-T // (pieces * how.steps)) * how.steps
    units = B * pieces
    if kernel == "convolve":
        return Launch(module, columns * units, how.threads, units, (T, C, columns, pieces, length))
    share = -(-units * columns // room)
    programs = -(-units // share)
    numbers = (T, C, columns, units, share, pieces, length)
    return Launch(module, columns * programs, how.threads, programs, numbers)


@lru_cache(maxsize=256)
def _module(
    kernel: str, how: Tiling, taps: int, gates: int, dtype: torch.dtype, device: torch.device
) -> cuda.Module:
    return cuda.Module(SOURCE, [kernel], options(kernel, how, taps, gates, dtype), device)


def _pieces(rows: int, T: int, taps: int, steps: int, room: int) -> int:
    """Into how many pieces a sequence is cut, at the least cost in waves of `room` blocks."""

    def cost(pieces: int) -> float:
        length = -(-T // (pieces * steps)) * steps
        return -(-rows * pieces // room) * (length + _EDGE * taps)

    most = max(1, T // max(taps, 4 * steps))
    return min(range(1, most + 1), key=cost)


def _signature(given: Arguments) -> tuple[int, int, int, int, int, torch.dtype, torch.device]:
    """What `_launch` asks of the arguments."""
    u = given.u
    B, T, C = u.shape
    gates = (given.gate_in is not None) + 2 * (given.gate_out is not None)
    return B, T, C, given.h.shape[1], gates, u.dtype, u.device


def filters(given: Arguments) -> tuple[Tensor, Tensor | None]:
    """The filter and the skip, in float32."""
    return given.h.float(), None if given.skip is None else given.skip.float().contiguous()


def _readable(x: Tensor | None) -> Tensor | None:
    """x with channels side by side and offsets in a sequence that fit into C's int; a copy if need be."""
    if x is None:
        return None
    fits = x.stride(2) == 1 and max(x.stride(0), x.stride(1) * x.shape[1]) < 1 << 31
    return x if fits else x.contiguous()


def _steps(*tensors: Tensor | None) -> list[int]:
    """From sequence to sequence and from position to position, of each."""
    return [step for x in tensors for step in ((0, 0) if x is None else x.stride()[:2])]
