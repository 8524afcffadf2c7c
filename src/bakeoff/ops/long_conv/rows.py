"""Between [B, T, C] of any strides and rows of time [B, C, R], which `toeplitz` and `fft` work on.

Rows begin at 16-byte boundaries and have a multiple of ROW values; those beyond T are 0. Gates are
multiplied on the way, in the data's own dtype, as a model would.
"""

import torch

from bakeoff.launch import Launcher
from bakeoff.ops.long_conv.kernels import pack

__all__ = ["ROW", "channels_last", "empty_rows", "result", "room_like", "rows", "unpack"]

ROW = 128
_TIMES, _CHANNELS = 64, 64

_pack, _unpack = Launcher(pack._pack), Launcher(pack._unpack)


def channels_last(x: torch.Tensor) -> bool:
    """Whether neighbouring channels, not neighbouring times, lie side by side."""
    return x.stride(2) == 1 and not (x.stride(1) == 1 and x.shape[2] == 1)


def _steps(x: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else x.stride()  # type: ignore[return-value]


def _readable(x: torch.Tensor) -> torch.Tensor:
    """`x` with times or channels side by side; a copy if need be."""
    return x if x.stride(2) == 1 or x.stride(1) == 1 else x.contiguous()


def room_like(x: torch.Tensor) -> torch.Tensor:
    """Room for a result laid out like x, if x has times or channels side by side and offsets along time fit
    into 31 bits."""
    out = torch.empty_like(x)
    same = out.stride(2) == 1 if x.stride(2) == 1 else out.stride(1) == 1
    return out if same and out.stride(1) * x.shape[1] < 1 << 31 else x.new_empty(x.shape)


def _are_rows(x: torch.Tensor) -> bool:
    """Whether x [B, T, C], seen as [B, C, T], is what `rows` would make of it."""
    return (
        x.stride(1) == 1
        and x.shape[1] % ROW == 0
        and (x.stride(0) | x.stride(2)) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def empty_rows(x: torch.Tensor) -> torch.Tensor:
    """Room for the rows [B, C, R] of x [B, T, C]."""
    B, T, C = x.shape
    return x.new_empty((B, C, -(-T // ROW) * ROW))


def rows(x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x * gate as rows [B, C, R] in x's dtype; x itself, seen so, where it is that already."""
    if gate is None and _are_rows(x):
        return x.transpose(1, 2)
    x = _readable(x)
    gate = None if gate is None else _readable(gate)
    B, T, C = x.shape
    found = empty_rows(x)
    tiles = found.shape[2] // _TIMES
    _pack(
        (tiles * B, -(-C // _CHANNELS), 1),
        x, gate, found, T, C, tiles, *_steps(x), *_steps(gate), found.stride(0), found.stride(1),
        X_LAST=channels_last(x), G_LAST=gate is not None and channels_last(gate),
        TIMES=_TIMES, CHANNELS=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return found


def result(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for a result like `like`, and the rows that it is, if it is rows."""
    out = room_like(like)
    return out, out.transpose(1, 2) if _are_rows(out) else None


def unpack(
    found: torch.Tensor,
    like: torch.Tensor,
    gate: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    *,
    both: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows * gate, rows * other if `both`), each shaped and laid out like `like`; None is a gate of 1."""
    B, T, C = like.shape
    out = room_like(like)
    second = room_like(like) if both else None
    gate = None if gate is None else _readable(gate)
    other = None if other is None else _readable(other)
    tiles = -(-T // _TIMES)
    _unpack(
        (tiles * B, -(-C // _CHANNELS), 1),
        found, gate, other, out, second, T, C, tiles, found.stride(0), found.stride(1),
        *_steps(gate), *_steps(other), *_steps(out),
        G_LAST=gate is not None and channels_last(gate),
        O_LAST=other is not None and channels_last(other),
        OUT_LAST=channels_last(out), TIMES=_TIMES, CHANNELS=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out, second
