"""The compiled candidate: code per shape, then shared code, then none."""

import functools
from typing import Any

import pytest
import torch

from bakeoff.select.compiled import compiled, compiler_missing, unlinkable
from tests.unit import zoo

torch_compile = torch.compile


def formula(x: Any, scale: Any) -> Any:
    return torch.tanh(x) * scale


@pytest.fixture(autouse=True)
def _no_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch_compile, backend="eager"))


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


def test_other_errors_are_the_caller_s(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(formula)
    with pytest.raises(RuntimeError):
        call(torch.randn(4, 6), torch.randn(5))
    assert not [record for record in caplog.records if record.name == "bakeoff"]


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


@pytest.mark.parametrize("folder", ["my clone", "it's", 'a "b"'])
def test_a_folder_that_the_linker_would_split_rules_it_out(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unlinkable() is None
    monkeypatch.setattr(torch, "__file__", f"/opt/{folder}/torch/__init__.py")
    assert "has spaces or quotes in its path" in str(compiler_missing(zoo.case()))
