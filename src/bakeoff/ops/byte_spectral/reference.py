"""The definition of byte_spectral, in plain PyTorch."""

import math

import torch

__all__ = ["EPS", "byte_spectral", "features_of", "frequencies", "phases", "widest"]

EPS = 1e-6
"""What makes the magnitude smooth at zero: sqrt(|X|^2 + EPS) - sqrt(EPS)."""


def byte_spectral(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor | None,
    omega: torch.Tensor | None = None,
    features: str = "magnitude",
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """The sum over m (or over the row), term by term; shapes and dtypes as in `bakeoff.ops.byte_spectral`.

    Computes in float32, or in float64 when an input is float64, and casts once at the end. Differentiable by
    autograd, twice if wanted.
    """
    wide = widest(table, window, omega)
    values = table.to(wide)[ids.long()].unsqueeze(-1)  # [B, T, C, 1]
    T = ids.shape[1]
    if window is None:
        cos, sin = (part[:, None] for part in phases(T, frequencies(omega, T, ids.device), wide))
        row_re, row_im = (values * cos).sum(1, keepdim=True), (values * sin).sum(1, keepdim=True)
        re, im = row_re * cos + row_im * sin, row_im * cos - row_re * sin
    else:
        cos, sin = phases(len(window), frequencies(omega, len(window), ids.device), wide)
        scale = window.to(wide)
        re = im = torch.zeros((), dtype=wide, device=ids.device)
        for m in range(len(window)):
            past = torch.nn.functional.pad(values, (0, 0, 0, 0, m, 0))[:, :T] * scale[m]
            re, im = re + past * cos[m], im - past * sin[m]
    found = features_of(re, im, features)
    if weight is None:
        return found.to(table.dtype)
    wide = widest(found, weight)
    out = found.to(wide) @ weight.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(weight.dtype)


def widest(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype to compute in: float32, or float64 if a tensor is."""
    wide = torch.float64 in [tensor.dtype for tensor in tensors if tensor is not None]
    return torch.float64 if wide else torch.float32


def frequencies(omega: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor:
    """Angular frequencies in float64: `omega`, or the grid of a transform of `length`."""
    if omega is not None:
        return omega.double()
    return torch.arange(length // 2 + 1, device=device, dtype=torch.float64) * (2 * math.pi / max(length, 1))


def phases(length: int, omega: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of m * omega[k] for m = 0..length-1, each [length, K].

    The angle is formed in float64: in float32 an angle of 200 has lost the fifth decimal of its cosine.
    """
    angle = torch.outer(torch.arange(length, device=omega.device, dtype=torch.float64), omega)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def features_of(re: torch.Tensor, im: torch.Tensor, features: str) -> torch.Tensor:
    """Features [..., F] of a spectrum [..., C, K].

    The magnitude is written as a quotient, which has no cancellation near zero and is exactly 0 there.
    """
    if features == "complex":
        return torch.stack((re, im), -1).flatten(-3)
    power = re.square() + im.square()
    size = power / ((power + EPS).sqrt() + math.sqrt(EPS))
    return (size.log1p() if features == "log" else size).flatten(-2)
