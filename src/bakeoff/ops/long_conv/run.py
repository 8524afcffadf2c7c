"""What a method of computing long_conv does, and what those that convolve rows pack, unpack and keep."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bakeoff.ops.long_conv.rows import empty_rows, result, room_like, rows, unpack

__all__ = ["Arguments", "Convolver", "Gradients", "Method", "OnRows"]


class Arguments(NamedTuple):
    """As the op takes them: u, gate_in, gate_out [B, T, C], h [C, L], skip [C]."""

    u: Tensor
    h: Tensor
    skip: Tensor | None
    gate_in: Tensor | None
    gate_out: Tensor | None


class Gradients(NamedTuple):
    """Of every argument; None where it isn't wanted."""

    u: Tensor | None
    h: Tensor | None
    skip: Tensor | None
    gate_in: Tensor | None
    gate_out: Tensor | None


class Method(Protocol):
    """Computes long_conv and its gradients, for arguments that a candidate supports; causal. Results lie as
    `room_like` has them."""

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied, which `backward` takes as y)."""

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""


class Convolver(Protocol):
    """Convolves rows [B, C, R] of T times, which are 0 beyond T."""

    def convolve(self, x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
        """y = h * x (correlated with h where `sign` is -1) + skip x."""

    def differentiate(
        self, x: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, dx: Tensor | None, T: int
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of h and skip; that of x goes into `dx` if it is given."""


class OnRows:
    """The method of a convolver of rows."""

    def __init__(self, convolver: Convolver) -> None:
        self.convolver = convolver

    def forward(self, given: Arguments, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(the output, and if `keep` what `gate_out` multiplied, which is its gradient's other factor)."""
        u, gate_out = given.u, given.gate_out
        v = rows(u, given.gate_in)
        out, y = _room(u, gate_out is None and not keep)
        self.convolver.convolve(v, given.h, given.skip, y, u.shape[1], 1)
        return (out, None) if out is not None else unpack(y, u, gate_out, both=keep)

    def backward(self, dout: Tensor, given: Arguments, y: Tensor | None, wanted: Sequence[bool]) -> Gradients:
        """The gradients that are `wanted`, in the arguments' order."""
        u, h, skip, gate_in, gate_out = given
        du = dh = dskip = dgate_in = None
        moves, tunes = wanted[0] or wanted[3], wanted[1] or wanted[2]
        if moves or tunes:
            dy, dv = rows(dout, gate_out), None
            if moves:
                du, dv = _room(u, gate_in is None and not wanted[3])
            if tunes:
                dh, dskip = self.convolver.differentiate(rows(u, gate_in), dy, h, skip, dv, u.shape[1])
            elif dv is not None:
                self.convolver.convolve(dy, h, skip, dv, u.shape[1], -1)
            if dv is not None and du is None:
                du, dgate_in = unpack(dv, u, gate_in, u, both=wanted[3])
        dgate_out = torch.mul(dout, y, out=room_like(u)) if wanted[4] and y is not None else None
        return Gradients(du if wanted[0] else None, dh, dskip, dgate_in, dgate_out)


def _room(like: Tensor, plain: bool) -> tuple[Tensor | None, Tensor]:
    """Rows for a result like `like`, and that result itself where they are the same memory."""
    if plain:
        out, place = result(like)
        if place is not None:
            return out, place
    return None, empty_rows(like)
