"""layer_norm's layout promise, and torch.nn.LayerNorm's stand-in."""

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bakeoff.nn.norm
from bakeoff.nn import LayerNorm
from bakeoff.ops import layer_norm
from bakeoff.ops.layer_norm.reference import layer_norm as reference
from tests.unit.compiler import needs_compiler

LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "transposed": lambda rows: torch.randn(8, rows).t(),
    "strided": lambda rows: torch.randn(rows, 16)[:, ::2],
    "turned rows": lambda rows: torch.randn(rows, 2, 8).transpose(0, 1),
    "expanded": lambda rows: torch.randn(rows, 1).expand(rows, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", [None, "eager"])
def test_results_are_contiguous_whatever_the_inputs_are(layout: str, impl: str | None) -> None:
    x = LAYOUTS[layout](6).requires_grad_()
    y, s = layer_norm(x, residual=x, impl=impl)
    found = (layer_norm(x, impl=impl), y, s)
    assert all(t.is_contiguous() for t in found)
    assert torch.equal(s, x + x)
    sum(t.sum() for t in found).backward()  # type: ignore[union-attr]
    assert x.grad is not None


@needs_compiler
def test_torch_compile_with_sizes_and_numbers_that_are_symbols() -> None:
    """dynamic=True makes a symbol of every size and float from the start."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, eps: layer_norm(x, eps=eps), dynamic=True, fullgraph=True)
    for rows, eps in ((3, 1e-6), (5, 0.5), (7, 0.25)):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x, eps), layer_norm(x, eps=eps, impl="eager"))


@pytest.mark.parametrize("impl", ["eager", None])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_eager_agrees_with_the_definition_in_float64(impl: str | None, weight: bool, bias: bool) -> None:
    x, w, b, r = (torch.randn(s, dtype=torch.float64) for s in ((3, 4, 9), (9,), (9,), (3, 4, 9)))
    args = (x, w if weight else None, b if bias else None, 0.3)
    for found, wanted in zip(layer_norm(*args, residual=r, impl=impl), reference(*args, r), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "no parameters": {"elementwise_affine": False},
    "float64": {"dtype": torch.float64, "eps": 0.25},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [6, (6,), [2, 6]])
def test_the_module_stands_in_for_pytorch_s(features: Any, form: str) -> None:
    theirs = torch.nn.LayerNorm(features, **FORMS[form])
    ours = LayerNorm(features, **FORMS[form])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    x = torch.randn(4, 3, 2, 6, dtype=FORMS[form].get("dtype", torch.float32), requires_grad=True)
    dy = torch.randn_like(x)
    results = []
    for module in (theirs, ours):
        y = module(x)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    torch.testing.assert_close(*results)
    y, s = ours(x, x.detach())
    torch.testing.assert_close(y, theirs(2 * x))
    assert torch.equal(s, 2 * x)


def test_the_module_names_a_shape_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"LayerNorm: x has shape \(3, 5\), expected \[\.\.\., \[2, 6\]\]"):
        LayerNorm((2, 6))(torch.randn(3, 5))


def test_the_examples_of_the_modules_run() -> None:
    assert doctest.testmod(bakeoff.nn.norm, extraglobs={"torch": torch}).failed == 0
