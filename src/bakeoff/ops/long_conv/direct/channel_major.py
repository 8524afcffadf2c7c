"""Launches of `channel_major.cu`: few taps where positions lie side by side."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.channel_major.rows import channels_last, pack, result_like
from bakeoff.kernels.cuda import DATA, CudaKernel, cuda_kernel
from bakeoff.kernels.plan import Plan
from bakeoff.ops.long_conv.direct.tilings import Tiling, channel_major

__all__ = ["SOURCE", "convolve", "differentiate", "lanes", "macros", "positions_side_by_side"]

SOURCE = Path(__file__).with_name("channel_major.cu")
_VECTOR = 16  # bytes
_WARP = 32
_WAVES = 4  # of blocks at least, before a thread takes another piece: the last one may be nearly empty


class _Channels(NamedTuple):
    """A tensor with positions side by side."""

    data: Tensor
    strides: tuple[int, int]
    """From sequence to sequence and from channel to channel."""


class _Cut(NamedTuple):
    """The numbers of a launch."""

    kernel: CudaKernel
    blocks: int
    threads: int
    all: int
    """Pieces of all sequences."""
    share: int
    """Pieces that a group of threads takes, one after another."""
    pieces: int
    """Of a sequence."""
    parts: int
    """Groups of a channel."""


def positions_side_by_side(u: Tensor) -> bool:
    """Whether positions, not channels, lie side by side in a result like u: mostly as in u."""
    b, t, c = u.stride()
    if t == 1 and b > 1 and c > 1:
        return True
    return not channels_last(u) and result_like(u).stride(1) == 1


def convolve(
    plan: Plan,
    u: Tensor,
    h: Tensor,
    skip: Tensor | None,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    out: Tensor,
    y: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """Fills `out`, and `y` where it is given; h and skip are float32."""
    read = {name: _readable(plan, x) for name, x in (("u", u), ("gate_in", gate_in), ("gate_out", gate_out))}
    written: dict[str, _Channels | None] = {"out": _written(out)}
    cut = _cut(plan, False, u, h, [*read.values(), *written.values()], gate_in, gate_out, tiling)
    plan.launch(
        cut.kernel, (cut.blocks,), threads=cut.threads,
        **_data(read), h=h, skip=skip, out=out, y=y,
        T=u.shape[1], C=u.shape[2], all=cut.all, share=cut.share, pieces=cut.pieces,
        h_c=h.stride(0), h_l=h.stride(1), **_strides(read), **_strides(written),
    )  # fmt: skip


def differentiate(
    plan: Plan,
    dout: Tensor,
    u: Tensor,
    h: Tensor,
    skip: Tensor | None,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    y: Tensor | None,
    du: Tensor | None,
    dgate_in: Tensor | None,
    dgate_out: Tensor | None,
    wants_filter: bool,
    tiling: Tiling | None,
) -> Tensor | None:
    """Fills the gradients that are given. If `wants_filter` those of h and skip follow from [parts, C, taps],
    to be added up."""
    named = {"dout": dout, "u": u, "gate_in": gate_in, "gate_out": gate_out, "y": y}
    read = {name: _readable(plan, x) for name, x in named.items()}
    results = {"du": du, "dgate_in": dgate_in, "dgate_out": dgate_out}
    written = {"du": next((_written(x) for x in results.values() if x is not None), None)}
    cut = _cut(plan, True, u, h, [*read.values(), *written.values()], gate_in, gate_out, tiling)
    partial = plan.empty((cut.parts, *h.shape), torch.float32) if wants_filter else None
    plan.launch(
        cut.kernel, (cut.blocks,), threads=cut.threads,
        **_data(read), h=h, skip=skip, **results, partial=partial,
        T=u.shape[1], C=u.shape[2], all=cut.all, share=cut.share, pieces=cut.pieces,
        h_c=h.stride(0), h_l=h.stride(1), **_strides(read), **_strides(written),
    )  # fmt: skip
    return partial


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


def _cut(
    plan: Plan,
    backward: bool,
    u: Tensor,
    h: Tensor,
    tensors: list[_Channels | None],
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    tiling: Tiling | None,
) -> _Cut:
    B, T, C = u.shape
    taps, gates, dtype = h.shape[1], (gate_in is not None) + 2 * (gate_out is not None), u.dtype
    wide = T * dtype.itemsize % _VECTOR == 0 and all(x is None or _aligned(x, u) for x in tensors)
    chosen = tiling or channel_major(taps, gates, wide, backward)[0]
    group = lanes(T, dtype)
    groups = chosen.threads // group
    pieces = -(-T * dtype.itemsize // (_VECTOR * group))
    resident = groups * chosen.blocks * hardware.multiprocessors(u.get_device())
    share = max(1, min(chosen.pieces, B * pieces * C // (_WAVES * resident)))
    parts = -(-B * pieces // share)
    name = "differentiate" if backward else "convolve"
    given = macros(chosen, group, wide, taps, gates, dtype, backward=backward)
    kernel = cuda_kernel(SOURCE, name, plan.device, **given)
    return _Cut(kernel, -(-parts * C // groups), chosen.threads, B * pieces, share, pieces, parts)


def _readable(plan: Plan, x: Tensor | None) -> _Channels | None:
    """x with positions side by side and strides that fit into C's int; a copy if need be."""
    if x is None:
        return None
    if x.stride(1) != 1:
        rows = pack(plan, x)
        return _Channels(rows.data, rows.strides)
    if max(x.stride(0), x.stride(2)) < 1 << 31:
        return _written(x)
    T, C = x.shape[1:]
    return _Channels(plan.derive(_channel_major_copy, x), (C * T, T))


def _channel_major_copy(x: Tensor) -> Tensor:
    return x.mT.contiguous()


def _written(x: Tensor) -> _Channels:
    return _Channels(x, (x.stride(0), x.stride(2)))


def _aligned(x: _Channels, u: Tensor) -> bool:
    """Whether each row of positions, of tensors like u, begins at a multiple of a vector."""
    b, c = x.strides
    steps = (b if u.shape[0] > 1 else 0) | (c if u.shape[2] > 1 else 0)
    return (x.data.data_ptr() | steps * u.itemsize) % _VECTOR == 0


def _data(tensors: dict[str, _Channels | None]) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.data for name, x in tensors.items()}


def _strides(tensors: dict[str, _Channels | None]) -> dict[str, int]:
    """By the kernels' names; 0 where absent."""
    return {
        f"{name}_{letter}": 0 if x is None else x.strides[i]
        for name, x in tensors.items()
        for i, letter in enumerate("bc")
    }
