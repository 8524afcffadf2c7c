"""Launching Triton kernels that take views of tensors, for the bulk copy engine of NVIDIA's GPUs.

Such a kernel takes a *tensor map* where others take an address: 128 bytes with an address, a shape and
strides, which the host encodes anew for every launch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bakeoff.kernels.ahead import Missing
from bakeoff.kernels.triton import Compiled, TritonKernel

__all__ = ["View", "ViewKernel"]


class View(NamedTuple):
    """How a kernel sees a tensor: as `shape` with `strides` from the tensor's first element on, in tiles."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> Any:
        """What Triton takes as the argument."""
        from triton.experimental.gluon.language import NVMMASharedLayout  # here: most calls need neither
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        rank, bits = len(self.tile), 8 * tensor.element_size()
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)
        return TensorDescriptor(tensor, [*self.shape], [*self.strides], [*self.tile], layout)


class ViewKernel(TritonKernel):
    """A `TritonKernel` that takes some of its tensors as views.

    ``kernel(grid, views={"x": view}, x=x, y=y, BLOCK=64)``: tensors by name, as ever, and for some a `View`.
    The tiles' shapes and dtype must follow from the constexprs.
    """

    def __call__(self, grid: tuple[int, ...], /, **named: Any) -> Any:
        """As that of `TritonKernel`."""
        views: Mapping[str, View] = named.pop("views")
        seen = {name: view.of(named[name]) for name, view in views.items()}
        compiled = super().__call__(grid, **named | seen)
        if compiled is None:
            return None
        return _Compiled(compiled, {self.runtime.index(name): _Encoder(view) for name, view in seen.items()})

    def missing(self, grid: tuple[int, ...], /, **named: Any) -> Missing:
        """As that of `TritonKernel`."""
        views: Mapping[str, View] = named.pop("views")
        return super().missing(grid, **named | {name: view.of(named[name]) for name, view in views.items()})


class _Compiled(NamedTuple):
    """A kernel in the driver, and how it sees the tensors at some places of its arguments."""

    kernel: Compiled
    encoders: Mapping[int, "_Encoder"]

    def replay(self, grid: str, arguments: str, prefix: str) -> tuple[str, dict[str, Any]]:
        """As that of `Compiled`; `arguments` are addresses."""
        words: Sequence[str] = [
            f"{prefix}view{place}({word})" if place in self.encoders else word
            for place, word in enumerate(arguments.split(", "))
        ]
        line, scope = self.kernel.replay(grid, ", ".join(words), prefix)
        return line, scope | {f"{prefix}view{place}": encoder for place, encoder in self.encoders.items()}


class _Address(int):
    """An address, where Triton expects a tensor."""

    __slots__ = ()

    def data_ptr(self) -> int:
        return int(self)


class _Encoder:
    """Makes what Triton takes as an argument out of a tensor's address: in a microsecond, without checks."""

    def __init__(self, described: Any) -> None:
        self._kind = type(described)
        self._fields = {name: value for name, value in vars(described).items() if name != "base"}

    def __call__(self, address: int) -> Any:
        made = object.__new__(self._kind)
        made.__dict__.update(self._fields, base=_Address(address))
        return made
