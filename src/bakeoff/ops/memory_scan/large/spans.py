"""A call's sizes, a chunk's tokens, and products over them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large import kernels

__all__ = ["PARTS_OF_STATE", "Sizes", "Span", "columns", "multiply", "state_at", "turned"]

PARTS_OF_STATE = ("w1", "b1", "w2", "b2", "s1", "c1", "s2", "c2")


class Sizes:
    """A call's sizes, and what its launches share."""

    def __init__(self, q: Tensor, v: Tensor, w1: Tensor, chunk: int) -> None:
        self.G, self.T, self.D = q.shape
        self.V, self.H = v.shape[2], w1.shape[1]
        self.chunk = max(min(chunk, self.T), 1)
        self.C = kernels.across(self.T, self.chunk)
        G, D, H, V = self.G, self.D, self.H, self.V
        self.shapes = [(G, H, D), (G, H), (G, V, H), (G, V)] * 2
        across = kernels.across
        self.programs = across(H * D, kernels.BLOCK) + across(V * H, kernels.BLOCK)
        self.programs += across(H, kernels.NARROW) + across(V, kernels.NARROW)
        self.units, self.outputs = across(H, kernels.COLS), across(V, kernels.COLS)
        """Tiles side by side."""
        self.tile = {"ROWS": kernels.ROWS, "COLS": kernels.COLS, "num_warps": 4}
        scanned = min(kernels.SCAN, max(16, 1 << (self.chunk - 1).bit_length()))
        self.scan = {"chunk": self.chunk, "SCAN": scanned, "num_warps": 4}
        self.block = {
            "D": D, "H": H, "V": V, "BLOCK": kernels.BLOCK, "COLS": kernels.NARROW, "num_warps": 8
        }  # fmt: skip

    @property
    def state_size(self) -> int:
        """Floats of memory and momentum."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def kept(self, dtype: torch.dtype, steps: int, starts: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what the forward leaves for the backward: Z of keys and queries, dH, E, the
        weights, the states at chunks' starts but the first, and what was orthogonalised."""
        G, T, H = self.G, self.T, self.H
        wide = torch.float32
        return [
            ((G, T, H), dtype), ((G, T, H), dtype), ((G, T, H), dtype), ((G, T, self.V), dtype),
            ((3, G, T), wide), ((G, self.C, 3), wide), ((starts * self.state_size,), wide),
            ((self.C if steps else 0, G, (self.D + self.V) * H), wide),
        ]  # fmt: skip


class Span:
    """A chunk's tokens, and the launches over them."""

    def __init__(self, plan: Plan, sizes: Sizes, c: int) -> None:
        self.plan, self.sizes, self.first = plan, sizes, c * sizes.chunk
        self.b = min(sizes.chunk, sizes.T - self.first)
        self.tiles = kernels.across(self.b, kernels.ROWS)

    def of(self, x: Tensor) -> Tensor:
        """x's rows of the chunk."""
        if self.b == self.sizes.T:
            return x
        return self.plan.derive(Tensor.narrow, x, 1, self.first, self.b)

    def room(self, width: int, dtype: torch.dtype) -> Tensor:
        """Rows of its own."""
        return self.plan.empty((self.sizes.G, self.b, width), dtype)

    def sums(self, width: int) -> Tensor:
        """A row for each tile of rows."""
        return self.plan.empty((self.sizes.G, self.tiles, width), torch.float32)

    def launch(self, kernel: TritonKernel, across: int, **named: Any) -> None:
        """A kernel of `rows`."""
        sizes = self.sizes
        everything = {"G": sizes.G, "T": sizes.T, "first": self.first, "b": self.b, **sizes.tile}
        everything |= {"H": sizes.H, "V": sizes.V, "PARTS": sizes.units + sizes.outputs, "PART": sizes.units}
        names = {*kernel.runtime, *kernel.constexprs, "num_warps"} - named.keys()
        shared = {name: x for name, x in everything.items() if name in names}
        self.plan.launch(kernel, (sizes.G * self.tiles, across), **named, **shared)


def state_at(plan: Plan, starts: Tensor, at: int, sizes: Sizes) -> list[Tensor]:
    """The parts of the state in slot `at` of `starts`."""
    parts, offset = [], at * sizes.state_size
    for shape in sizes.shapes:
        parts.append(plan.derive(_cut, starts, offset, shape))
        offset += torch.Size(shape).numel()
    return parts


def _cut(flat: Tensor, first: int, shape: Sequence[int]) -> Tensor:
    return flat[first : first + torch.Size(shape).numel()].view(shape)


def turned(plan: Plan, x: Tensor) -> Tensor:
    """Matrices transposed."""
    return plan.derive(Tensor.transpose, x, 1, 2)


def columns(plan: Plan, x: Tensor, first: int, width: int) -> Tensor:
    """`width` columns of matrices."""
    return plan.derive(Tensor.narrow, x, 2, first, width)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, summed in float32 also where out is."""
    if a.dtype == out.dtype:
        torch.bmm(a, b, out=out)
    elif a.is_cuda and torch.version.hip is None:
        torch.bmm(a, b, out.dtype, out=out)
    else:
        torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)
