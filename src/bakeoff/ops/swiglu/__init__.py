"""The gated activation of an MLP: SiLU of one half times the other."""

import torch

from bakeoff.ops.swiglu.op import OP
from bakeoff.select import call

__all__ = ["OP", "swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """y = silu(gate) * up = gate * sigmoid(gate) * up, elementwise.

    The definition computes in float32 (float64 for float64 inputs) and rounds once. With s = sigmoid(gate)
    the gradients are dup = dy * gate * s and dgate = dy * up * s * (1 + gate * (1 - s)); the Triton candidate
    keeps nothing but the inputs for them.

    Args:
        gate: [..., F], float16, bfloat16, float32 or float64, any strides. Without `up` it is [..., 2F], the
            gate's half first, as one matrix product makes both; its gradient is then one tensor, which a
            fused candidate writes once.
        up: [..., F] of gate's shape and dtype.
        impl: the candidate to run; by default the selected one.

    Returns:
        y [..., F] in gate's dtype, contiguous.

    Raises:
        ValueError: shapes that don't fit; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Shazeer 2020, GLU Variants Improve Transformer, equation 6 (without its matrix products).

    Example:
        >>> import torch
        >>> gate, up = torch.tensor([0.0, 30.0]), torch.tensor([5.0, 2.0])
        >>> swiglu(gate, up)
        tensor([ 0., 60.])
        >>> bool(torch.equal(swiglu(torch.cat([gate, up])), swiglu(gate, up)))
        True
    """
    y: torch.Tensor = call(OP, gate, up, impl=impl)
    return y.contiguous()  # plain PyTorch's result follows the layout of its inputs
