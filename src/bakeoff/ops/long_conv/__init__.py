"""Causal convolution with filters as long as the sequence, one per channel."""

import torch

from bakeoff.ops.long_conv.op import OP
from bakeoff.select import call

__all__ = ["OP", "long_conv"]


def long_conv(
    u: torch.Tensor,
    h: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    causal: bool = True,
    impl: str | None = None,
) -> torch.Tensor:
    """Convolves each channel with its own filter, with optional gates around it and a skip.

    v = u * gate_in; y[b,t,c] = sum over s <= t, t - s < L of h[c, t-s] v[b,s,c] + skip[c] v[b,t,c];
    out = y * gate_out. Nothing wraps around, whatever T and L; taps beyond T have no effect. Position t sees
    positions up to t alone, but for rounding: an FFT spreads an error of some 1e-7 of the largest value
    (float32) over all positions of a row and channel, and so it does a NaN or an infinity, which a product of
    matrices (``toeplitz``) spreads over some.

    ``causal=False`` takes the filter to both sides: y[t] = sum over |t - s| < L of h[|t-s|] v[s].

    Sums are taken in float32 (float64 where u, h or skip is float64); v and y may be rounded to u's dtype, as
    products with the gates in that dtype are.

    Args:
        u: [B, T, C], any floating dtype of at least 16 bits, any strides; channel-major data is a view,
            ``x.transpose(1, 2)`` of x [B, C, T].
        h: [C, L], any such dtype: the response to an impulse after 0, 1, ... positions.
        skip: [C], the weight of v itself, in addition to h[:, 0]; None: 0.
        gate_in, gate_out: [B, T, C]; None: 1.
        causal: whether the filter reaches into the past alone.
        impl: the candidate to run; by default the selected one.

    Returns:
        [B, T, C] in u's dtype, in strides of the candidate's choice. u, h, skip and the gates
        have gradients, of their own dtype.

    Raises:
        TypeError: a dtype that isn't floating point, or has 8 bits.
        ValueError: shapes that don't fit; the message says what was expected.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Poli et al. 2023, Hyena Hierarchy, section 3.

    Example:
        >>> import torch
        >>> click = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 4, 1)
        >>> echo = torch.tensor([[1.0, 0.5]])
        >>> long_conv(click, echo).flatten().round(decimals=5).tolist()
        [1.0, 0.5, 0.0, 2.0]
    """
    return call(OP, u, h, skip, gate_in, gate_out, causal, impl=impl)  # type: ignore[no-any-return]
