"""Rows convolved by FFTs that stay on the chip: the launches of `kernels/fft.cu`."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bakeoff import cuda
from bakeoff.ops.long_conv.plan import Plan, plan

__all__ = ["FFT", "KERNELS", "SOURCE", "Launch", "launch"]

SOURCE = "ops/long_conv/kernels/fft.cu"
KERNELS = ("convolve", "differentiate")
_DATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _powers(turns: Tensor, radix: int) -> list[Tensor]:
    """w, w^2, w^4, .. up to w^(radix / 2) in rows, for every w = exp(-2 pi i turn)."""
    return [(turns * 2**level % 1).flatten() for level in range(radix.bit_length() - 1)]


@lru_cache(maxsize=64)
def _twiddles(how: Plan, device: torch.device) -> Tensor:
    """The tables that `kernels/fft.cu` describes at `look_up`, as [.., 2]."""
    r1, r2, r3 = how.tuning.radices
    n, outer, total = how.n, how.outer, how.total

    def count(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float64)

    turns = _powers(count(r3) / (r2 * r3), r2)
    turns += _powers(count(n // r1) / n, r1)
    turns += _powers(count(n) / total, outer)
    for part in range(outer):
        k1 = count(r1) * outer + part
        k2 = k1[:, None] + count(r2) * (r1 * outer)
        turns += [count(outer) * part / outer % 1, *_powers(count(1) + part / (outer * r1), r1)]
        turns += _powers(k1 / (outer * r1 * r2), r2) + _powers(k2 / total, r3)
    angle = torch.cat(turns) * (-2 * math.pi)
    return torch.stack([angle.cos(), angle.sin()], dim=1).float().to(device)


@lru_cache(maxsize=256)
def _kernels(how: Plan, dtype: torch.dtype, device: torch.device) -> cuda.Module:
    found = cuda.Module(SOURCE, KERNELS, [*how.options, f"-DDATA={_DATA[dtype]}"], device)
    for kernel, nbytes in zip(KERNELS, how.shared, strict=True):
        found.allow_shared(kernel, nbytes)
    return found


def _shares(rows: int, pairs: int, room: int, pair: int, filters: int) -> int:
    """Blocks that share a row's pairs, at the least cost in waves of `room` blocks: a `pair` and what is done
    once for the `filters` cost so many transforms."""

    def cost(shares: int) -> int:
        return -(-rows * shares // room) * (pair * -(-pairs // shares) + filters)

    return min(range(1, pairs + 1), key=cost)


class Launch(NamedTuple):
    """Of one kernel, as far as it depends on metadata alone. `h` is what `kernels/fft.cu` takes as such."""

    module: cuda.Module
    blocks: int
    threads: int
    shared: int
    shares: int
    """Blocks that share a row's pairs: `differentiate` writes so many sums."""
    twiddles: Tensor
    plan: Plan
    parts: tuple[int, int, int, int] | None
    """The shape of what the parts of all rows need; None where a block has a whole row."""

    def convolve(
        self, x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, L: int, sign: int
    ) -> None:
        """y = h * x (correlated with h where `sign` is -1) + skip x."""
        B, C, _ = x.shape
        self.module.launch(
            "convolve", self.blocks, self.threads, self.shared,
            x, h, skip, y, *self._parts(x.device), self.twiddles, sign,
            B, T, L, C, self.plan.valid(T, L), self.shares, *_steps(x), *_steps(y),
        )  # fmt: skip

    def differentiate(
        self, x: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, dx: Tensor | None, sums: Tensor,
        T: int, L: int,
    ) -> None:  # fmt: skip
        """The gradient of h as `sums`, and that of x into `dx` if it is given."""
        B, C, _ = x.shape
        self.module.launch(
            "differentiate", self.blocks, self.threads, self.shared,
            x, dy, h, skip, dx, sums, *self._parts(x.device), self.twiddles,
            B, T, L, C, self.plan.valid(T, L), self.shares, *_steps(x), *_steps(dy),
            *_steps(dy if dx is None else dx),
        )  # fmt: skip

    def _parts(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Room for the parts of every row and channel, and zeros to count them."""
        if self.parts is None:
            return None, None
        counts = torch.zeros(self.parts[:2], dtype=torch.int32, device=device)
        return torch.empty(self.parts, dtype=torch.float32, device=device), counts


@lru_cache(maxsize=4096)
def launch(
    kernel: str,
    B: int,
    C: int,
    T: int,
    L: int,
    dtype: torch.dtype,
    device: torch.device,
    circular: bool = False,
) -> Launch | None:
    """None for rows too long for this device. `supports` keeps them away, but a graph of torch.compile, made
    once for every length, brings them."""
    limits = cuda.limits(device)
    place = KERNELS.index(kernel)
    how = plan(T, L, limits.shared, circular, alone=B == 1, backward=place == 1)
    if how is None:
        return None
    pairs = (B * -(-T // how.valid(T, L)) + 1) // 2
    pair, filters = (2, 1) if place == 0 else (3, 1) if circular else (3, 2) if how.tuning.keeps else (5, 0)
    room = how.tuning.blocks[place] * limits.multiprocessors
    shares = _shares(C * how.made, pairs, room, pair, filters)
    rows = pairs + place * shares  # those of sums of h's gradient follow
    return Launch(
        _kernels(how, dtype, device),
        C * how.made * shares,
        how.threads,
        how.shared[place],
        shares,
        _twiddles(how, device),
        how,
        (rows, C, how.n * how.made, 2) if how.outer > 1 else None,
    )


class FFT:
    """See `bakeoff.ops.long_conv.run.Convolver`."""

    def convolve(self, x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
        """y = h * x (correlated with h where `sign` is -1) + skip x."""
        B, C, _ = x.shape
        L = min(h.shape[1], T)
        how = launch("convolve", B, C, T, L, x.dtype, x.device)
        if how is None:
            _convolve_by_torch(x, h, skip, y, T, sign)
        else:
            how.convolve(x, *_filters(h, skip, L), y, T, L, sign)

    def differentiate(
        self, x: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, dx: Tensor | None, T: int
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of h and skip; that of x goes into `dx` if it is given."""
        B, C, _ = x.shape
        L = min(h.shape[1], T)
        how = launch("differentiate", B, C, T, L, x.dtype, x.device)
        if how is None:
            if dx is not None:
                _convolve_by_torch(dy, h, skip, dx, T, -1)
            dh = _correlate_by_torch(x, dy, T, L)
        else:
            sums = torch.empty((how.shares, C, L), dtype=torch.float32, device=x.device)
            how.differentiate(x, dy, *_filters(h, skip, L), dx, sums, T, L)
            dh = sums[0] if how.shares == 1 else sums.sum(0)
        dskip = None if skip is None else dh[:, 0].to(skip.dtype, copy=True)
        return (pad(dh, (0, h.shape[1] - T)) if h.shape[1] > T else dh).to(h.dtype), dskip


def _convolve_by_torch(x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
    """What `FFT.convolve` does, by PyTorch's FFTs."""
    L = min(h.shape[1], T)
    n = 1 << (T + L - 2).bit_length()
    x = x[..., :T].float()
    spectrum = torch.fft.rfft(h[:, :L].float(), n)
    found = torch.fft.irfft(torch.fft.rfft(x, n) * (spectrum if sign > 0 else spectrum.conj()), n)[..., :T]
    y[..., :T] = found if skip is None else found + skip.float()[:, None] * x


def _correlate_by_torch(x: Tensor, dy: Tensor, T: int, L: int) -> Tensor:
    """The gradient of L taps, in float32."""
    n = 1 << (T + L - 2).bit_length()
    spectra = torch.fft.rfft(x[..., :T].float(), n).conj() * torch.fft.rfft(dy[..., :T].float(), n)
    found: Tensor = torch.fft.irfft(spectra.sum(0), n)[:, :L]
    return found.contiguous()  # as graphs of torch.compile expect it


def _filters(h: Tensor, skip: Tensor | None, L: int) -> tuple[Tensor, Tensor | None]:
    """The first taps and the skip, in float32."""
    return h[:, :L].float().contiguous(), None if skip is None else skip.float().contiguous()


def _steps(x: Tensor) -> tuple[int, int]:
    """From sequence to sequence and from channel to channel, in units of 8 values."""
    return x.stride(0) // 8, x.stride(1) // 8
