"""The compiled candidate: code per shape, then shared code, then none."""

import contextlib
import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bakeoff.select.contests.poison import Poison
from bakeoff.select.declare import compiled as module
from bakeoff.select.declare.compiled import compiled, compiler_missing, unlinkable
from tests.unit import zoo
from tests.unit.compiler import needs_compiler


def formula(x: Any, scale: Any) -> Any:
    return torch.tanh(x) * scale


def product(x: Any, scale: Any) -> Any:
    """Keeps something of its own for backward."""
    return (torch.tanh(x).exp() @ x.t().sin()).cos() * scale


@pytest.fixture
def _no_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(module, "_inductor", "eager")


@pytest.mark.usefixtures("_no_code_generator")
def test_beyond_the_recompile_limit_the_formula_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Strides are guarded, and no part of what code is kept by; a second unit falls back without a word."""
    call = compiled(formula)
    with torch._dynamo.config.patch(recompile_limit=1):
        for shape in ((4, 6), (6, 8)):
            views = [
                torch.randn(shape),
                torch.randn(shape[::-1]).t(),
                torch.randn(shape[0], 99)[:, : shape[1]],
            ]
            for x in (*views, *views):
                torch.testing.assert_close(call(x, 2.0), torch.tanh(x) * 2)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "bakeoff"]
    assert "formula: torch.compile reached torch._dynamo.config.recompile_limit" in line


@pytest.mark.usefixtures("_no_code_generator")
def test_what_is_first_met_under_a_dispatch_mode_is_compiled_nevertheless() -> None:
    """PyTorch 2.11 never compiles what it has once met under a mode; 2.13 raises there. Verification's mode
    lets it compile; where any other looks on, nothing is compiled."""
    uncompiled = []

    def watching(x: Any) -> Any:
        if not torch.compiler.is_compiling():
            uncompiled.append(x)
        return torch.tanh(x) * 2

    call, x = compiled(watching), torch.randn(4, 6, requires_grad=True)
    for mode, times in ((FlopCounterMode(display=False), 1), (Poison(), 0), (contextlib.nullcontext(), 0)):
        with mode:
            call(x).sum().backward()
        assert len(uncompiled) == times
        uncompiled.clear()
    other = compiled(watching)
    with Poison():
        other(x)
    other(x)
    assert not uncompiled


@pytest.mark.usefixtures("_no_code_generator")
def test_other_errors_are_the_caller_s(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(formula)
    with pytest.raises(RuntimeError):
        call(torch.randn(4, 6), torch.randn(5))
    assert not [record for record in caplog.records if record.name == "bakeoff"]


@pytest.mark.usefixtures("_no_code_generator")
def test_a_default_device_is_none_of_the_formulas_business() -> None:
    """Dynamo can't trace every method of tensors under the mode that sets it."""

    def halves(x: Any) -> Any:
        return x.unflatten(-1, (2, -1)).sum(-1)

    call = compiled(halves)
    x = torch.randn(3, 8)
    torch.set_default_device("cpu")
    try:
        assert torch.equal(call(x), halves(x))
    finally:
        torch.set_default_device(None)


@needs_compiler
@pytest.mark.parametrize("most", [8, 0], ids=["static", "dynamic"])
def test_backward_may_be_repeated(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where code and what is known of it come from the disk, and after a backward that let go."""
    monkeypatch.setattr(module, "_STATIC", most)
    scale = random.random()  # a number whose code isn't on the disk yet
    for _ in ("compiled now", "found on disk"):
        torch.compiler.reset()
        call = compiled(product)
        for rows in (5, 7) if most == 0 else (5,):
            x = torch.randn(rows, 6, requires_grad=True)
            (expected,) = torch.autograd.grad(product(x, scale).sum(), x)
            call(x, scale).sum().backward()
            y = call(x, scale).sum()
            y.backward(retain_graph=True)
            y.backward()
            torch.testing.assert_close(x.grad, 3 * expected)
    y = call(x, scale).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.sum().backward()


@pytest.mark.parametrize("folder", ["my clone", "it's", 'a "b"'])
def test_a_folder_that_the_linker_would_split_rules_it_out(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unlinkable() is None
    monkeypatch.setattr(torch, "__file__", f"/opt/{folder}/torch/__init__.py")
    assert "has spaces or quotes in its path" in str(compiler_missing(zoo.case()))
