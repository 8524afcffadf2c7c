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
def _types_are_remembered() -> None:
    """Triton works out the shape of every result anew, and writes down all of NumPy's dtypes whenever
    it looks for one: a third of its time. What it finds is kept here."""
    from triton.language import core
    from triton.runtime import interpreter

    look_up, new_type, new_tensor = (
        interpreter._get_np_dtype,
        core.block_type.__init__,
        core.tensor.__init__,
    )
    dtypes: dict[str, Any] = {}
    by_sizes: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    by_shape: dict[int, tuple[Any, Any, str]] = {}  # by the id of a shape in `by_sizes`, which stays alive
    of_tensors: dict[int, tuple[Any, Any]] = {}

    def known_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, core.block_type) else kind
        if scalar.name not in dtypes:
            dtypes[scalar.name] = look_up(scalar)
        return dtypes[scalar.name]

    def type_of_known_shape(self: Any, element_ty: Any, shape: Any) -> None:
        found = by_shape.get(id(shape))
        if found is None:
            sizes = tuple(getattr(size, "value", size) for size in shape)
            found = by_sizes.get(sizes)
        if found is None:
            new_type(self, element_ty, shape)
            found = by_sizes[sizes] = by_shape[id(self.shape)] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    def tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        shape = id(type.shape) if type.is_block() else 0
        if shape and shape not in by_shape:
            new_tensor(self, handle, type)
            return
        if shape not in of_tensors:
            new_tensor(self, handle, type)
            of_tensors[shape] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[shape]

    interpreter._get_np_dtype = known_dtype
    core.block_type.__init__ = type_of_known_shape
    core.tensor.__init__ = tensor_of_known_shape
