"""Which gradients a kernel op has, and what tells two of its backward calls apart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan


def results(x: Tensor, other: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, other.dtype))
    return torch.empty_like(total), total


def forward(plan: Plan, x: Tensor, other: Tensor, scale: Tensor, y: Tensor, total: Tensor) -> None:
    plan.run(torch.add, x, other, out=total)
    plan.run(torch.mul, total, scale, out=y)


def backward(
    plan: Plan, dy: Tensor | None, dtotal: Tensor | None, total: Tensor, scale: Tensor,
    dx: Tensor | None, dother: Tensor | None, dscale: Tensor | None,
) -> None:  # fmt: skip
    plan.run(fill_gradients, dy, dtotal, total, scale, dx, dother, dscale)


def fill_gradients(
    dy: Any, dtotal: Any, total: Tensor, scale: Tensor, dx: Any, dother: Any, dscale: Any
) -> None:
    through = (0 if dy is None else dy * scale) + (0 if dtotal is None else dtotal)
    for gradient in (dx, dother):
        if gradient is not None:
            gradient.copy_(through)
    if dscale is not None:
        dscale.copy_((dy * total).sum(0))


scaled_sum = kernel_op(
    "test_scaled_sum",
    results=results,
    forward=forward,
    backward=backward,
    names=("y", "total"),
    depends={"total": ("x", "other")},
    shares={"other": "x"},
    materialize=False,
)


def arguments(other: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, 4), torch.randn(3, 4).to(other), torch.randn(4)]


def run(fn: Any, args: list[Tensor], used: list[int]) -> list[Tensor | None]:
    leaves = [t.detach().requires_grad_() for t in args]
    results = fn(*leaves)
    outputs = [results[i] for i in used]
    return list(
        torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("used", [[0], [1], [0, 1]], ids=str)
def test_an_argument_has_a_gradient_only_of_results_that_depend_on_it(
    used: list[int], compiled: bool
) -> None:
    torch.compiler.reset()
    fn = torch.compile(scaled_sum, fullgraph=True, backend="aot_eager") if compiled else scaled_sum
    args = arguments()
    want = run(lambda x, other, scale: ((x + other) * scale, x + other), args, used)
    for mine, plain in zip(run(fn, args, used), want, strict=True):
        if plain is None and compiled:  # a compiled graph gives zeros for results that nothing came back for
            assert mine is None or not mine.any()
        else:
            assert (mine is None) == (plain is None)
            if plain is not None:
                torch.testing.assert_close(mine, plain)


def test_the_dtype_of_an_argument_that_is_not_saved_tells_calls_apart() -> None:
    """float16 and bfloat16 are promoted to the same float32, which is all that is saved of either."""
    seen = len(scaled_sum._fills.backward.__globals__["plans"])
    for other in (torch.float16, torch.bfloat16, torch.float32):
        args = arguments(other)
        args[0] = args[0].to(torch.bfloat16 if other == torch.float16 else torch.float16)
        gradients = run(scaled_sum, args, [1])
        assert [g.dtype for g in gradients if g is not None] == [args[0].dtype, other]
    assert len(scaled_sum._fills.backward.__globals__["plans"]) == seen + 3
