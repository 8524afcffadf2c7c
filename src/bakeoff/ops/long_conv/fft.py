"""Rows convolved by FFTs that stay on the chip: the launches of `kernels/fft.cu`."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bakeoff import cuda
from bakeoff.ops.long_conv.plan import Plan, plan, shared_bytes

__all__ = ["FFT", "KERNELS", "SOURCE"]

SOURCE = "ops/long_conv/kernels/fft.cu"
KERNELS = ("spectrum", "convolve", "combine", "correlate", "finish")
_DATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WAVES = 4


@lru_cache(maxsize=64)
def _circle(total: int, device: torch.device) -> Tensor:
    """exp(-2 pi i k / total) for every k, as [total, 2]."""
    angle = torch.arange(total, dtype=torch.float64) * (-2 * math.pi / total)
    return torch.stack([angle.cos(), angle.sin()], dim=1).float().to(device)


@lru_cache(maxsize=256)
def _kernels(how: Plan, dtype: torch.dtype, device: torch.device) -> cuda.Module:
    found = cuda.Module(SOURCE, KERNELS, [*how.options, f"-DDATA={_DATA[dtype]}"], device)
    found.allow_shared("spectrum", shared_bytes(how.n, keeps=False))
    found.allow_shared("convolve", shared_bytes(how.n, keeps=False))
    found.allow_shared("correlate", shared_bytes(how.n, keeps=True))
    return found


class _Call(NamedTuple):
    """What the launches of one call share."""

    plan: Plan
    kernels: cuda.Module
    circle: Tensor
    shares: int
    """Blocks that take turns at a channel's rows."""


class FFT:
    """See `bakeoff.ops.long_conv.run.Method`."""

    def convolve(self, v: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int) -> None:
        """y = h * v + skip v."""
        _filtered(_call(v, h, T), v, h, skip, y, T, 1)

    def gradients(
        self, v: Tensor | None, dy: Tensor, h: Tensor, skip: Tensor | None, dv: Tensor | None, T: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Puts v's gradient into `dv` if it is given; returns those of h and skip if `v` is given."""
        call = _call(dy, h, T)
        if dv is not None:
            _filtered(call, dy, h, skip, dv, T, -1)
        return (None, None) if v is None else _filters(call, v, dy, h, skip, T)


def _call(v: Tensor, h: Tensor, T: int) -> _Call:
    B, C, _ = v.shape
    limits = cuda.limits(v.device)
    how = plan(T, h.shape[1], limits.shared)
    assert how is not None  # `supports` has looked
    wanted = -(-limits.multiprocessors * how.blocks * _WAVES // (C * how.outer))
    shares = max(1, min(wanted, (B + 1) // 2))
    return _Call(how, _kernels(how, v.dtype, v.device), _circle(how.total, v.device), shares)


def _filtered(call: _Call, v: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
    """y = h * v (correlated with h where `sign` is -1) + skip v."""
    how, kernels, circle, shares = call
    B, C, _ = v.shape
    L = min(h.shape[1], T)
    spectra = _floats(v, C, how.total, 2)
    room = shared_bytes(how.n, keeps=False)
    taps = h[:, :L].float().contiguous()
    kernels.launch("spectrum", C * how.outer, how.threads, room, taps, spectra, circle, L)
    weights = _floats(v, 0) if skip is None else skip.float().contiguous()
    pairs = (B + 1) // 2 if how.outer > 1 else 0
    parts, scales = _floats(v, pairs, C, how.total, 2), _floats(v, 2 * pairs, C)
    kernels.launch(
        "convolve", C * how.outer * shares, how.threads, room,
        v, spectra, weights, y, parts, scales, circle, sign, B, T, C, shares, *_steps(v), *_steps(y),
    )  # fmt: skip
    if pairs:
        kernels.launch(
            "combine", pairs * C * (how.n // 256), 256, 0,
            parts, scales, v, weights, y, circle, B, T, C, *_steps(v), *_steps(y),
        )  # fmt: skip


def _filters(
    call: _Call, v: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, T: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of h and skip from the rows v and those of y's gradient."""
    how, kernels, circle, shares = call
    B, C, _ = v.shape
    L = h.shape[1]
    sums = _floats(v, shares, C, how.total, 2)
    kernels.launch(
        "correlate", C * how.outer * shares, how.threads, shared_bytes(how.n, keeps=True),
        v, dy, sums, circle, B, T, C, shares, *_steps(v), *_steps(dy),
    )  # fmt: skip
    dh, dskip = _floats(v, C, L), _floats(v, 0 if skip is None else C)
    kernels.launch("finish", C * (how.n // 256), 256, 0, sums, dh, dskip, circle, T, L, C, shares)
    return dh.to(h.dtype), None if skip is None else dskip.to(skip.dtype)


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _steps(x: Tensor) -> tuple[int, int]:
    """From sequence to sequence and from channel to channel, in units of 8 values."""
    return x.stride(0) // 8, x.stride(1) // 8
