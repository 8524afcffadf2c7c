"""Tensors that begin at a multiple of 16 bytes stay as they are; others, and gradients, are copied there."""

from typing import Any

import torch

from bakeoff.alignment import aligned, aligned_gradient


def shifted(*shape: int) -> torch.Tensor:
    x = torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)
    assert x.data_ptr() % 16
    return x


def test_copies_only_what_begins_elsewhere() -> None:
    x, y = torch.randn(4, 8), shifted(4, 8)
    assert aligned(x) is x
    assert aligned(None) is None
    assert aligned(y).data_ptr() % 16 == 0
    assert torch.equal(aligned(y), y)


def test_a_backward_is_given_an_aligned_gradient() -> None:
    found = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            found.append(dy)
            return dy * 2

    x = torch.randn(4, 8, requires_grad=True)
    dy = shifted(4, 8)
    (dx,) = torch.autograd.grad(aligned_gradient(Kernel.apply(x)), x, dy)  # type: ignore[no-untyped-call]
    assert found[0].data_ptr() % 16 == 0
    assert torch.equal(dx, dy * 2)
    assert not aligned_gradient(Kernel.apply(x.detach())).requires_grad  # type: ignore[no-untyped-call]
