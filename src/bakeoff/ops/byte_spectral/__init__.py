"""Spectra of the bytes before each position, projected without ever being stored."""

import torch

from bakeoff.autocast import as_autocast
from bakeoff.ops.byte_spectral.op import OP
from bakeoff.select import call

__all__ = ["OP", "byte_spectral"]


def byte_spectral(
    ids: torch.Tensor,
    table: torch.Tensor,
    window: torch.Tensor | None,
    omega: torch.Tensor | None = None,
    *,
    features: str = "magnitude",
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = True,
    impl: str | None = None,
) -> torch.Tensor:
    """Windowed Fourier features of the last W bytes at every position, optionally projected to D channels.

    X[b,t,c,k] = sum over m = 0..W-1 of window[m] * table[ids[b,t-m], c] * exp(-i omega[k] m), where positions
    before the start contribute 0. Features of X, with e = 1e-6:

    - ``"magnitude"``: sqrt(|X|^2 + e) - sqrt(e), in the order c*K + k, F = C*K of them;
    - ``"log"``: log(1 + magnitude), in the same order;
    - ``"complex"``: real and imaginary part next to each other, in the order (c*K + k)*2 + part, F = 2*C*K.

    With `weight`, out[b,t,:] = features @ weight + bias; the Triton candidate keeps the features on the chip.

    ``causal=False`` transforms the whole row, seen from each position: X[b,t,c,k] = sum over s = 0..T-1 of
    table[ids[b,s], c] * exp(-i omega[k] (t - s)), one transform a row and a rotation a position. It takes no
    window, and ``"complex"`` features alone: a rotation leaves every magnitude as it is, so that all
    positions of a row would be given the same ones.

    Phases are reduced in float64, sums taken in float32 (float64 where table, window or omega is float64) and
    rounded once; where `weight` is given, features are rounded to its dtype before the product.

    Args:
        ids: [B, T] uint8, the bytes, any strides.
        table: [256, C], any floating dtype: what each byte stands for; arange(256)[:, None] / 127.5 - 1 is a
            byte's plain value.
        window: [W], the weight of the byte m positions ago; None with ``causal=False``.
        omega: [K], angular frequencies in radians a byte, independent of T. None takes the grid of the
            discrete Fourier transform: 2 pi k / W for k = 0..W//2 (of length T with ``causal=False``).
        features: ``"magnitude"``, ``"log"`` or ``"complex"``.
        weight: [F, D], any floating dtype. Under autocast it is cast to autocast's dtype.
        bias: [D], any floating dtype; needs a weight.
        causal: whether only bytes up to t are seen from t.
        impl: the candidate to run; by default the selected one.

    Returns:
        [B, T, D] in weight's dtype, or [B, T, F] in table's dtype without a weight; contiguous. table,
        window, omega, weight and bias have gradients, of their own dtype.

    Raises:
        TypeError: a dtype that doesn't fit; the message names the conversion.
        ValueError: shapes or flags that don't fit; the message says what was expected.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: the sliding discrete Fourier transform, Jacobsen & Lyons 2003, with a learned alphabet and window.

    Example:
        >>> import torch
        >>> ids = torch.tensor([list(b"abababab")], dtype=torch.uint8)
        >>> table = torch.arange(256)[:, None] / 127.5 - 1
        >>> spectrum = byte_spectral(ids, table, torch.ones(8))
        >>> spectrum.shape, [k for k in range(5) if spectrum[0, -1, k] > 0.01]
        (torch.Size([1, 8, 5]), [0, 4])
    """
    weight = as_autocast(weight)
    return call(OP, ids, table, window, omega, features, weight, bias, causal, impl=impl)  # type: ignore[no-any-return]
