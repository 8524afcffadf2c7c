"""PyTorch's own spectral_filter: the ``eager`` and ``compiled`` candidates."""

import torch

from bakeoff.ops.spectral_filter.reference import gains
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gains, which are few, take the inverse FFT's 1 / T; one pass widens x and lays it out."""
    if x.numel() == 0:
        return (x + 0 * weight.real.sum()).to(x.dtype)  # the weight's gradient: zeros
    T = x.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.real.dtype), torch.float32)
    spectrum = torch.fft.rfft(x.mT.to(wide, memory_format=torch.contiguous_format))
    y: torch.Tensor = torch.fft.irfft(spectrum * (gains(weight, T) / T), T, norm="forward").mT
    return y.to(x.dtype)


compiled = compile_formula(eager)
