"""The definition of spectral_filter, in plain PyTorch."""

import torch

__all__ = ["spectral_filter"]


def spectral_filter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """irfft of rfft(x), its first K bins multiplied by `weight`; shapes and dtypes as in `bakeoff.ops`."""
    if x.numel() == 0:
        return (x + 0 * weight.real.sum()).to(x.dtype)  # the weight's gradient: zeros
    K, T = weight.shape[0], x.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.real.dtype), torch.float32)
    spectrum = torch.fft.rfft(x.to(wide).mT)
    filtered = torch.cat((weight.mT * spectrum[..., :K], spectrum[..., K:]), -1)
    y: torch.Tensor = torch.fft.irfft(filtered, T).mT
    return y.to(x.dtype)
