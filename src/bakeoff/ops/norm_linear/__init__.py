"""A normalisation and the linear layer behind it."""

from typing import Literal

import torch

from bakeoff.autocast import as_autocast
from bakeoff.ops.norm_linear.op import OP
from bakeoff.select import call

__all__ = ["OP", "norm_linear"]


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    eps: float = 1e-5,
    kind: Literal["layer", "rms"] = "layer",
    impl: str | None = None,
) -> torch.Tensor:
    """y = (n * gamma + beta) weight' + bias, where n is x normalised over its last dimension.

    kind "layer": n = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps). kind "rms": n = x / sqrt(mean(x^2) +
    eps). The definition computes in float32 (float64 where an argument is) and rounds once; candidates round
    n * gamma + beta to x's dtype for the matrix product, as PyTorch does, or weight * gamma. What is between
    the two is not kept for the backward: only the arguments are.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any strides. Under autocast x, weight and bias are
            cast to autocast's dtype.
        weight: [M, K], in x's dtype.
        bias: [M], in x's dtype.
        gamma: [K], any floating dtype, also another than x's; None stands for 1.
        beta: [K], in gamma's dtype where there is one; None stands for 0.
        eps: added to the mean square, >= 0.
        kind: "layer" or "rms".
        impl: the candidate to run; by default the selected one.

    Returns:
        y [..., M] in x's dtype, under autocast in autocast's; contiguous. Gradients have their argument's
        dtype.

    Raises:
        ValueError: shapes, eps or kind that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Ba et al. 2016, Layer Normalization, section 3; Zhang & Sennrich 2019, Root Mean Square Layer
    Normalization, equation 4.

    Example:
        >>> import torch
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0], [0.0, 5.0]])
        >>> norm_linear(x, weight, eps=0.0)
        tensor([[0., 5.]])
        >>> (12.5**0.5 * norm_linear(x, weight, eps=0.0, kind="rms")).round()
        tensor([[ 7., 20.]])
    """
    x, weight, bias = map(as_autocast, (x, weight, bias))
    return call(OP, x, weight, bias, gamma, beta, eps, kind, impl=impl)  # type: ignore[no-any-return]
