"""The ``fft`` candidate: long_conv's FFTs that stay on the chip, on a circle, with weights for a spectrum."""

import torch
from torch import Tensor

from bakeoff.launch import Launcher
from bakeoff.ops.long_conv.autograd import METHODS, convolved
from bakeoff.ops.long_conv.fft import launch
from bakeoff.ops.long_conv.run import Arguments, OnRows
from bakeoff.ops.spectral_filter import kernels

__all__ = ["TILE", "fft"]

TILE = {"FREQUENCIES": 128, "CHANNELS": 8}
_fold = Launcher(kernels._fold)


class Circle:
    """See `bakeoff.ops.long_conv.run.Convolver`; `h` are weights [K, C], and there is no skip."""

    def convolve(self, v: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int) -> None:
        """y = irfft(gains rfft(v))."""
        del skip
        _convolve(v, _numbers(h), y, T, 1)

    def gradients(
        self, v: Tensor | None, dy: Tensor, h: Tensor, skip: Tensor | None, dv: Tensor | None, T: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Puts v's gradient into `dv` if it is given; returns that of h if `v` is given."""
        numbers = _numbers(h)
        if v is not None:
            return _differentiate(v, dy, numbers, dv, T), skip
        if dv is not None:
            _convolve(dy, numbers, dv, T, -1)
        return None, None


METHODS["spectral_filter.fft"] = OnRows(Circle())


def fft(x: Tensor, weight: Tensor) -> Tensor:
    """FFTs that stay on the chip."""
    return convolved("spectral_filter.fft", Arguments(x, weight, None, None, None))


def _numbers(weight: Tensor) -> Tensor:
    """Pairs of reals, as the kernels read them."""
    return torch.view_as_real(weight.resolve_conj()).contiguous()


def _convolve(x: Tensor, numbers: Tensor, y: Tensor, T: int, sign: int) -> None:
    B, C, _ = x.shape
    how = launch("convolve", B, C, T, T, x.dtype, x.device, circular=True)
    assert how is not None
    how.convolve(x, numbers, None, y, T, numbers.shape[0], sign)


def _differentiate(x: Tensor, dy: Tensor, numbers: Tensor, dx: Tensor | None, T: int) -> Tensor:
    B, C, _ = x.shape
    K = numbers.shape[0]
    how = launch("differentiate", B, C, T, T, x.dtype, x.device, circular=True)
    assert how is not None
    n, outer, made = how.plan.n, how.plan.outer, how.plan.made
    sums = torch.empty((how.shares, C, n * made, 2), dtype=torch.float32, device=x.device)
    how.differentiate(x, dy, numbers, None, dx, sums, T, K)
    found = torch.empty_like(numbers)
    if K:
        r1, r2, r3 = how.plan.tuning.radices
        _fold(
            (-(-K // TILE["FREQUENCIES"]), -(-C // TILE["CHANNELS"]), 1), sums, found, C, K, how.shares,
            T=T, OUTER=outer, MADE=made, R1=r1, R2=r2, R3=r3, **TILE, num_warps=4,
        )  # fmt: skip
    return torch.view_as_complex(found)
