"""The ``fft`` candidate: long_conv's FFTs that stay on the chip, on a circle."""

import torch

from bakeoff.ops.long_conv.autograd import METHODS, convolved
from bakeoff.ops.long_conv.fft import FFT
from bakeoff.ops.long_conv.run import Arguments, OnRows
from bakeoff.ops.spectral_filter.reference import gains

__all__ = ["fft"]

METHODS["spectral_filter.fft"] = OnRows(FFT(circular=True))


def fft(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x convolved on a circle with the impulse response of its gains, which PyTorch's FFT makes."""
    T = x.shape[1]
    response = torch.fft.irfft(gains(weight, T), T)
    return convolved("spectral_filter.fft", Arguments(x, response, None, None, None))
