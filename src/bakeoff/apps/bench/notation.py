"""Cases as text, as keys write them: ``x=bf16[8192,4096]' weight=bf16[4096] eps=1e-05``.

A prime marks a tensor whose gradient is needed; ``:strided`` and ``:other`` after the shape are the layout
classes of `bakeoff.select.declare.key`. ``grads=fp32[148 tensors, 124000000]`` is a list of tensors with so
many elements together, ``grads=fp32[12 tensors of 768x2048]`` one of tensors of that shape.
"""

import ast
import inspect
import math
import re

import torch

from bakeoff.errors import BakeoffError
from bakeoff.select import Case, ListMeta, Op, TensorMeta
from bakeoff.select.declare.key import REGIMES, layout, list_text

__all__ = ["NotationError", "read_case", "split_key", "write_case"]

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LONG = {short: name for name, short in _SHORT.items()}
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s*]*)\](?::(?P<layout>\w+))?(?P<grad>'?)")
_LIST = re.compile(
    r"(?P<dtype>\w+)\[(?P<count>\d+) tensors(, ?(?P<numel>\d+)| of (?P<shape>\d+(x\d+)*))\]"
    r"(?P<strided>:strided)?"
)
_UNREADABLE = re.compile(r"\w+\[(?![\d,\s*]*\])")  # begins like a tensor, but isn't one
_KEY = re.compile(rf"(?P<op>\w+)\((?P<arguments>.*)\) (?P<device>\w+) (?P<regime>{'|'.join(REGIMES)})")
_ANY_ROWS = 1024  # stands for the * of a compiled region's key
_FORM = "write a tensor as x=bf16[8192,4096], with a ' behind it where its gradient is needed"


class NotationError(BakeoffError, ValueError):
    """A case that can't be read."""


def write_case(op: Op, case: Case) -> str:
    """The case's arguments as text that `read_case` reads; arguments that are None are left out."""
    parts = []
    for name, value in case.args.items():
        if isinstance(value, ListMeta):
            parts.append(f"{name}={list_text(value)}")
        elif isinstance(value, TensorMeta):
            dtype = str(value.dtype).removeprefix("torch.")
            kind = layout(value, op.features.get(name, len(value.shape)))
            sizes = ",".join(map(str, value.shape))
            text = f"{_SHORT.get(dtype, dtype)}[{sizes}]{'' if kind == 'dense' else ':' + kind}"
            parts.append(f"{name}={text}{chr(39) * value.requires_grad}")
        elif value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def read_case(op: Op, arguments: list[str], device: str, *, grad: bool = False) -> Case:
    """The case of ``name=value`` arguments; what is missing takes the op's defaults.

    With `grad`, every floating tensor needs its gradient, as with a prime on each.

    Raises:
        NotationError: an argument the op doesn't have or that is given twice, a value that can't be read, a
            dtype that doesn't fit.
        ValueError: shapes or values that don't fit.
    """
    parameters = inspect.signature(op.reference).parameters
    given: dict[str, TensorMeta | ListMeta | int | float | bool | str | None] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise NotationError(f"{argument!r} has no '=': {_FORM}")
        if name not in parameters:
            raise NotationError(f"{op.name} has no argument {name!r}; it has {', '.join(parameters)}")
        if name in given:
            raise NotationError(f"{name} is given twice: leave one of them out")
        given[name] = op.scalar(name, _value(op, name, text.strip(), grad))
    missing = [name for name, p in parameters.items() if name not in given and p.default is p.empty]
    if missing:
        raise NotationError(f"{op.name} needs {', '.join(missing)}, too: {_FORM}")
    filled = {name: given.get(name, p.default) for name, p in parameters.items()}
    case = Case(filled, device)
    try:
        op.check(case)
    except TypeError as error:
        raise NotationError(str(error)) from error
    return case


def _value(
    op: Op, name: str, text: str, grad: bool
) -> TensorMeta | ListMeta | int | float | bool | str | None:
    listed = _LIST.fullmatch(text)
    if listed is not None:
        count, contiguous = int(listed["count"]), not listed["strided"]
        shape = tuple(map(int, listed["shape"].split("x"))) if listed["shape"] else None
        numel = int(listed["numel"]) if shape is None else count * math.prod(shape)
        return ListMeta(count, numel, _dtype(name, listed["dtype"]), contiguous, shape)
    match = _TENSOR.fullmatch(text)
    if match is None and _UNREADABLE.match(text):
        raise NotationError(f"'{name}={text}' can't be read: write a tensor as {name}=bf16[8,40]")
    if match is None:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if value is not None and not isinstance(value, int | float | bool | str):
            raise NotationError(f"{name}={text!r} can't be read: {_FORM}")
        return value
    dtype = _dtype(name, match["dtype"])
    sizes = match["shape"].replace("*", str(_ANY_ROWS)).split(",")
    shape = tuple(int(size) for size in sizes if size.strip())
    needs_grad = (grad or bool(match["grad"])) and (dtype.is_floating_point or dtype.is_complex)
    meta = TensorMeta.dense(shape, dtype, grad=needs_grad)
    kind = match["layout"] or "dense"
    if kind not in ("dense", "strided", "other"):
        raise NotationError(f"{name}: there is no layout {kind!r}; use dense, strided or other")
    return _laid_out(meta, kind, op.features.get(name, 1))


def _dtype(name: str, word: str) -> torch.dtype:
    dtype = getattr(torch, _LONG.get(word, word), None)
    if not isinstance(dtype, torch.dtype):
        raise NotationError(f"{name}: there is no dtype {word!r}; use {', '.join(_LONG)} or torch's names")
    return dtype


def _laid_out(meta: TensorMeta, kind: str, features: int) -> TensorMeta:
    """`meta`, dense, in another layout class: rows twice as far apart, or the last dimension not the
    densest."""
    rows, dense = len(meta.shape) - features, meta.stride
    if kind == "strided":
        stride = (*(2 * s for s in dense[:rows]), *dense[rows:])
    elif kind == "other":
        stride = tuple(2 * s for s in dense)
    else:
        stride = dense
    return TensorMeta(meta.shape, meta.dtype, stride, meta.requires_grad)


def split_key(text: str) -> tuple[str, list[str], str, str] | None:
    """(op, arguments, device, regime) of a key as tables print it, or None where `text` is no key."""
    match = _KEY.fullmatch(text.strip())
    if match is None:
        return None
    arguments = re.split(r", (?=\w+=)", match["arguments"])
    return match["op"], arguments, match["device"], match["regime"]
