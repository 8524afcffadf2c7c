"""rms_norm's promise about its results' layout, on plain PyTorch and inside torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bakeoff.ops import rms_norm
from tests.unit.compiler import needs_compiler

LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "transposed": lambda rows: torch.randn(8, rows).t(),
    "strided": lambda rows: torch.randn(rows, 16)[:, ::2],
    "turned rows": lambda rows: torch.randn(rows, 2, 8).transpose(0, 1),
    "expanded": lambda rows: torch.randn(rows, 1).expand(rows, 8),
}


def both(x: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, ...]:
    y, s = rms_norm(x, residual=x, **keywords)
    return rms_norm(x, **keywords), y, s  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", [None, "eager"])
def test_results_are_contiguous_whatever_the_inputs_are(layout: str, impl: str | None) -> None:
    x = LAYOUTS[layout](6).requires_grad_()
    found = both(x, impl=impl)
    assert all(t.is_contiguous() for t in found)
    assert torch.equal(found[2], x + x)
    sum(t.sum() for t in found).backward()  # type: ignore[union-attr]
    assert x.grad is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_inside_torch_compile_too(layout: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for rows in (6, 12, 24):  # from the second on, one graph serves every number of rows
        x = LAYOUTS[layout](rows)
        for found, wanted in zip(compiled(x), both(x), strict=True):
            assert found.is_contiguous()
            torch.testing.assert_close(found, wanted)


@needs_compiler
def test_torch_compile_with_sizes_and_numbers_that_are_symbols() -> None:
    """dynamic=True makes a symbol of every size and float from the start."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, eps: rms_norm(x, eps=eps), dynamic=True, fullgraph=True)
    for rows, eps in ((3, 1e-6), (5, 1e-6), (5, 0.5), (7, 0.25)):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x, eps), rms_norm(x, eps=eps, impl="eager"))
