"""Lists of tensors as arguments of an op: what selection is told of one, and a list that remembers it."""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from bakeoff.errors import Unsupported

try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:  # a private name: without it every list is read anew
    _Guards = None  # type: ignore[assignment,misc]

__all__ = ["ListMeta", "TensorList", "as_list", "check_apart", "check_list", "is_list"]

_PLAIN = frozenset({Tensor, Parameter})


class ListMeta(msgspec.Struct, frozen=True, tag="list"):
    """What selection may know of a list of tensors of one dtype on one device."""

    count: int
    """How many tensors."""
    numel: int
    """Elements of all tensors together."""
    dtype: torch.dtype
    contiguous: bool = True
    """Whether every tensor is contiguous."""
    shape: tuple[int, ...] | None = None
    """The shape of every tensor, where they have one in common and are no scalars."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorList(list[Tensor]):
    """A list of tensors that knows what selection asks of it and where its tensors lie.

    `call` makes one of every list it is given. An optimizer, which passes the same tensors at every step,
    keeps the `outline` of its lists and fills that in again, which reads much less of the tensors.
    """

    __slots__ = ("_is_of_kind", "_tensors", "addresses", "device", "kind", "meta", "sizes")

    meta: ListMeta
    device: torch.device
    sizes: tuple[int, ...]
    """Elements of each tensor."""
    addresses: list[int]
    """Where each tensor's memory begins."""
    kind: tuple[Any, ...]
    """Everything that a selection may depend on."""
    _is_of_kind: Callable[..., bool] | None
    """PyTorch's own comparison of tensors with these ones' sizes, strides, dtypes and devices."""
    _tensors: list[Callable[[], Tensor | None]]
    """In an outline: weak references."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], label: str = "tensors") -> "TensorList":
        """The list of these tensors; `label` names it in messages.

        Raises:
            ValueError: no tensors, or tensors of several devices or dtypes.
            TypeError: something else than a dense tensor.
            Unsupported: a DTensor.
        """
        made = cls(tensors)
        if not made:
            raise ValueError(f"{label} is empty: pass at least one tensor")
        for i, t in enumerate(made):
            _check(t, made[0], f"{label}[{i}]")
        made.device, made.sizes = made[0].device, tuple([t.numel() for t in made])
        contiguous = all(t.is_contiguous() for t in made)
        shape = tuple(made[0].shape)
        common = len(set(made.sizes)) == 1 and all(t.shape == shape for t in made)
        made.meta = ListMeta(
            len(made), sum(made.sizes), made[0].dtype, contiguous, shape if shape and common else None
        )
        made.addresses = _addresses(made)
        wants_grad = any(t.requires_grad for t in made)
        made.kind = (made.meta, made.device, wants_grad, frozenset(set(map(type, made)) - _PLAIN))
        return made

    @classmethod
    def joined(cls, lists: "Sequence[TensorList]") -> "TensorList":
        """Lists of one device and dtype, one behind the other; their tensors are not looked at."""
        if len(lists) == 1:
            return lists[0]
        made = cls([t for each in lists for t in each])
        metas = [each.meta for each in lists]
        contiguous = all(meta.contiguous for meta in metas)
        shape = metas[0].shape if len({meta.shape for meta in metas}) == 1 else None
        made.meta = ListMeta(len(made), sum(meta.numel for meta in metas), metas[0].dtype, contiguous, shape)
        made.device = lists[0].device
        made.sizes = tuple([size for each in lists for size in each.sizes])
        made.addresses = [address for each in lists for address in each.addresses]
        wants_grad = any(each.wants_grad for each in lists)
        made.kind = (
            made.meta,
            made.device,
            wants_grad,
            frozenset().union(*[each.subclasses for each in lists]),
        )
        return made

    def outline(self) -> "TensorList":
        """What is known of this list, without its tensors: it keeps no memory alive."""
        outline = self._filled(())
        outline._is_of_kind = _comparison(self)
        outline._tensors = [weakref.ref(t) for t in self]
        return outline

    def same(self, tensors: Sequence[Tensor]) -> "TensorList | None":
        """In an outline: the list of these tensors, if they are the very ones it was made of and lie where
        they lay. Whether one has been given another shape in its place is not looked at."""
        if len(tensors) != len(self._tensors):
            return None
        known = map(operator.call, self._tensors)
        if not all(map(operator.is_, known, tensors)) or self.addresses != [t.data_ptr() for t in tensors]:
            return None
        return self._filled(tensors)

    def alike(self, tensors: Sequence[Tensor]) -> "TensorList | None":
        """In an outline: the list of these tensors, if they are of the sizes, strides and dtypes of those it
        was made of."""
        if self._is_of_kind is None or len(tensors) != len(self._tensors) or not self._is_of_kind(*tensors):
            return None
        made = self._filled(tensors)
        made.addresses = [t.data_ptr() for t in tensors]
        return made

    def _filled(self, tensors: Sequence[Tensor]) -> "TensorList":
        made = TensorList(tensors)
        made.meta, made.device, made.sizes = self.meta, self.device, self.sizes
        made.kind, made.addresses = self.kind, self.addresses
        return made

    @property
    def wants_grad(self) -> bool:
        """Whether some tensor requires a gradient."""
        return bool(self.kind[2])

    @property
    def subclasses(self) -> frozenset[type]:
        """Classes of its tensors other than Tensor and Parameter."""
        return self.kind[3]  # type: ignore[no-any-return]


def is_list(value: Any) -> bool:
    """Whether an argument is a list of tensors, as far as its type tells."""
    return isinstance(value, list | tuple)


def check_list(value: Any, label: str) -> None:
    """Raises TypeError for what is no list of anything, such as a generator or None."""
    if isinstance(value, Tensor) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        fix = "a tensor alone goes in brackets" if isinstance(value, Tensor) else "list(...) makes one"
        raise TypeError(f"{label} must be a list of tensors, got {type(value).__name__}; {fix}")


def check_apart(columns: Mapping[str, TensorList], op: str) -> None:
    """Raises ValueError where two tensors of lists that are written to begin at the same place: both updates
    would go to the same elements, at once."""
    placed = [
        (address, f"{name}[{i}]")
        for name, column in columns.items()
        for i, (address, size) in enumerate(zip(column.addresses, column.sizes, strict=False))
        if size and address  # on PyTorch's meta device all lie at 0
    ]
    first = dict(reversed(placed))
    if len(first) == len(placed):
        return
    address, other = next((address, label) for address, label in placed if first[address] != label)
    raise ValueError(
        f"{op}: {other} lies in the memory of {first[address]}, so that it would be updated twice; list each "
        f"tensor once"
    )


def as_list(value: Sequence[Tensor], label: str = "tensors") -> TensorList:
    """`value` as a `TensorList`."""
    return value if value.__class__ is TensorList else TensorList.of(value, label)


def _addresses(tensors: list[Tensor]) -> list[int]:
    try:
        return [t.data_ptr() for t in tensors]
    except RuntimeError:  # tensors without memory: fake ones, those that torch.func wraps
        return []


def _comparison(tensors: list[Tensor]) -> Callable[..., bool] | None:
    if _Guards is None or len(set(map(id, tensors))) < len(tensors):
        return None  # it takes a tensor that is listed twice for another kind
    check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _check(tensor: Any, first: Any, label: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{label} is {type(tensor).__name__}, not a tensor; leave what has no gradient out")
    if type(tensor).__name__ == "DTensor":
        raise Unsupported(f"{label} is a DTensor; ops work on local shards: pass .to_local()")
    if tensor.layout is not torch.strided or tensor.is_nested:
        form, fix = ("nested", "to_padded_tensor") if tensor.is_nested else ("sparse", "to_dense")
        raise TypeError(f"{label} is {form}; make it dense with .{fix}()")
    if tensor.is_neg() or tensor.is_conj():
        raise TypeError(f"{label} is a lazy negative or conjugate; pass .resolve_neg().resolve_conj()")
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise ValueError(
            f"{label} is {tensor.dtype} on {tensor.device}, the first is {first.dtype} on {first.device}; "
            f"make one call for each dtype and device"
        )
