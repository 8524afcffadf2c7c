"""A function that sees other globals: how one module calls our op where its siblings call theirs."""

from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from bakeoff.errors import SwapError

__all__ = ["innermost", "looked_up", "with_globals"]


def innermost(function: Callable[..., Any]) -> FunctionType:
    """The function below all decorators that say what they wrap."""
    for inner in _layers(function):
        function = inner
    if not isinstance(function, FunctionType):
        raise SwapError(f"{function!r} is no Python function")
    return function


def looked_up(function: Callable[..., Any]) -> tuple[int, ...]:
    """What a function's names among its module's globals stand for now, as identities."""
    found: list[int] = []
    for layer in _layers(function):
        if isinstance(layer, FunctionType):
            names = layer.__globals__
            found += [id(names[name]) for name in layer.__code__.co_names if name in names]
    return tuple(found)


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def with_globals(function: Any, own: Mapping[str, Any]) -> FunctionType:
    """`function` with `own` before its module's globals, its decorators around it as before.

    Neither the module nor `function` itself changes.
    """
    if not isinstance(function, FunctionType):
        raise SwapError(f"{function!r} is no Python function")
    inner = getattr(function, "__wrapped__", None)
    names, closure = function.__globals__, function.__closure__ or ()
    if inner is None:
        # Without its name: torch.compile would look globals up in the module that is called so.
        names = {name: value for name, value in names.items() if name != "__name__"} | dict(own)
    else:
        renewed = with_globals(inner, own)
        held = [cell.cell_contents is inner for cell in closure]
        if not any(held):
            raise SwapError(f"the decorator around {function.__qualname__} keeps it where it can't be found")
        closure = tuple(CellType(renewed) if it else cell for it, cell in zip(held, closure, strict=True))
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    if inner is not None:
        made.__dict__["__wrapped__"] = renewed
    return made
