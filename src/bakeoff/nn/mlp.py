"""The layer that mixes channels."""

from torch import Tensor, nn

from bakeoff.ops.swiglu import swiglu

__all__ = ["MLP"]


class MLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)), gate and up in one projection. Source: Shazeer 2020.

    Shapes: x [..., dim]; `hidden` is the inner width.

    >>> import torch
    >>> MLP(8, 24)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x)))
        return out
