"""A few taps, one product after another: the launches of `kernels.direct`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.hardware import multiprocessors
from bakeoff.launch import Launcher
from bakeoff.ops.long_conv.kernels import direct
from bakeoff.ops.long_conv.kernels.direct import CHANNELS, TIMES, WARPS, WAVES
from bakeoff.ops.long_conv.rows import channels_last, room_like
from bakeoff.ops.long_conv.run import Arguments, Gradients

__all__ = ["Direct"]

_forward, _backward = Launcher(direct._forward), Launcher(direct._backward)


class Direct:
    """See `bakeoff.ops.long_conv.run.Method`. Nothing is packed, and what gates multiplied is made again."""

    keeps = False

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, None)."""
        del keep
        out, h = room_like(given.u), given.h
        last = channels_last(out)
        u = _laid_out(given.u, last)
        gate_in, gate_out = _optional(given.gate_in, last), _optional(given.gate_out, last)
        unit = _unit(last, u, gate_in, gate_out, out)
        steps = [_steps(x, last, unit) for x in (u, gate_in, gate_out, out)]
        (tiles, columns), sizes = _cut(u, last, unit)
        _forward(
            (tiles, columns, 1),
            u, h, _dense(given.skip), gate_in, gate_out, out, *sizes, *sum(steps, ()), *h.stride(),
            TAPS=_taps(u, h), LAST=last, UNIT=unit, TIMES=TIMES, CHANNELS=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
        return out, None

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        del y
        h, skip, room = given.h, given.skip, room_like(given.u)
        last = channels_last(room)
        du = room if wanted[0] else None
        dgate_in, dgate_out = (room_like(room) if want else None for want in wanted[3:5])
        dout, u = _laid_out(dout, last), _laid_out(given.u, last)
        gate_in, gate_out = _optional(given.gate_in, last), _optional(given.gate_out, last)
        read = (dout, u, gate_in, gate_out)
        taps = _taps(u, h)
        unit = _unit(last, *read, room)
        steps = [_steps(x, last, unit) for x in (*read, room)]
        (tiles, columns), sizes = _cut(u, last, unit)
        programs = min(tiles, -(-multiprocessors(u.get_device()) * WAVES // columns))
        tunes = wanted[1] or wanted[2]
        partial = u.new_empty((programs, taps, u.shape[2]), dtype=torch.float32) if tunes else None
        _backward(
            (programs, columns, 1),
            dout, u, h, _dense(skip), gate_in, gate_out, du, dgate_in, dgate_out, partial,
            *sizes, tiles, *sum(steps, ()), *h.stride(),
            TAPS=taps, LAST=last, UNIT=unit, TIMES=TIMES, CHANNELS=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
        dh, dskip = (None, None) if partial is None else _filters(partial, h, skip)
        return Gradients(du, dh, dskip, dgate_in, dgate_out)


def _filters(partial: Tensor, h: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of h and skip from every program's share; 0 for taps that reach beyond every sequence."""
    sums = partial.sum(0)
    dh = torch.zeros_like(h, memory_format=torch.contiguous_format)
    dh[:, : sums.shape[0]] = sums.t()
    return dh, None if skip is None else sums[0].to(skip.dtype)


def _taps(u: Tensor, h: Tensor) -> int:
    return min(u.shape[1], h.shape[1])


def _cut(u: Tensor, last: bool, unit: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """How many tiles there are along time and along channels, and what the kernels take as T, C and N."""
    B, T, C = u.shape
    tiles = -(-T // TIMES)
    sizes = (T, C // unit, tiles) if last else (T // unit, C, tiles)
    return (tiles * B, -(-C // CHANNELS)), sizes


def _laid_out(x: Tensor, last: bool) -> Tensor:
    """x with a step of 1 along the channels if they come `last`, else along time; a copy if need be."""
    if x.stride(2 if last else 1) == 1:
        return x
    return x.contiguous() if last else x.transpose(1, 2).contiguous().transpose(1, 2)


def _optional(x: Tensor | None, last: bool) -> Tensor | None:
    return None if x is None else _laid_out(x, last)


def _dense(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.contiguous()


def _steps(x: Tensor | None, last: bool, unit: int) -> tuple[int, ...]:
    """From sequence to sequence, and along the other axis, in units."""
    return (0, 0) if x is None else (x.stride(0) // unit, x.stride(1 if last else 2) // unit)


def _unit(last: bool, *tensors: Tensor | None) -> int:
    """8 where every step, and the size of the axis without one, is a multiple of that."""
    given = [x for x in tensors if x is not None]
    numbers = [given[0].shape[2 if last else 1], *(step for x in given for step in _steps(x, last, 1))]
    return 1 if any(number % 8 for number in numbers) else 8
