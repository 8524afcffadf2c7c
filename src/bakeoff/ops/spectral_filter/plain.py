"""PyTorch's own spectral_filter: the ``eager`` and ``compiled`` candidates."""

import torch
import torch.nn.functional as F

from bakeoff.select.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight, which is small, padded and divided by T, so that the spectrum is passed over once; x
    widened and laid out for the FFT in one pass.
    """
    if x.numel() == 0:
        return (x + 0 * weight.real.sum()).to(x.dtype)  # the weight's gradient: zeros
    K, T = weight.shape[0], x.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.real.dtype), torch.float32)
    every = F.pad(weight.mT, (0, T // 2 + 1 - K), value=1.0) / T
    spectrum = torch.fft.rfft(x.mT.to(wide, memory_format=torch.contiguous_format))
    y: torch.Tensor = torch.fft.irfft(spectrum * every, T, norm="forward").mT
    return y.to(x.dtype)


compiled = compile_formula(eager)
