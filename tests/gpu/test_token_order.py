"""token_order on a GPU: gathers both ways, the same in every run, in CUDA graphs and torch.compile."""

import pytest
import torch
from torch import Tensor

from bakeoff.graphs import capture_step
from bakeoff.token_order import token_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_and_undo_are_exact_both_ways(dtype: torch.dtype) -> None:
    order = token_order("hilbert", (64, 48)).to("cuda")
    x = torch.randn(3, 3072, 40, device="cuda", dtype=dtype, requires_grad=True)
    y = order.apply(x)
    assert torch.equal(y, x[:, order.perm.long()])
    assert torch.equal(order.undo(y), x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, order.undo(dy))


def test_in_a_captured_step() -> None:
    order = token_order("morton", (16, 16)).to("cuda")
    weight = torch.ones(256, 8, device="cuda", requires_grad=True)

    def step(x: Tensor) -> Tensor:
        loss = (order.undo(order.apply(x * weight).square())).sum()
        (slope,) = torch.autograd.grad(loss, weight)
        return slope

    captured = capture_step(step)
    for _ in range(6):
        x = torch.randn(4, 256, 8, device="cuda")
        torch.testing.assert_close(captured(x), 2 * x.square().sum(0))


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="move it once"):
        token_order("row", (4, 4)).apply(torch.zeros(1, 16, device="cuda"))
