"""A bank of damped resonators per channel: a diagonal complex state-space model, with state."""

import torch

from bakeoff.ops.pole_scan.op import OP
from bakeoff.select import call

__all__ = ["OP", "pole_scan"]


def pole_scan(
    u: torch.Tensor,
    log_radius: torch.Tensor,
    theta: torch.Tensor,
    coef: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal convolution with sums of damped complex exponentials, as a recurrence with K states a channel.

    p[c, k] = exp(log_radius[c, k] + i theta[c, k]); Z_k[t] = p_k Z_k[t-1] + u[t], Z before position 0 being
    `state`; y[t] = Re sum_k coef_k Z_k[t]. Without a state, y is u convolved with
    h[n] = Re sum_k coef_k p_k^n. y[t] depends on u[..t] alone. That holds to the last bit with ``triton``,
    and for finite u with ``scan`` and ``compiled``, which spread a NaN or an infinity back to the start of
    its 64 positions. ``eager``, an FFT, spreads an error of some 1e-7 of the largest value (float32) over all
    positions of a row and channel, and so it does a NaN or an infinity. A sequence may be fed in pieces, each
    with the state that the one before returned; T = 1 is a decoding step, of cost O(B C K).

    Computed in float32 (float64 if an argument other than `state` has that precision) and rounded once.

    Args:
        u: [B, T, C], float16, bfloat16, float32 or float64. T = 0 returns the state as it was.
        log_radius: [C, K], float32 or float64, nats a position, finite. At most 0 for a bounded response; a
            positive one grows, and once exp(T log_radius) overflows results are no longer finite: with the
            candidates that use an FFT everywhere, with the others from there on.
        theta: [C, K], float32 or float64, radians a position; any finite value, pi being the Nyquist
            frequency.
        coef: [C, K], complex64 or complex128. Parameters kept as reals [C, K, 2] are passed as
            torch.view_as_complex(coef), which costs nothing and is differentiable.
        state: [B, C, K], complex64 or complex128; None stands for zeros.
        impl: the candidate to run; by default the selected one.

    Returns:
        (y, state): y [B, T, C] in u's dtype, in strides of the candidate's choice; the state after the last
        position, [B, C, K], complex64 (complex128 where computed so). Both carry gradients. Gradients of
        complex tensors follow PyTorch's convention: a step against them goes downhill.

    Raises:
        ValueError: shapes that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Gu et al. 2022, On the Parameterization and Initialization of Diagonal State Space Models,
    section 3 (in discrete time, poles in polar form as in Orvieto et al. 2023, Resurrecting Recurrent Neural
    Networks).

    Example:
        >>> import math, torch
        >>> click = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1)
        >>> half, quarter_turn = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.pi / 2]])
        >>> y, state = pole_scan(click, half, quarter_turn, torch.ones(1, 1, dtype=torch.complex64))
        >>> torch.allclose(y.flatten(), torch.tensor([1.0, 0.0, -0.25]), atol=1e-6)
        True
    """
    return call(OP, u, log_radius, theta, coef, state, impl=impl)  # type: ignore[no-any-return]
