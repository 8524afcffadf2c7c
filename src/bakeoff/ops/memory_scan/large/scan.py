"""The ``large`` candidate of memory_scan as an op."""

from typing import Any

from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.memory_scan.large import kernels
from bakeoff.ops.memory_scan.large.backward import backward
from bakeoff.ops.memory_scan.large.forward import forward
from bakeoff.ops.memory_scan.large.spans import KEPT, Sizes

__all__ = ["memory_scan"]


def results(
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, read: str, orthogonalize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Room for o, and for the eight parts of the state."""
    parts = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    return v.new_empty(v.shape), *(part.new_empty(part.shape) for part in parts)  # type: ignore[return-value]


def keeps(
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, read: str, orthogonalize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Room for what the backward needs."""
    sizes = Sizes(q, v, memory_w1, chunk)
    rooms = sizes.kept(q.dtype, orthogonalize, sizes.C - 1)
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in rooms)  # type: ignore[return-value]


def _tilings(axis: str) -> Tilings:
    def of(case: Any) -> list[kernels.Tiling]:
        rows, multiprocessors = (
            case.q.shape[0] * min(case.chunk, case.q.shape[1]),
            hardware.multiprocessors(case.device),
        )
        return kernels.tilings(axis, rows, case.memory_w1.shape[1], case.q.dtype.itemsize, multiprocessors)

    return Tilings(kernels.Tiling, of)


memory_scan = kernel_op(
    "memory_scan.large",
    results=results,
    names=(
        "o",
        *(f"new_{whole}_{part}" for whole in ("memory", "momentum") for part in ("w1", "b1", "w2", "b2")),
    ),
    keeps=keeps,
    kept=KEPT,
    forward=forward,
    backward=backward,
    tilings={axis: _tilings(axis) for axis in ("forward", "backward")},
)
"""For float16, bfloat16 and float32 tokens with read "chunk", any chunks."""
