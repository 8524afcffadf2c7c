"""Layer normalisation, optionally of a sum with a residual."""

import torch

from bakeoff.ops.layer_norm.op import OP
from bakeoff.select import call

__all__ = ["OP", "layer_norm"]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Layer normalisation over the last dimension, optionally of x + residual.

    s = x + residual (or x); n = (s - mean(s)) / sqrt(var(s) + eps), var(s) = mean((s - mean(s))^2);
    y = n * weight + bias. All is taken in float32 (float64 for float64 inputs) and rounded once. With
    g = dy * weight the gradients are ds = (g - mean(g) - n * mean(g * n)) / sqrt(var(s) + eps), dweight the
    sum over rows of dy * n, and dbias that of dy.

    Args:
        x: [..., D], float16, bfloat16, float32 or float64. Rows may lie at any distance; the last
            dimension is read in place when it is contiguous.
        weight: [D], any floating dtype, also another than x's; None stands for a factor of 1.
        bias: [D], any floating dtype, with or without a weight; None stands for 0.
        eps: added to the variance, >= 0.
        residual: as x in shape; its dtype may differ (bfloat16 x, float32 residual stream).
        impl: the candidate to run; by default the selected one.

    Returns:
        y [..., D] in x's dtype; with a residual (y, s), where s has the promoted dtype of x and residual and
        is the next layer's residual. All are contiguous. Gradients have their argument's dtype.

    Raises:
        ValueError: shapes or eps that don't fit; the message says what was expected.
        TypeError: a dtype that isn't floating point of at least 16 bits (of weight and bias: floating point).
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Ba et al. 2016, Layer Normalization, section 3.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), bias=torch.tensor([2.0, 2.0]), eps=0.0)
        tensor([[1., 3.]])
    """
    out = call(OP, x, weight, bias, eps, residual, impl=impl)
    if residual is None:
        return out  # type: ignore[no-any-return]
    y, s = out
    return y, s.contiguous()  # plain PyTorch's sum follows the layout of its inputs
