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

    def convolve(self, x: Tensor, h: Tensor, skip: Tensor | None, y: Tensor, T: int, sign: int) -> None:
        """y = irfft(gains rfft(x)), or with the gains' conjugates where `sign` is -1."""
        del skip
        B, C, _ = x.shape
        how = launch("convolve", B, C, T, T, x.dtype, x.device, circular=True)
        assert how is not None
        how.convolve(x, _numbers(h), None, y, T, h.shape[0], sign)

    def differentiate(
        self, x: Tensor, dy: Tensor, h: Tensor, skip: Tensor | None, dx: Tensor | None, T: int
    ) -> tuple[Tensor, None]:
        """The gradient of h; that of x goes into `dx` if it is given."""
        del skip
        B, C, _ = x.shape
        numbers = _numbers(h)
        how = launch("differentiate", B, C, T, T, x.dtype, x.device, circular=True)
        assert how is not None
        n, outer, made = how.plan.n, how.plan.outer, how.plan.made
        sums = torch.empty((how.shares, C, n * made, 2), dtype=torch.float32, device=x.device)
        K = h.shape[0]
        how.differentiate(x, dy, numbers, None, dx, sums, T, K)
        found = torch.empty_like(numbers)
        if K:
            r1, r2, r3 = how.plan.tuning.radices
            _fold(
                (-(-K // TILE["FREQUENCIES"]), -(-C // TILE["CHANNELS"]), 1), sums, found, C, K, how.shares,
                T=T, OUTER=outer, MADE=made, R1=r1, R2=r2, R3=r3, **TILE, num_warps=4,
            )  # fmt: skip
        return torch.view_as_complex(found), None


METHODS["spectral_filter.fft"] = OnRows(Circle())


def fft(x: Tensor, weight: Tensor) -> Tensor:
    """FFTs that stay on the chip."""
    return convolved("spectral_filter.fft", Arguments(x, weight, None, None, None))


def _numbers(weight: Tensor) -> Tensor:
    """Pairs of reals, as the kernels read them."""
    return torch.view_as_real(weight.resolve_conj()).contiguous()
