"""A call's sizes, a chunk's tokens, and launches over them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.precision import precision
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large import kernels

__all__ = ["KEPT", "PARTS_OF_STATE", "Sizes", "Span", "multiply", "state_at"]

KEPT = ("z", "zq", "h", "hq", "dh", "dz", "e", "tables", "ends", "starts", "steps")
"""What the forward leaves for the backward."""
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
        self.precision = precision(q.dtype, cpu=q.is_cpu)
        scanned = min(kernels.SCAN, max(16, 1 << (self.chunk - 1).bit_length()))
        self.scan = {"chunk": self.chunk, "SCAN": scanned, "num_warps": 8}
        self.block = {
            "D": D, "H": H, "V": V, "BLOCK": kernels.BLOCK, "COLS": kernels.NARROW, "num_warps": 8
        }  # fmt: skip

    def default(self, axis: str, q: Tensor) -> kernels.Tiling:
        """What a direction is launched with if nothing else is asked for."""
        multiprocessors = hardware.multiprocessors(str(q.device))
        return kernels.tiling_for(axis, self.G * self.chunk, self.H, q.dtype.itemsize, multiprocessors)

    @property
    def state_size(self) -> int:
        """Floats of memory and momentum."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def kept(self, dtype: torch.dtype, steps: int, starts: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what the forward leaves for the backward: Z of keys and queries, s of both,
        dH, dZ, E, the weights, the states at chunks' starts but the first, and what was orthogonalised."""
        G, T, H = self.G, self.T, self.H
        wide = torch.float32
        return [
            *[((G, T, H), dtype)] * 6, ((G, T, self.V), dtype),
            ((5, G, T), wide), ((G, self.C, 3), wide), ((starts * self.state_size,), wide),
            ((self.C if steps else 0, G, (self.D + self.V) * H), wide),
        ]  # fmt: skip


class Span:
    """A chunk's tokens, and the launches over them."""

    def __init__(self, plan: Plan, sizes: Sizes, c: int, tiling: kernels.Tiling) -> None:
        self.plan, self.sizes, self.tiling, self.first = plan, sizes, tiling, c * sizes.chunk
        self.b = min(sizes.chunk, sizes.T - self.first)
        self.tiles = kernels.across(self.b, tiling.rows)

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

    def tile(self, kind: str) -> dict[str, int]:
        """Constants and options of a kind of products over tokens."""
        return self.tiling.over_rows(kind, self.sizes.D, self.sizes.H, self.sizes.V)

    def over_rows(self, kernel: TritonKernel, width: int, kind: str = "single", **named: Any) -> None:
        """Products over tokens, `width` columns of them."""
        sizes, tile = self.sizes, self.tile(kind)
        grid = (sizes.G * self.tiles * kernels.across(width, tile["COLS"]),)
        self._launch(kernel, grid, **named, **tile)

    def over_all(self, kernel: TritonKernel, times: int, **named: Any) -> None:
        """`times` programs for each tile of both matrices, which are sums over tokens."""
        G, D, H, V = self.sizes.G, self.sizes.D, self.sizes.H, self.sizes.V
        tile = self.tiling.over_all(D, H, V)
        across = kernels.across
        tiles = across(H, tile["ROWS"]) * across(D, tile["COLS"])
        tiles += across(V, tile["ROWS"]) * across(H, tile["COLS"])
        self._launch(kernel, (times * G * tiles,), **named, **tile)

    def _launch(self, kernel: TritonKernel, grid: tuple[int, ...], **named: Any) -> None:
        """With those of the sizes that it takes."""
        sizes = self.sizes
        every: dict[str, Any] = {
            "G": sizes.G,
            "T": sizes.T,
            "first": self.first,
            "b": self.b,
            "tiles": self.tiles,
        }
        every |= {"D": sizes.D, "H": sizes.H, "V": sizes.V, "PRECISION": sizes.precision}
        names = {*kernel.runtime, *kernel.constexprs} - named.keys()
        self.plan.launch(kernel, grid, **named, **{name: x for name, x in every.items() if name in names})


def state_at(plan: Plan, starts: Tensor, at: int, sizes: Sizes) -> list[Tensor]:
    """The parts of the state in slot `at` of `starts`."""
    parts, offset = [], at * sizes.state_size
    for shape in sizes.shapes:
        parts.append(plan.derive(_cut, starts, offset, shape))
        offset += torch.Size(shape).numel()
    return parts


def _cut(flat: Tensor, first: int, shape: Sequence[int]) -> Tensor:
    return flat[first : first + torch.Size(shape).numel()].view(shape)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, by cuBLAS."""
    torch.bmm(a, b, out=out)
