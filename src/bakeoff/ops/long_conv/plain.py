"""PyTorch's own long_conv: the ``eager`` and ``compiled`` candidates."""

from typing import Any

import torch
import torch.nn.functional as F

from bakeoff.ops.long_conv.reference import empty, fast_length, spread, widest
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]

_FEW = 8  # taps


def eager(u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> torch.Tensor:
    """Zero-padded real FFTs in float32, or a few taps one after another; the gates in u's dtype, as a model
    would multiply by them.

    PyTorch has no FFT in bfloat16, and one of powers of two alone in float16.
    """
    if u.numel() == 0:
        return empty(u, h, skip, gate_in, gate_out)
    wide = widest(u, h, skip)
    v = u if gate_in is None else (u * gate_in).to(u.dtype)
    v = v.to(wide)  # once, so that gradients by both ways are added before they are rounded
    traced = torch._C._get_tracing_state() is not None  # how many taps count must stay open then
    convolve = _by_taps if causal and h.shape[1] <= _FEW and not traced else _by_fft
    y = convolve(v, h.to(wide), causal)
    if skip is not None:
        y = torch.addcmul(y, v, skip.to(wide))
    y = y.to(u.dtype)
    return y if gate_out is None else (y * gate_out).to(u.dtype)


def _by_taps(v: torch.Tensor, h: torch.Tensor, causal: bool) -> torch.Tensor:
    del causal
    h = h[:, : v.shape[1]]
    T, L = v.shape[1], h.shape[1]
    padded = F.pad(v, (0, 0, L - 1, 0))
    y = h[:, 0] * v
    for lag in range(1, L):
        y = torch.addcmul(y, h[:, lag], padded[:, L - 1 - lag : L - 1 - lag + T])
    return y


def _by_fft(v: torch.Tensor, h: torch.Tensor, causal: bool) -> torch.Tensor:
    T = v.shape[1]
    h = h[:, :T]
    n = fast_length(T + h.shape[1] - 1)
    spectrum = torch.fft.rfft(v.mT, n) * torch.fft.rfft(spread(h, n, causal))
    y: torch.Tensor = torch.fft.irfft(spectrum, n)[..., :T].mT
    return y


compiled = compile_formula(eager)
