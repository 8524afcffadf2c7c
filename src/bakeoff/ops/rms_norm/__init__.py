"""Root mean square normalisation, optionally of a sum with a residual."""

import torch

from bakeoff.ops.rms_norm.op import OP
from bakeoff.select import call

__all__ = ["OP", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root mean square normalisation over the last dimension, optionally of x + residual.

    s = x + residual (or x); r = 1 / sqrt(mean(s^2) + eps); y = s * r * (offset + weight). Mean, root and
    products are taken in float32 (float64 for float64 inputs) and rounded once.

    Args:
        x: [..., D], float16, bfloat16, float32 or float64. Rows may lie at any distance; the last
            dimension is read in place when it is contiguous.
        weight: [D], any floating dtype, also another than x's; None stands for a factor of 1.
        eps: added to the mean square, >= 0.
        residual: as x in shape; its dtype may differ (bfloat16 x, float32 residual stream).
        offset: added to the weight; 1 is Gemma's form. Needs a weight.
        impl: the candidate to run; by default the selected one.

    Returns:
        y [..., D] in x's dtype; with a residual (y, s), where s has the promoted dtype of x and residual and
        is the next layer's residual. All are contiguous. Gradients have their argument's dtype.

    Raises:
        ValueError: shapes, eps or offset that don't fit; the message says what was expected.
        TypeError: a dtype that isn't floating point of at least 16 bits (of the weight: floating point).
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Zhang & Sennrich 2019, Root Mean Square Layer Normalization, equation 4.

    Example:
        >>> import torch
        >>> y = rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0)
        >>> y.tolist() == (torch.tensor([[3.0, 4.0]]) / 12.5**0.5).tolist()
        True
    """
    out = call(OP, x, weight, eps, residual, offset, impl=impl)
    if residual is None:
        return out  # type: ignore[no-any-return]
    y, s = out
    return y, s.contiguous()  # plain PyTorch's sum follows the layout of its inputs
