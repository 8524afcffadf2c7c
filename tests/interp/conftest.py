"""The interpreter lane: Triton kernels run on the CPU, one operation at a time, in NumPy.

Triton reads TRITON_INTERPRET when it is imported, so this lane is a process of its own. bf16 is wrong in
the interpreter (additions give NaN), so tests here use float32 and float16.
"""

import functools
import os
import sys
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "triton is imported already, compiled: run the interpreter lane alone, `make interp`"
    )
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once_a_launch() -> None:
    """Triton's interpreter replaces `triton.language` by its own for a launch, and does so anew whenever one
    `@triton.jit` function calls another: a third of the time of kernels that are made of several."""
    from triton import language
    from triton.runtime import interpreter

    replaced: set[ModuleType] = set()  # by the launch under way
    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang

    @functools.cache
    def languages(function: FunctionType) -> set[ModuleType]:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return {language, language.core}.intersection(modules)

    def launch_afresh(executor: Any, *args: Any, **named: Any) -> None:
        replaced.clear()
        launch(executor, *args, **named)

    def replace_once(function: FunctionType) -> Any:
        if languages(function) <= replaced:
            return None
        replaced.update(languages(function))
        return replace(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, replace_once


@pytest.fixture(scope="session", autouse=True)
def _overflow_is_looked_for_by_all(request: pytest.FixtureRequest) -> None:
    """The interpreter computes each sum, difference and product of integers of 32 bits in 64 bits, too, to
    find an overflow: a fourth of its time. At sizes that the interpreter takes there is none; `make test-all`
    looks."""
    from triton.runtime import interpreter

    if request.config.getoption("--hypothesis-profile", None) == "quick":
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


@pytest.fixture(scope="session", autouse=True)
def _what_is_worked_out_is_remembered() -> None:
    from tests.interp import remembered

    remembered.install()
