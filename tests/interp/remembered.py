"""What Triton's interpreter works out anew for every operation, and is remembered here: half of its time.

Shapes are compared by identity: one object stands for all shapes of the same sizes.
"""

import functools
import inspect
from typing import Any

from triton.language import core
from triton.runtime import interpreter

__all__ = ["install"]

_semantic = interpreter.interpreter_semantic
_dtypes: dict[str, Any] = {}
_by_sizes: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
_by_shape: dict[int, tuple[Any, Any, str]] = {}  # by the id of a shape in `_by_sizes`, which stays alive
_of_tensors: dict[int, tuple[Any, Any]] = {}
_together: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}  # by the ids of two shapes

_look_up = interpreter._get_np_dtype
_new_type, _equal_types = core.block_type.__init__, core.block_type.__eq__
_new_tensor = core.tensor.__init__
_equal_dtypes = core.dtype.__eq__
_broadcast = _semantic.broadcast_impl_value
_prepare = _semantic.binary_op_type_checking_impl
_constant = _semantic.scalar_constant
_constants: dict[tuple[Any, ...], Any] = {}
_integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)


def install() -> None:
    """Make the interpreter of this process remember."""
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_builtin = _wrap_builtins
    core.dtype.__eq__ = _equal_to_dtype
    core.dtype.is_int = _is_int
    core.block_type.__init__ = _type_of_shape
    core.block_type.__eq__ = _equal_to_type
    core.tensor.__init__ = _tensor_of_shape
    _semantic.broadcast_impl_value = _broadcast_values
    _semantic.binary_op_type_checking_impl = _operands
    _semantic.scalar_constant = _scalar_constant


def _np_dtype(kind: Any) -> Any:
    """Triton writes down all of NumPy's dtypes whenever it looks for one."""
    scalar = kind.element_ty if isinstance(kind, core.block_type) else kind
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = _look_up(scalar)
    return _dtypes[scalar.name]


def _equal_to_dtype(self: Any, other: Any) -> bool:
    return self is other or bool(_equal_dtypes(self, other))


def _is_int(self: Any) -> bool:
    return self.name in _integers


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(getattr(size, "value", size) for size in shape)


def _type_of_shape(self: Any, element_ty: Any, shape: Any) -> None:
    found = _by_shape.get(id(shape))
    if found is None:
        sizes = _sizes(shape)
        found = _by_sizes.get(sizes)
        if found is None:
            _new_type(self, element_ty, shape)
            found = _by_sizes[sizes] = _by_shape[id(self.shape)] = (self.shape, self.numel, str(self.shape))
    self.element_ty = element_ty
    self.shape, self.numel, text = found
    self.name = f"<{text}, {element_ty}>"


def _equal_to_type(self: Any, other: Any) -> bool:
    if isinstance(other, core.block_type) and self.shape is other.shape:
        return bool(self.element_ty == other.element_ty)
    return bool(_equal_types(self, other))


def _tensor_of_shape(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
    shape = id(type.shape) if type.is_block() else 0
    if shape and shape not in _by_shape:
        _new_tensor(self, handle, type)
        return
    if shape not in _of_tensors:
        _new_tensor(self, handle, type)
        _of_tensors[shape] = (self.shape, self.numel)
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_tensors[shape]


def _broadcast_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Both operands in the shape that they have together."""
    if not lhs.type.is_block() or not rhs.type.is_block():
        return _broadcast(lhs, rhs) if lhs.type.is_block() or rhs.type.is_block() else (lhs, rhs)
    first, second = lhs.type.shape, rhs.type.shape
    if first is second:
        return lhs, rhs
    known = _together.get((id(first), id(second)))
    if known is None:
        lhs, rhs = _broadcast(lhs, rhs)
        if id(first) in _by_shape and id(second) in _by_shape:
            _together[id(first), id(second)] = lhs.type.shape, _sizes(lhs.type.shape)
        return lhs, rhs
    return _of_shape(lhs, *known), _of_shape(rhs, *known)


_UNPROMOTED = frozenset({core.float32, core.float64, core.int32, core.int64})
"""Two operands of one of these stay as they are, in every operation."""


def _operands(lhs: Any, rhs: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
    """Both operands of one type and one shape."""
    if type(lhs) is core.tensor and type(rhs) is core.tensor:
        first, second = lhs.type, rhs.type
        if first.scalar is second.scalar and first.scalar in _UNPROMOTED:
            return _semantic.broadcast_impl_value(lhs, rhs)
    prepared: tuple[Any, Any] = _prepare(lhs, rhs, *how, **named)
    return prepared


def _scalar_constant(value: Any, dtype: Any) -> Any:
    known = value, type(value), str(value), dtype  # -0.0 is another number than 0.0
    if known not in _constants:
        _constants[known] = _constant(value, dtype)
    return _constants[known]


def _of_shape(x: Any, shape: Any, sizes: tuple[int, ...]) -> Any:
    if x.type.shape is shape:
        return x
    handle = interpreter.interpreter_builder.create_broadcast(x.handle, sizes)
    return core.tensor(handle, core.block_type(x.type.scalar, shape))


_CHECKED = core.load.__code__
"""Of the function that `@builtin` wraps around any other: it looks whether it was given a `_semantic`."""


@functools.cache
def _with_semantic(member: Any) -> Any:
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = _semantic
        return function(*args, **named)

    return call


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    found = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
    return [(name, _with_semantic(member)) for name, member in found]


def _wrap_builtins(package: Any, _: Any, scope: Any) -> None:
    """For every launch Triton looks through its language for builtins and wraps each of them anew."""
    for name, member in _builtins(package):
        scope.set_attr(package, name, member)
