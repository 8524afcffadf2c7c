"""The ``fft`` candidate: long_conv's FFTs that stay on the chip, on a circle."""

import torch
import torch.nn.functional as F

from bakeoff.ops.long_conv.autograd import METHODS, convolved
from bakeoff.ops.long_conv.fft import FFT
from bakeoff.ops.long_conv.run import Arguments, OnRows

__all__ = ["fft"]

METHODS["spectral_filter.fft"] = OnRows(FFT(circular=True))


def fft(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x convolved on a circle with the impulse response of `weight`, which PyTorch's FFT makes."""
    T = x.shape[1]
    every = F.pad(weight.mT, (0, T // 2 + 1 - weight.shape[0]), value=1.0)
    response = torch.fft.irfft(every, T)
    return convolved("spectral_filter.fft", Arguments(x, response, None, None, None))
