"""The definition of swiglu, in plain PyTorch."""

import torch

__all__ = ["swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Return gate * sigmoid(gate) * up, where `gate` [..., 2F] holds both halves if `up` is None.

    Computes in float32, or in float64 for float64 inputs, and casts once at the end. Differentiable by
    autograd, twice if wanted.
    """
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide * torch.sigmoid(wide) * up.to(wide.dtype)).to(gate.dtype)
