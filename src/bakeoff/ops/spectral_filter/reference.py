"""The definition of spectral_filter, in plain PyTorch."""

import torch

__all__ = ["gains", "spectral_filter"]


def spectral_filter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """irfft of rfft(x), its first K bins multiplied by `weight`; shapes and dtypes as in `bakeoff.ops`."""
    if x.numel() == 0:
        return (x + 0 * weight.real.sum()).to(x.dtype)  # the weight's gradient: zeros
    T = x.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.real.dtype), torch.float32)
    y: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x.to(wide).mT) * gains(weight, T), T).mT
    return y.to(x.dtype)


def gains(weight: torch.Tensor, T: int) -> torch.Tensor:
    """What each frequency is multiplied by, [C, T // 2 + 1]: the K weights, then ones.

    Frequencies 0 and T / 2 of a signal are real, and so are their gains: the imaginary parts have no effect,
    but an inverse FFT doesn't leave them out at every length on CUDA.
    """
    w, half = weight.mT, (T + 1) // 2
    ones = w.real.new_ones((w.shape[0], T // 2 + 1 - w.shape[1]))
    return torch.cat((w[:, :1].real, w[:, 1:half], w[:, half:].real, ones), 1)
