"""Calls inside torch.compile: the decision is a constant of the graph, read from the table.

What Dynamo can trace through stands in `traced_call`; what it must take for a constant, in functions that
say so at the end of this file. Those take names and plain values, since Dynamo passes them no objects.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select.choose import policy
from bakeoff.select.choose.dispatch import (
    Choice,
    able,
    check_devices,
    choose,
    keep_from_torch_compile,
    other_layout,
)
from bakeoff.select.choose.tune import note
from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.lists import is_list
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.registry import registry
from bakeoff.select.declare.variants import label

__all__ = ["traced_call"]

_UNKNOWN_ROWS = 4096  # stands for the number of rows while tracing where a length must stay symbolic


class _Implementations:
    """What runs inside compiled graphs: an attribute for each op, candidate and variant. torch.compile reads
    an attribute when it meets it; of a dict it holds for a whole trace what was in it at first."""


_implementations = _Implementations()


def traced_call(op: Op, args: Sequence[Any], impl: str | None) -> Any:
    """Run the candidate selected for a call that is being traced; the numbers of rows stay open. Whether a
    candidate asked for by name can take the call is looked at with those numbers that the trace fixes."""
    from torch._dynamo.comptime import comptime  # here, because it imports all of torch._dynamo

    known: list[Any] = []
    for name, arg in zip(op.params, args, strict=True):
        if name in op.lists and is_list(arg):
            raise Unsupported(
                f"{op.name}: {name} is a list, which a traced call can't pass; keep the call out of "
                f"torch.compile with torch.compiler.disable"
            )
        if isinstance(arg, torch.Tensor):
            if arg.layout is not torch.strided or arg.is_nested:
                raise Unsupported(other_layout(op.name, name, arg))
            comptime(_note_shape)
            # With dynamic=True the number of an op that no global holds is a symbol.
            rows = arg.dim() - operator.index(op.features.get(name, 0))
            features = tuple([operator.index(size) for size in arg.shape[rows:]])  # specialises these alone
            known.append((features, rows, arg.dtype, str(arg.device), arg.requires_grad))
        elif isinstance(arg, float):  # with dynamic=True a symbol, but selection may depend on it
            comptime(_note_number)
            noted = _noted_number(name)
            known.append(arg if noted is None else noted)
        elif isinstance(arg, int) and not isinstance(arg, bool):  # likewise
            known.append(operator.index(arg))
        else:
            known.append(arg)
    described = tuple(known)
    fault = _constant_fault(op.name, described)
    if fault:
        raise _FAULTS[fault[0]](fault[1])
    chosen, kind, text = _constant_choice(op.name, described, torch.is_grad_enabled(), impl)
    if kind:
        raise _FAULTS[kind](text)
    return getattr(_implementations, chosen)(*args)


_shapes: dict[str, tuple[int | None, ...]] = {}
"""The shapes of the tensors of the call being traced, by argument, as they are in this trace."""
_fixed: dict[str, tuple[int, ...]] = {}
"""Those of them in which no size is a symbol: the compiled graph is for these alone, so no guard is added."""
_numbers: dict[str, float] = {}
"""Likewise the values of its float arguments."""
_FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (PolicyError, Unsupported, TypeError, ValueError)
}


def _note_shape(context: Any) -> None:
    """While tracing: notes the shape of `arg`, without a guard on it; None for a size that is data."""
    shape = context.get_local("arg").as_fake().shape
    known = [size if isinstance(size, int) else size.node.hint for size in shape]
    name = context.get_local("name").as_python_constant()
    _shapes[name] = tuple(known)
    _fixed.pop(name, None)
    if all(isinstance(size, int) for size in shape):
        _fixed[name] = tuple(shape)


def _note_number(context: Any) -> None:
    """While tracing: notes the number `arg`, on which the trace depends from then on."""
    arg = context.get_local("arg")
    value = arg.as_python_constant() if arg.is_python_constant() else float(arg.as_fake())
    _numbers[context.get_local("name").as_python_constant()] = value


def _noted_number(name: str) -> float | None:
    return _numbers.pop(name, None)


def _constant_fault(op_name: str, known: tuple[Any, ...]) -> tuple[str, str] | None:
    """The kind and the text of the error that the arguments deserve, or None."""
    if op_name not in registry:
        return _fault(
            PolicyError,
            PolicyError(
                f"{op_name} is not registered, and torch.compile finds ops by name: call "
                f"bakeoff.select.register(op) where it is declared"
            ),
        )
    op = registry[op_name]
    values: dict[str, Any] = {}
    devices: dict[str, str] = {}
    shapes = {**_shapes}
    _shapes.clear()
    for name, value in zip(op.params, known, strict=True):
        values[name] = value
        if _is_tensor(value):
            _, _, dtype, device, requires_grad = value
            devices.setdefault(device, name)
            shape = shapes.get(name, (None,))
            if None in shape:  # not traced by torch.compile, or a size that only the data tell
                return None
            values[name] = TensorMeta.dense(shape, dtype, grad=requires_grad)  # type: ignore[arg-type]
    try:
        check_devices(op, devices)
        op.check(Case(values, next(iter(devices), "cpu")))
    except (TypeError, ValueError) as error:
        return _fault(TypeError if isinstance(error, TypeError) else ValueError, error)
    return None


def _constant_choice(
    op_name: str, known: tuple[Any, ...], grad: bool, impl: str | None
) -> tuple[str, str, str]:
    """Where `_implementations` has what was chosen; or "", and the kind and the text of the error that asking
    deserves."""
    op = registry[op_name]
    values: dict[str, Any] = {}
    device = "cpu"
    fixed = {**_fixed}
    _fixed.clear()
    exact = impl is not None and all(
        name in fixed for name, value in zip(op.params, known, strict=True) if _is_tensor(value)
    )
    # One size for every row dimension, so that arguments fit each other whatever their dimensions mean.
    most = max([rows for _, rows, *_ in (value for value in known if isinstance(value, tuple))], default=1)
    size = round(_UNKNOWN_ROWS ** (1 / max(most, 1)))
    for name, value in zip(op.params, known, strict=True):
        if _is_tensor(value):
            features, rows, dtype, device, requires_grad = value
            shape = fixed[name] if exact else (*([size] * rows), *features)
            values[name] = TensorMeta.dense(shape, dtype, grad=requires_grad and grad)
        else:
            values[name] = op.scalar(name, value)
    case = Case(values, device)
    settings = msgspec.structs.replace(policy.current(), regime="compiled")
    try:
        if impl is not None:
            choice = Choice(able(op, case, impl, "compiled"), "", None)
        else:
            if note(op, case, "compiled"):
                settings = policy.unsettled(settings)
            choice = choose(op, case, settings)
    except (PolicyError, Unsupported) as error:
        return "", *_fault(type(error), error)
    if choice.candidate.name == "compiled":
        choice = Choice(op.incumbent, "", None)  # the region around it is compiled already
    # A name: each character that names don't have stands as its number.
    words = f"{op_name} {label(choice.candidate.name, choice.variant)}"
    chosen = re.sub(r"\W", lambda match: f"_{ord(match[0])}_", words)
    setattr(_implementations, chosen, choice.call)
    return chosen, "", ""


def _is_tensor(value: Any) -> bool:
    """Whether an argument's description is that of a tensor."""
    return isinstance(value, tuple) and len(value) == 5


def _fault(kind: type[Exception], error: Exception) -> tuple[str, str]:
    """The error's kind and text. Raising it ends the trace, and the call is made again outside."""
    keep_from_torch_compile()
    return kind.__name__, str(error)


# What torch.compiler.assume_constant_result sets; calling it would import all of torch._dynamo at once.
_constant_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]
_constant_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]
_noted_number._dynamo_marked_constant = True  # type: ignore[attr-defined]
