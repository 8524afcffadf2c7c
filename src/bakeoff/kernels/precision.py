"""How tensor cores multiply numbers of each dtype in Triton kernels."""

import torch
import triton

__all__ = ["precision", "turned"]

_HIP = torch.version.hip is not None


def precision(dtype: torch.dtype, *, cpu: bool = False, hip: bool = _HIP) -> str:
    """The `input_precision` of products: float32 as three products in tf32, whatever PyTorch's policy allows.

    Hopper's tensor cores cut float32 numbers off where they should round them to tf32: with one product the
    errors are ten times those of PyTorch's own products in tf32.
    """
    if dtype != torch.float32:
        return "tf32"  # says nothing about 16-bit products
    return "ieee" if hip or cpu else "tf32x3"  # the CPU interprets


@triton.constexpr_function  # type: ignore[untyped-decorator]
def turned(precision: str) -> str:
    """The same where an operand isn't stored along the sum, as Hopper takes tf32: each of its tiles would be
    turned in registers. Six products of parts in bfloat16 are as exact and took 0.65 to 0.9 of the time."""
    return "bf16x6" if precision == "tf32x3" else precision
