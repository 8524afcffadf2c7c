"""PyTorch's own byte_spectral: the ``eager``, ``loop``, ``rfft`` and ``compiled`` candidates."""

from typing import Any

import torch
import torch.nn.functional as F

from bakeoff.autocast import without_autocast
from bakeoff.ops.byte_spectral.reference import features_of, frequencies, phases, widest
from bakeoff.select.declare.compiled import compiled as compile_formula

__all__ = ["compiled", "eager", "loop", "rfft"]


def eager(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    """Strided windows times a matrix of windowed phases; a whole row is two thin products."""
    with without_autocast(ids):  # which would round the spectra to 8 bits
        return _formula(ids, table, window, omega, features, weight, bias, causal)


def rfft(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    """`torch.fft.rfft` of every window, or of the row, for the grid of the transform (omega None)."""
    with without_autocast(ids):
        return _by_fft(ids, table, window, omega, features, weight, bias, causal)


def loop(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    """One position after another in Python: what published byte-spectral models run, as a baseline."""
    with without_autocast(ids):
        return _by_position(ids, table, window, omega, features, weight, bias, causal)


def _formula(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    wide = widest(table, window, omega)
    if window is None:
        return _whole_row(ids, table, omega, weight, bias, _row_by_product, wide)
    W = window.shape[0]
    cos, sin = phases(W, frequencies(omega, W, ids.device), wide)
    scale = window.to(wide)[:, None]
    twiddles = torch.cat((cos * scale, sin * -scale), 1).flip(0)
    re, im = (_windows(ids, table, W, wide) @ twiddles).chunk(2, -1)
    return _projected(features_of(re, im, features), table, weight, bias)


def _by_fft(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    wide = widest(table, window)
    if window is None:
        return _whole_row(ids, table, omega, weight, bias, _row_by_fft, wide)
    spectrum = torch.fft.rfft(_windows(ids, table, window.shape[0], wide).flip(-1) * window.to(wide))
    return _projected(features_of(spectrum.real, spectrum.imag, features), table, weight, bias)


def _by_position(
    ids: Any, table: Any, window: Any, omega: Any, features: str, weight: Any, bias: Any, causal: bool
) -> torch.Tensor:
    wide = widest(table, window, omega)
    W = window.shape[0]
    cos, sin = phases(W, frequencies(omega, W, ids.device), wide)
    scale = window.to(wide)[:, None]
    twiddles = torch.cat((cos * scale, sin * -scale), 1)
    values = _looked_up(ids, table, wide)
    outputs = []
    for t in range(ids.shape[1]):
        strip = values[:, max(0, t - W + 1) : t + 1].flip(1).transpose(1, 2)
        re, im = (strip @ twiddles[: strip.shape[-1]]).chunk(2, -1)
        outputs.append(_projected(features_of(re, im, features), table, weight, bias))
    return torch.stack(outputs, 1)


def _looked_up(ids: torch.Tensor, table: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """table[ids], [B, T, C]. The gradient of `F.embedding` varies from run to run on CUDA."""
    return table.to(wide)[ids.int()]


def _windows(ids: torch.Tensor, table: torch.Tensor, W: int, wide: torch.dtype) -> torch.Tensor:
    """The values of the last W bytes at every position, oldest first: a view [B, T, C, W]."""
    values = _looked_up(ids, table, wide)
    return F.pad(values, (0, 0, W, 0)).unfold(1, W, 1)[:, 1:]


def _projected(found: torch.Tensor, table: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    if weight is None:
        return found.to(table.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    return F.linear(found.to(weight.dtype), weight.t(), bias)


def _whole_row(
    ids: Any, table: Any, omega: Any, weight: Any, bias: Any, transform: Any, wide: torch.dtype
) -> torch.Tensor:
    """Every position turns the row's spectrum, so the projection is done once a row, before the turn."""
    T = ids.shape[1]
    cos, sin = phases(T, frequencies(omega, T, ids.device), wide)
    re, im = transform(_looked_up(ids, table, wide), cos, sin)  # [B, C, K], of exp(+i omega s)
    if weight is None:
        re, im = re.unsqueeze(1), im.unsqueeze(1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return features_of(re * cos + im * sin, im * cos - re * sin, "complex").to(table.dtype)
    wide = torch.promote_types(wide, weight.dtype)
    parts = weight.to(wide).unflatten(0, (re.shape[1], -1, 2))
    through = [
        torch.einsum("bck,ckd->bkd", part.to(wide), parts[:, :, i]) for part in (re, im) for i in (0, 1)
    ]
    turned = torch.cat((through[0] + through[3], through[2] - through[1]), 1)
    out = torch.cat((cos, sin), 1).to(wide) @ turned
    return (out if bias is None else out + bias.to(wide)).to(weight.dtype)


def _row_by_product(values: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = values.transpose(1, 2)
    return rows @ cos, rows @ sin


def _row_by_fft(values: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
    spectrum = torch.fft.rfft(values, dim=1).transpose(1, 2)
    return spectrum.real, -spectrum.imag


compiled = compile_formula(eager)
