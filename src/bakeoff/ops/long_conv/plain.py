"""PyTorch's own long_conv: the ``eager`` and ``compiled`` candidates."""

from typing import Any

import torch

from bakeoff.ops.long_conv.reference import empty, fast_length, spread, widest
from bakeoff.select.compiled import compiled as compile_formula

__all__ = ["compiled", "eager"]


def eager(u: Any, h: Any, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> torch.Tensor:
    """Zero-padded real FFTs in float32; the gates in u's dtype, as a model would multiply by them.

    PyTorch has no FFT in bfloat16, and one of powers of two alone in float16.
    """
    if u.numel() == 0:
        return empty(u, h, skip, gate_in, gate_out)
    v = u if gate_in is None else (u * gate_in).to(u.dtype)
    wide = widest(u, h, skip)
    T = u.shape[1]
    h = h[:, :T]
    n = fast_length(T + h.shape[1] - 1)
    response = torch.fft.rfft(spread(h.to(wide), n, causal)).t()
    y: torch.Tensor = torch.fft.irfft(torch.fft.rfft(v.to(wide), n, dim=1) * response, n, dim=1)[:, :T]
    if skip is not None:
        y = torch.addcmul(y, v.to(wide), skip.to(wide))
    y = y.to(u.dtype)
    return y if gate_out is None else (y * gate_out).to(u.dtype)


compiled = compile_formula(eager)
