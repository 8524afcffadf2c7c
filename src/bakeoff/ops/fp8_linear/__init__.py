"""A linear layer whose product is of 8-bit floating point numbers."""

from typing import Literal

import torch

from bakeoff.ops.fp8_linear.op import OP, lacks_fp8
from bakeoff.select import call

__all__ = ["OP", "fp8_linear", "lacks_fp8"]


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    grad: Literal["bf16", "e5m2"] = "bf16",
    impl: str | None = None,
) -> torch.Tensor:
    """y = (qx qw') * sx * sw' + bias, a linear layer of x and weight rounded to e4m3. It is another function
    than x weight' + bias, with three bits behind the leading one, and never chosen for that: it is asked for.

    Each row of x and of the weight has a scale: sx = max|x| / 448, sw = max|w| / 448, or 1 where that is 0;
    qx = e4m3(x / sx), qw = e4m3(w / sw), rounded to nearest even. This is computed in float32, whatever the
    dtype (a float64 x is first rounded to float32), so that all candidates and the reference round alike bit
    for bit. The product is accumulated in float32 (float64 for float64 inputs) and rounded once. A row of x
    that holds NaN or infinity gives a row of NaN, one of the weight a column.

    Gradients take the rounding for the identity (straight-through): dx = dy weight, dweight = dy' x, dbias
    the sum of dy over rows, of x and weight as they are, in their dtype. With grad="e5m2" dx is a product of
    8-bit numbers too: dx = (qd qv') * sd * sv' with qd = e5m2(dy / sd), sd = max|dy| / 57344 for each row,
    and v = weight' quantised to e4m3 with a scale for each of its rows. dweight and dbias stay as they are:
    they are sums over rows of dy, out of which a scale for each row can't be taken. There are no second
    derivatives.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any strides.
        weight: [M, K], in x's dtype.
        bias: [M], in x's dtype.
        grad: "bf16" or "e5m2".
        impl: the candidate to run; by default the selected one. FP8 matrix products take bfloat16 and need a
            GPU of compute capability 8.9 or newer; elsewhere plain PyTorch computes the same more slowly.

    Returns:
        y [..., M] in x's dtype, contiguous. Gradients have their argument's dtype.

    Raises:
        ValueError: shapes or grad that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, sections 3 and 4.

    Example:
        >>> import torch
        >>> x = torch.tensor([[448.0, 17.0]])  # 17 lies between 16 and 18, and goes to the even one
        >>> fp8_linear(x, torch.tensor([[448.0, 0.0], [0.0, 448.0]]))
        tensor([[200704.,   7168.]])
    """
    return call(OP, x, weight, bias, grad, impl=impl)  # type: ignore[no-any-return]
