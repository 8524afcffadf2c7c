"""The definition of pole_scan, in plain PyTorch."""

import math

import torch

__all__ = ["pole_scan"]


def pole_scan(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Z_k[t] = p_k Z_k[t-1] + u[t] with p = exp(log_radius + i theta); y[t] = Re sum_k coef_k Z_k[t].

    Shapes and dtypes as in `bakeoff.ops.pole_scan`. Without the recurrence: y is u convolved with
    h[n] = Re sum_k coef_k p_k^n, plus what `state` still sounds, and the last Z a sum over u weighted with
    powers. Powers come in two levels, p^(a S + b) = (p^S)^a p^b, which keeps memory small at any length.
    """
    B, T, C = u.shape
    K = coef.shape[1]
    real = torch.promote_types(torch.promote_types(u.dtype, log_radius.dtype), torch.float32)
    real = torch.promote_types(real, torch.promote_types(theta.dtype, coef.real.dtype))
    complex_ = torch.complex64 if real == torch.float32 else torch.complex128
    start = u.new_zeros((B, C, K), dtype=complex_) if state is None else state.to(complex_)
    if u.numel() == 0:
        return u.clone(), start.clone()
    log_pole = torch.complex(log_radius.to(real), theta.to(real))[..., None]
    S = math.isqrt(T - 1) + 1
    A = -(-T // S)
    fine = torch.exp(log_pole * torch.arange(S, device=u.device))  # [C, K, S]
    coarse = torch.exp(log_pole * (S * torch.arange(A, device=u.device)))  # [C, K, A]
    ringing = coef[..., None].to(complex_) * coarse
    x = u.to(real)
    h = torch.einsum("cka,ckb->cab", ringing, fine).real.reshape(C, A * S)[:, :T]
    spectrum = torch.fft.rfft(h.mT, 2 * T, dim=0)
    y = torch.fft.irfft(torch.fft.rfft(x, 2 * T, dim=1) * spectrum, 2 * T, dim=1)[:, :T]
    if state is not None:
        first = torch.exp(log_pole[..., 0]) * start
        echo = torch.einsum("zck,cka,ckb->zabc", first, ringing, fine)
        y = y + echo.real.reshape(B, A * S, C)[:, :T]
    back = torch.nn.functional.pad(x.flip(1), (0, 0, 0, A * S - T)).reshape(B, A, S, C).to(complex_)
    end = torch.einsum("zabc,ckb,cka->zck", back, fine, coarse)
    end = end + torch.exp(log_pole[..., 0] * T) * start
    return y.to(u.dtype), end
