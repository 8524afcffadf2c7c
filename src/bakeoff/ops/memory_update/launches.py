"""The gradient of a memory's loss in launches, and what of it the derivative reads.

Launches don't overlap: with programmatic dependent launch the step took 45 us where it takes 35 (1x2048x512,
bfloat16, H200, in a graph).
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.layout import alignment
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.precision import precision
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_update import kernels
from bakeoff.ops.memory_update.kernels import Tiling
from bakeoff.ops.memory_update.kernels import forward as forward_kernels
from bakeoff.ops.memory_update.reference import loss_factor

__all__ = ["Kept", "Sizes", "Told", "constants", "dense", "gradient_of", "rows_of", "shapes_of"]

_narrow = TritonKernel(forward_kernels._narrow)
_hidden = TritonKernel(forward_kernels._hidden)
_error = TritonKernel(forward_kernels._error)
_hidden_slope = TritonKernel(forward_kernels._hidden_slope)
_gradient = TritonKernel(forward_kernels._gradient)

_MOST_STRIDE = 1 << 23  # 128 rows of it in 32 bits


T = TypeVar("T")


class Sizes(NamedTuple):
    """Groups, rows, and the features of keys, hidden layer and values."""

    G: int
    N: int
    D: int
    H: int
    V: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, w1: Tensor) -> "Sizes":
        """Those of a call."""
        G, N, D = k.shape
        return cls(G, N, D, w1.shape[1], v.shape[2])

    @property
    def features(self) -> tuple[int, int, int]:
        return self.D, self.H, self.V


class Kept(NamedTuple, Generic[T]):
    """What the gradient's launches make and its derivative reads."""

    narrow1: T
    narrow2: T
    """The matrices in the dtype of products, where that isn't their own."""
    z: T
    h: T
    dy: T
    e: T
    """Where rows have weights; else dy tells as much."""
    dh: T
    dz: T
    g: T


def shapes_of(k: Tensor, v: Tensor, w1: Tensor, weighted: bool) -> list[tuple[int, ...]]:
    """The shapes of what is kept, (0,) for what isn't there. `g` is float32, the others like `k`."""
    G, N, D, H, V = Sizes.of(k, v, w1)
    hidden, values, nothing = (G, N, H), (G, N, V), (0,)
    kept = Kept(
        narrow1=(G, H, D), narrow2=(G, V, H), z=hidden, h=hidden, dy=values, e=values, dh=hidden, dz=hidden,
        g=kernels.flat(G, D, H, V),
    )  # fmt: skip
    if k.dtype == w1.dtype:
        kept = kept._replace(narrow1=nothing, narrow2=nothing)
    return list(kept if weighted else kept._replace(e=nothing))


class Told(NamedTuple):
    """What the gradient's launches tell the step."""

    g: Tensor
    losses: Tensor
    squares: Tensor


def rows_of(plan: Plan, t: Tensor, name: str) -> tuple[Tensor, dict[str, int]]:
    """`t` [G, N, features] as rows one stride apart, and that stride as kernels take it."""
    rows, stride = plan.rows(t)
    if stride >= _MOST_STRIDE:
        rows, stride = plan.contiguous(t), t.shape[-1]
    align = alignment(stride)
    return rows, {f"{name}_units": stride // align, f"{name.upper()}_ALIGN": align}


def dense(plan: Plan, t: Tensor | None) -> Tensor | None:
    """`t` or a contiguous copy; None for None."""
    return None if t is None else plan.contiguous(t)


def constants(tiling: Tiling | None, sizes: Sizes, k: Tensor) -> tuple[Tiling, dict[str, Any]]:
    """The tiling, by default one that suits the sizes; tiles, precision and options of products over rows."""
    tiling = tiling or kernels.tiling_for(*sizes, k.itemsize, hardware.multiprocessors(k.get_device()))
    return tiling, {**tiling.over_rows(*sizes.features), "PRECISION": precision(k.dtype, cpu=k.is_cpu)}


def gradient_of(
    plan: Plan,
    k: Tensor,
    v: Tensor,
    memory: Sequence[Tensor],
    row_weight: Tensor | None,
    reduction: str,
    tiling: Tiling | None,
    kept: Kept[Tensor | None],
) -> Told:
    """Launches what the gradient of each group takes, and fills what of `kept` there is; `memory` is
    contiguous."""
    w1, b1, w2, b2 = memory
    sizes = Sizes.of(k, v, w1)
    G, N, D, H, V = sizes
    tiling, rows = constants(tiling, sizes, k)
    k, k_numbers = rows_of(plan, k, "k")
    v, v_numbers = rows_of(plan, v, "v")
    row_weight = dense(plan, row_weight)
    tiles = G * kernels.across(N, rows["ROWS"])
    wide_h, wide_v = tiles * kernels.across(H, rows["COLS"]), tiles * kernels.across(V, rows["COLS"])

    def room(given: Tensor | None, width: int) -> Tensor:
        return plan.empty((G, N, width), k.dtype) if given is None else given

    z, h, dy, dz = room(kept.z, H), room(kept.h, H), room(kept.dy, V), room(kept.dz, H)
    g = plan.empty(kernels.flat(G, D, H, V), torch.float32) if kept.g is None else kept.g
    losses = plan.empty((G, wide_v // G), torch.float32)
    sums1, sums2 = plan.empty((tiles, H), torch.float32), plan.empty((tiles, V), torch.float32)
    if k.dtype != w1.dtype:
        w1, w2 = _narrowed(plan, w1, w2, k.dtype, kept)
    to_hidden, to_values = {"N": N, "D": D, "H": H, **rows}, {"N": N, "H": H, "V": V, **rows}
    plan.launch(_hidden, (wide_h,), k=k, w1=w1, b1=b1, z=z, h=h, **k_numbers, **to_hidden)
    plan.launch(
        _error, (wide_v,), h=h, w2=w2, b2=b2, v=v, weight=row_weight, dy=dy,
        e=None if row_weight is None else kept.e, losses=losses, sums2=sums2, **v_numbers, **to_values,
    )  # fmt: skip
    plan.launch(_hidden_slope, (wide_h,), dy=dy, w2=w2, z=z, dh=kept.dh, dz=dz, sums1=sums1, **to_values)
    sums = tiling.over_all(D, H, V)
    programs = kernels.gradient_programs(D, H, V, sums["ROWS"], sums["COLS"])
    squares = plan.empty((G, programs), torch.float32)
    plan.launch(
        _gradient, (G * programs,), dz=dz, k=k, dy=dy, h=h, sums1=sums1, sums2=sums2, g=g,
        squares=squares, N=N, tiles=tiles // G, factor=2 * loss_factor(reduction, N, V), D=D, H=H, V=V,
        PRECISION=rows["PRECISION"], **k_numbers, **sums,
    )  # fmt: skip
    return Told(g, losses, squares)


def _narrowed(
    plan: Plan, w1: Tensor, w2: Tensor, dtype: torch.dtype, kept: Kept[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Both matrices in another dtype, in one launch."""
    narrow1 = plan.empty(w1.shape, dtype) if kept.narrow1 is None else kept.narrow1
    narrow2 = plan.empty(w2.shape, dtype) if kept.narrow2 is None else kept.narrow2
    programs = sum(kernels.across(w.numel(), kernels.BLOCK) for w in (w1, w2))
    plan.launch(
        _narrow, (programs,), w1=w1, w2=w2, narrow1=narrow1, narrow2=narrow2,
        size1=w1.numel(), size2=w2.numel(), BLOCK=kernels.BLOCK, num_warps=8,
    )  # fmt: skip
    return narrow1, narrow2
