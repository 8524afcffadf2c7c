"""Rows convolved by FFTs that stay on the chip: the launches of `kernels/fft.cu`."""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bakeoff import cuda
from bakeoff.ops.long_conv.plan import Plan, plan

__all__ = ["FFT", "KERNELS", "SOURCE"]

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


@lru_cache(maxsize=256)
def _shares(rows: int, pairs: int, room: int, pair: int, filters: int) -> int:
    """Blocks that share a row's pairs, at the least cost in waves of `room` blocks: a `pair` and what is done
    once for the `filters` cost so many transforms."""

    def cost(shares: int) -> int:
        return -(-rows * shares // room) * (pair * -(-pairs // shares) + filters)

    return min(range(1, pairs + 1), key=cost)


class FFT:
    """See `bakeoff.ops.long_conv.run.Method`."""

    def convolve(self, v: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int) -> None:
        """y = h * v + skip v."""
        _Call(v, h, skip, T).convolve(v, y, 1)

    def gradients(
        self, v: Tensor | None, dy: Tensor, h: Tensor, skip: Tensor | None, dv: Tensor | None, T: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Puts v's gradient into `dv` if it is given; returns those of h and skip if `v` is given."""
        call = _Call(dy, h, skip, T)
        if v is not None:
            dh = call.differentiate(v, dy, dv)
            dskip = None if skip is None else dh[:, 0].to(skip.dtype, copy=True)
            return (pad(dh, (0, h.shape[1] - T)) if h.shape[1] > T else dh).to(h.dtype), dskip
        if dv is not None:
            call.convolve(dy, dv, -1)
        return None, None


class _Call:
    """What the launches of one call share."""

    def __init__(self, like: Tensor, h: Tensor, skip: Tensor | None, T: int) -> None:
        self.B, self.C, _ = like.shape
        self.T, self.L = T, min(h.shape[1], T)
        limits = cuda.limits(like.device)
        how = plan(T, self.L, limits.shared)
        assert how is not None  # `supports` has looked
        self.plan, self.multiprocessors = how, limits.multiprocessors
        self.kernels = _kernels(how, like.dtype, like.device)
        self.twiddles = _twiddles(how, like.device)
        self.device = like.device
        self.taps = h[:, : self.L].float().contiguous()
        self.skips = self._floats(0) if skip is None else skip.float().contiguous()
        self.pairs = (self.B + 1) // 2

    def convolve(self, x: Tensor, y: Tensor, sign: int) -> None:
        """y = h * x (correlated with h where `sign` is -1) + skip x."""
        how = self.plan
        shares = _shares(self.C * how.outer, self.pairs, self._room(how.tuning.blocks[0]), 2, 1)
        self.kernels.launch(
            "convolve", self.C * how.outer * shares, how.threads, how.shared[0],
            x, self.taps, self.skips, y, *self._parts(self.pairs), self.twiddles, sign,
            self.B, self.T, self.L, self.C, shares, *_steps(x), *_steps(y),
        )  # fmt: skip

    def differentiate(self, x: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor:
        """The gradient of h in float32, and that of x into `dx` if it is given."""
        how = self.plan
        pair, filters = (3, 2) if how.tuning.keeps else (5, 0)
        shares = _shares(self.C * how.outer, self.pairs, self._room(how.tuning.blocks[1]), pair, filters)
        sums = self._floats(shares, self.C, self.L)
        self.kernels.launch(
            "differentiate", self.C * how.outer * shares, how.threads, how.shared[1],
            x, dy, self.taps, self.skips, self._floats(0) if dx is None else dx, sums,
            *self._parts(self.pairs + shares), self.twiddles,
            self.B, self.T, self.L, self.C, shares,
            *_steps(x), *_steps(dy), *_steps(dy if dx is None else dx),
        )  # fmt: skip
        return sums[0] if shares == 1 else sums.sum(0)

    def _parts(self, rows: int) -> tuple[Tensor, Tensor]:
        """Room for the parts of so many rows of every channel, and zeros to count them; empty where a block
        has a whole row."""
        rows = rows if self.plan.outer > 1 else 0
        counts = torch.zeros((rows, self.C), dtype=torch.int32, device=self.device)
        return self._floats(rows, self.C, self.plan.total, 2), counts

    def _room(self, blocks: int) -> int:
        """For blocks at a time on the device, of which a multiprocessor has room for so many."""
        return blocks * self.multiprocessors

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def _steps(x: Tensor) -> tuple[int, int]:
    """From sequence to sequence and from channel to channel, in units of 8 values."""
    return x.stride(0) // 8, x.stride(1) // 8
