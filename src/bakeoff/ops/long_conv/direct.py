"""Few taps, one product after another: the launches of `kernels/direct.cu`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff import cuda
from bakeoff.ops.long_conv.rows import room_like
from bakeoff.ops.long_conv.run import Arguments, Gradients

__all__ = ["KERNELS", "SOURCE", "Direct", "Tiling", "options", "tiling"]

SOURCE = "ops/long_conv/kernels/direct.cu"
KERNELS = ("convolve", "differentiate")
_DATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
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
    given = {"BACKWARD": KERNELS.index(kernel), "TAPS": taps, "GATES": gates, "DATA": _DATA[dtype]}
    given |= {"STEPS": how.steps, "THREADS": how.threads, "BLOCKS": how.blocks}
    return [f"-D{name}={value}" for name, value in given.items()]


class Direct:
    """See `bakeoff.ops.long_conv.run.Method`. Nothing is packed."""

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied)."""
        call = _Call(given)
        out = room_like(given.u)
        y = room_like(given.u) if keep else None
        call.convolve(out, y)
        return out, y

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        call = _Call(given)
        du, dgate_in, dgate_out = (room_like(given.u) if wanted[i] else None for i in (0, 3, 4))
        partial = call.differentiate(_readable(dout), y, du, dgate_in, dgate_out, wanted[1] or wanted[2])
        dh = dskip = None
        if partial is not None:
            sums, h, skip = partial.sum(0), given.h, given.skip
            dh = torch.empty_like(h, memory_format=torch.contiguous_format).copy_(sums.t())
            dskip = None if skip is None else sums[0].to(skip.dtype)
        return Gradients(du, dh, dskip, dgate_in, dgate_out)


class _Call:
    """What the launches of one call share."""

    def __init__(self, given: Arguments) -> None:
        self.u, self.gate_in, self.gate_out = (
            None if x is None else _readable(x) for x in (given.u, given.gate_in, given.gate_out)
        )
        self.B, self.T, self.C = given.u.shape
        self.h = given.h.float()
        self.taps = self.h.shape[1]
        self.none = self.h.new_empty(0)
        self.skip = self.none if given.skip is None else given.skip.float().contiguous()
        self.gates = (given.gate_in is not None) + 2 * (given.gate_out is not None)
        self.dtype, self.device = given.u.dtype, given.u.device
        self.multiprocessors = cuda.limits(self.device).multiprocessors

    def convolve(self, out: Tensor, y: Tensor | None) -> None:
        """Puts the output into `out`, and what the outer gate multiplies into `y`."""
        read = (self.u, self.gate_in, self.gate_out)
        how, kernels = self._kernels("convolve")
        columns, pieces, length = self._cut(how)
        kernels.launch(
            "convolve", columns * self.B * pieces, how.threads, 0,
            *self._all(*read), self.h, self.skip, out, self._all(y)[0],
            self.T, self.C, columns, pieces, length, *self.h.stride(), *_steps(*read, out),
        )  # fmt: skip

    def differentiate(
        self,
        dout: Tensor,
        y: Tensor | None,
        du: Tensor | None,
        dgate_in: Tensor | None,
        dgate_out: Tensor | None,
        tunes: bool,
    ) -> Tensor | None:
        """Fills the rooms it is given. If it `tunes`, [programs, taps, C], whose sum is h's gradient."""
        room = next((x for x in (du, dgate_in, dgate_out) if x is not None), dout)
        read = (dout, self.u, self.gate_in, self.gate_out, y)
        how, kernels = self._kernels("differentiate")
        columns, pieces, length = self._cut(how)
        units = self.B * pieces
        share = -(-units * columns // (how.blocks * self.multiprocessors))
        programs = -(-units // share)
        partial = self.h.new_empty((programs, self.taps, self.C)) if tunes else None
        kernels.launch(
            "differentiate", columns * programs, how.threads, 0,
            *self._all(*read), self.h, self.skip, *self._all(du, dgate_in, dgate_out, partial),
            self.T, self.C, columns, units, share, pieces, length, *self.h.stride(), *_steps(*read, room),
        )  # fmt: skip
        return partial

    def _kernels(self, kernel: str) -> tuple[Tiling, cuda.Module]:
        how = tiling(kernel, self.taps, self.gates)
        return how, _module(kernel, how, self.taps, self.gates, self.dtype, self.device)

    def _cut(self, how: Tiling) -> tuple[int, int, int]:
        """Blocks along the channels, pieces of each sequence, and their length."""
        columns = -(-self.C // how.threads)
        pieces = _pieces(columns * self.B, self.T, self.taps, how.steps, how.blocks * self.multiprocessors)
        return columns, pieces, -(-self.T // (pieces * how.steps)) * how.steps

    def _all(self, *tensors: Tensor | None) -> list[Tensor]:
        return [self.none if x is None else x for x in tensors]


@lru_cache(maxsize=256)
def _module(
    kernel: str, how: Tiling, taps: int, gates: int, dtype: torch.dtype, device: torch.device
) -> cuda.Module:
    return cuda.Module(SOURCE, [kernel], options(kernel, how, taps, gates, dtype), device)


@lru_cache(maxsize=1024)
def _pieces(rows: int, T: int, taps: int, steps: int, room: int) -> int:
    """Into how many pieces a sequence is cut, at the least cost in waves of `room` blocks."""

    def cost(pieces: int) -> float:
        length = -(-T // (pieces * steps)) * steps
        return -(-rows * pieces // room) * (length + _EDGE * taps)

    most = max(1, T // max(taps, 4 * steps))
    return min(range(1, most + 1), key=cost)


def _readable(x: Tensor) -> Tensor:
    """x with channels side by side and offsets in a sequence that fit into C's int; a copy if need be."""
    fits = x.stride(2) == 1 and max(x.stride(0), x.stride(1) * x.shape[1]) < 1 << 31
    return x if fits else x.contiguous()


def _steps(*tensors: Tensor | None) -> list[int]:
    """From sequence to sequence and from position to position, of each."""
    return [step for x in tensors for step in ((0, 0) if x is None else x.stride()[:2])]
