"""What a call is, as far as selection may know it: metadata of its tensors and the values of the rest."""

import reprlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from bakeoff.select.declare.lists import ListMeta

__all__ = ["Case", "Cost", "TensorMeta"]

Scalar = int | float | bool | str | None


class TensorMeta(msgspec.Struct, frozen=True, tag="tensor"):
    """What selection may know of a tensor: everything but its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMeta":
        grad = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), grad)

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype, *, grad: bool = False) -> "TensorMeta":
        """A contiguous tensor."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), dtype, tuple(reversed(stride)), grad)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return self.numel == 0 or all(
            size == 1 or mine == dense
            for size, mine, dense in zip(
                self.shape, self.stride, TensorMeta.dense(self.shape, self.dtype).stride, strict=True
            )
        )


class Case(msgspec.Struct, frozen=True):
    """One concrete input set of an op, as metadata. Arguments read as attributes: ``case.x.dtype``.

    `args` holds every argument of the op by name: tensors as `TensorMeta`, lists of them as `ListMeta`, the
    rest as they are.
    """

    args: dict[str, TensorMeta | ListMeta | Scalar]
    device: str
    name: str = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.args[name]
        except KeyError:
            raise AttributeError(f"case has no argument {name!r}; it has {', '.join(self.args)}") from None

    @property
    def tensors(self) -> dict[str, TensorMeta]:
        return {name: value for name, value in self.args.items() if isinstance(value, TensorMeta)}

    @property
    def lists(self) -> dict[str, ListMeta]:
        return {name: value for name, value in self.args.items() if isinstance(value, ListMeta)}

    @property
    def data(self) -> dict[str, TensorMeta | ListMeta]:
        """The tensors and the lists of tensors."""
        return {name: v for name, v in self.args.items() if isinstance(v, TensorMeta | ListMeta)}

    @property
    def needs_grad(self) -> bool:
        return any(meta.requires_grad for meta in self.tensors.values())

    def said(self, name: str) -> str:
        """Argument `name` as an error shows it."""
        value = self.args[name]
        if isinstance(value, ListMeta):
            return f"a list of {value.count} tensors"
        return "a tensor" if isinstance(value, TensorMeta) else reprlib.repr(value)

    def replace(self, **args: TensorMeta | ListMeta | Scalar) -> "Case":
        """The same case with some arguments changed."""
        return Case({**self.args, **args}, self.device, self.name)

    def without_grad(self) -> "Case":
        """The same case, forward only."""
        return self.replace(
            **{n: msgspec.structs.replace(meta, requires_grad=False) for n, meta in self.tensors.items()}
        )


class Cost(msgspec.Struct, frozen=True):
    """What a case must do at least: bytes through device memory and floating-point operations."""

    bytes: int
    flops: int
