"""Second derivatives that nobody has are refused, however they are asked for."""

import pytest
import torch

from bakeoff.derivatives import once_differentiable
from bakeoff.ops import dilated_attention, fp8_linear, memory_scan
from bakeoff.ops.memory_scan.plain import _products


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable("square", "use x ** 2")
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


def square(x):
    return Square.apply(x)


def fp8(x):
    return fp8_linear(x, x)


def dilated(x):
    heads = x.view(1, 3, 2, 2)
    return dilated_attention(heads, heads, heads, (3,), (1,))


def scan(x):
    memory = torch.zeros(1, 2, 4), torch.zeros(1, 2), torch.ones(1, 4, 2), torch.zeros(1, 4)
    momentum = tuple(torch.zeros_like(part) for part in memory)
    rates = [x.mean(1)[None].sigmoid()] * 3
    return memory_scan(*[x[None]] * 3, memory, momentum, *rates, 2, impl="chunked")[0]


@pytest.mark.parametrize(
    "function", [square, fp8, dilated, scan], ids=["square", "fp8_linear", "dilated_attention", "memory_scan"]
)
def test_a_penalty_on_a_gradient_is_never_left_out(function):
    """Beside a loss, whose own gradient reaches the inputs, nothing but an error tells of it."""
    x = torch.randn(3, 4).requires_grad_()
    loss = function(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    penalized = loss + gradient.square().sum()
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.grad(penalized, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        penalized.backward()


def test_first_derivatives_are_as_ever():
    x = torch.randn(3).requires_grad_()
    for create_graph in (False, True):
        (gradient,) = torch.autograd.grad(square(x).sum(), x, create_graph=create_graph)
        assert torch.equal(gradient, 2 * x)
    with pytest.raises(RuntimeError, match="square can't be differentiated twice; use x"):
        gradient.sum().backward()


def test_the_products_of_eager_memory_scan_are_differentiated_twice():
    assert torch.autograd.gradgradcheck(_products, torch.rand(2, 4, dtype=torch.float64).requires_grad_())
