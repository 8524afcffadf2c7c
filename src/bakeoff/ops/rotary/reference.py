"""The definition of `rotary` in plain PyTorch, and the tables it takes."""

import math

import torch
import torch.nn.functional as F

__all__ = ["reference", "rotary_tables", "table_rows"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair (a, b) of each head, at its position, becomes (a cos - b sin, b cos + a sin).

    With weights, each head x is x / sqrt(mean(x^2) + eps) * (offset + weight) first. Shapes and dtypes as in
    `bakeoff.ops.rotary`. Computed in the widest of the arguments' dtypes, at least float32, and cast once.
    """
    c = table_rows(cos, q.shape[1], position_ids)
    s = table_rows(sin, q.shape[1], position_ids)
    if q_weight is None or k_weight is None:
        return _rotated(q, c, s, interleaved), _rotated(k, c, s, interleaved)
    return (
        _rotated(_normed(q, q_weight, eps, offset), c, s, interleaved).to(q.dtype),
        _rotated(_normed(k, k_weight, eps, offset), c, s, interleaved).to(k.dtype),
    )


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Each head normalised and scaled, in float32 or wider."""
    wide = x.to(torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32))
    scale = offset + weight.to(wide.dtype)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale


def table_rows(table: torch.Tensor, length: int, position_ids: torch.Tensor | None) -> torch.Tensor:
    """The row of each token, [T, 1, R/2] or [B, T, 1, R/2]: NaN where an id is outside the table."""
    if position_ids is None:
        return table[:length].unsqueeze(-2)
    last = table.shape[0] - 1
    nearest = position_ids.clamp(0, last)
    rows = F.embedding(nearest, table)
    return rows.masked_fill((nearest != position_ids).unsqueeze(-1), torch.nan).unsqueeze(-2)


def _rotated(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = c.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, c.dtype), torch.float32)
    pairs, dim = ((half, 2), -1) if interleaved else ((2, half), -2)
    a, b = x[..., : 2 * half].to(wide).unflatten(-1, pairs).unbind(dim)
    turned = torch.stack((a * c - b * s, b * c + a * s), dim).flatten(-2).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def rotary_tables(
    positions: int | torch.Tensor,
    dim: int,
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables (cos, sin) for `rotary`: angle[t, i] = position[t] * base ** (-2 i / dim).

    Args:
        positions: a length T, for positions 0 to T-1, or a tensor [T] of positions, not necessarily whole
            (position interpolation scales them).
        dim: R, how many dimensions of each head are rotated; even.
        base: positive and finite; the longest wavelength is about 2 pi base positions.
        device: where the tables shall be; by default where `positions` is, else PyTorch's default device.
        dtype: of the tables, a floating one. Angles are computed in float64: far positions stay exact.

    Returns:
        cos and sin, each [T, R/2].

    Raises:
        ValueError: `dim` is not even and positive, `base` not positive and finite, `positions` a negative
            length or not one-dimensional.
        TypeError: a number or a dtype of another kind.

    Source: Su et al. 2021, RoFormer, section 3.4.2.

    Example:
        >>> cos, sin = rotary_tables(512, 64)
        >>> tuple(cos.shape), float(cos[0, 0]), float(sin[0, 0])
        ((512, 32), 1.0, 0.0)
    """
    _check_tables(positions, dim, base, dtype)
    if isinstance(positions, torch.Tensor):
        at = positions.to(device=device, dtype=torch.float64)
    else:
        at = torch.arange(positions, device=device, dtype=torch.float64)
    exponent = torch.arange(0, dim, 2, device=at.device, dtype=torch.float64) / -dim
    angle = torch.outer(at, torch.pow(base, exponent))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _check_tables(positions: int | torch.Tensor, dim: int, base: float, dtype: torch.dtype) -> None:
    if not hasattr(dim, "__index__"):
        raise TypeError(f"rotary_tables: dim is {dim!r}, expected a whole number")
    if dim <= 0 or dim % 2:
        raise ValueError(
            f"rotary_tables: dim is the number of rotated dimensions, even and positive, not {dim}"
        )
    if not 0 < base < math.inf:
        raise ValueError(f"rotary_tables: base is {base}, expected a positive, finite number such as 10000")
    if not dtype.is_floating_point:
        raise TypeError(f"rotary_tables: dtype is {dtype}, expected a floating one such as torch.float32")
    if isinstance(positions, torch.Tensor):
        if positions.dim() != 1:
            raise ValueError(f"rotary_tables: positions has shape {tuple(positions.shape)}, expected [T]")
    elif not hasattr(positions, "__index__"):
        raise TypeError(f"rotary_tables: positions is {positions!r}, expected a length or a tensor [T]")
    elif positions < 0:
        raise ValueError(f"rotary_tables: positions is {positions}, expected a length of 0 or more")
