"""Launches of `channel_last.cu`: few taps where channels lie side by side."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.cuda import DATA, CudaKernel, cuda_kernel
from bakeoff.kernels.plan import Plan
from bakeoff.ops.long_conv.direct.tilings import Tiling, channel_last

__all__ = ["SOURCE", "convolve", "differentiate", "macros"]

SOURCE = Path(__file__).with_name("channel_last.cu")
_EDGE = 0.5  # what reading a value at a piece's edge costs, in positions


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
    u = _readable(plan, u)
    gate_in, gate_out = (None if gate is None else _readable(plan, gate) for gate in (gate_in, gate_out))
    tiling, kernel = _kernel(plan, False, h, [u, gate_in, gate_out, out, y], gate_in, gate_out, tiling)
    B, T, C = u.shape
    groups = C // tiling.channels
    pieces, length = _pieces(tiling, B, T, h.shape[1], groups, hardware.multiprocessors(u.get_device()))
    plan.launch(
        kernel, (-(-groups * B * pieces // tiling.threads),), threads=tiling.threads,
        u=u, gate_in=gate_in, gate_out=gate_out, h=h, skip=skip, out=out, y=y,
        T=T, groups=groups, all=B * pieces, pieces=pieces, length=length, h_c=h.stride(0), h_l=h.stride(1),
        **_strides(u=u, gate_in=gate_in, gate_out=gate_out, out=out),
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
    """Fills the gradients that are given. If `wants_filter` those of h and skip follow from [programs, taps,
    C], to be added up."""
    dout, u = _readable(plan, dout), _readable(plan, u)
    gate_in, gate_out, y = (None if x is None else _readable(plan, x) for x in (gate_in, gate_out, y))
    results = [du, dgate_in, dgate_out]
    tiling, kernel = _kernel(
        plan, True, h, [dout, u, gate_in, gate_out, y, *results], gate_in, gate_out, tiling
    )
    B, T, C = u.shape
    taps = h.shape[1]
    groups = C // tiling.channels
    multiprocessors = hardware.multiprocessors(u.get_device())
    pieces, length = _pieces(tiling, B, T, taps, groups, multiprocessors)
    threads = tiling.blocks * multiprocessors * tiling.threads
    share = -(-groups * B * pieces // threads)
    programs = -(-B * pieces // share)
    partial = plan.empty((programs, taps, C), torch.float32) if wants_filter else None
    plan.launch(
        kernel, (-(-groups * programs // tiling.threads),), threads=tiling.threads,
        dout=dout, u=u, gate_in=gate_in, gate_out=gate_out, y=y, h=h, skip=skip,
        du=du, dgate_in=dgate_in, dgate_out=dgate_out, partial=partial,
        T=T, groups=groups, programs=programs, all=B * pieces, share=share, pieces=pieces, length=length,
        h_c=h.stride(0), h_l=h.stride(1),
        **_strides(dout=dout, u=u, gate_in=gate_in, gate_out=gate_out, y=y),
        **_strides(du=next((x for x in results if x is not None), None)),
    )  # fmt: skip
    return partial


def macros(tiling: Tiling, taps: int, gates: int, dtype: torch.dtype, *, backward: bool) -> dict[str, int]:
    """What `channel_last.cu` is compiled with."""
    return {
        "BACKWARD": backward, "TAPS": taps, "GATES": gates, "DATA": DATA[dtype], "CHANNELS": tiling.channels,
        "STEPS": tiling.reads, "THREADS": tiling.threads, "BLOCKS": tiling.blocks,
    }  # fmt: skip


def _kernel(
    plan: Plan,
    backward: bool,
    h: Tensor,
    tensors: list[Tensor | None],
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    tiling: Tiling | None,
) -> tuple[Tiling, CudaKernel]:
    """The kernel, and the tiling with as many channels as all these tensors' accesses allow."""
    taps, gates = h.shape[1], (gate_in is not None) + 2 * (gate_out is not None)
    first = next(x for x in tensors if x is not None)
    chosen = tiling or channel_last(taps, gates, first.itemsize, backward)[0]
    together = chosen.channels
    while together > 1 and not all(x is None or _aligned(x, together) for x in tensors):
        together //= 2
    chosen = chosen._replace(channels=together)
    name = "differentiate" if backward else "convolve"
    given = macros(chosen, taps, gates, first.dtype, backward=backward)
    return chosen, cuda_kernel(SOURCE, name, plan.device, **given)


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


def _readable(plan: Plan, x: Tensor) -> Tensor:
    """x with channels side by side and offsets in a sequence that fit into C's int; a copy if need be."""
    fits = x.stride(2) == 1 and max(x.stride(0), x.stride(1) * x.shape[1]) < 1 << 31
    return x if fits else plan.contiguous(x)


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    """From sequence to sequence and from position to position, by the kernels' names; 0 where absent."""
    return {
        f"{name}_{letter}": 0 if x is None else x.stride(dim)
        for name, x in tensors.items()
        for dim, letter in enumerate("bt")
    }
