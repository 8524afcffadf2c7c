"""The ``triton`` candidate of memory_update: what its kernels are launched on.

Forward: the gradient's rows in three launches, both matrices' gradients in one, the step in one; for 16-bit
rows one more, which narrows the matrices. Backward: the gradient's derivative in seven. What the gradient
made of rows is kept for that: to make it again took a quarter of the time of forward and backward (8 groups
of 2,048 rows, 512 features, H200).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan, Planned
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.memory_update import kernels
from bakeoff.ops.memory_update.derivative import backward
from bakeoff.ops.memory_update.kernels import Tiling, state
from bakeoff.ops.memory_update.launches import Kept, Sizes, gradient_of, shapes_of
from bakeoff.ops.memory_update.reference import loss_factor
from bakeoff.select import TensorMeta

__all__ = ["in_place", "memory_update"]

_step = TritonKernel(state._step)
_SEEN = ("k", "v", "w1", "b1", "w2", "b2", "row_weight")
_STATE = ("w1", "b1", "w2", "b2", "s1", "c1", "s2", "c2")


def results(
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float,
    reduction: str,
    row_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    """Room for the new memory and momentum, for loss, norm and ok."""
    del v, lr, decay, forget, max_norm, reduction, row_weight, momentum_w1, momentum_b1, momentum_w2
    del momentum_b2
    old = (w1, b1, w2, b2)
    G = k.shape[0]
    return (
        *[t.new_empty(t.shape) for t in (*old, *old)],
        w1.new_empty(G), w1.new_empty(G), w1.new_empty(G, dtype=torch.bool),
    )  # fmt: skip


def keeps(
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float,
    reduction: str,
    row_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    """Room for what the derivative reads."""
    del b1, b2, w2, momentum_w1, momentum_b1, momentum_w2, momentum_b2, lr, decay, forget, max_norm, reduction
    *rows, g = shapes_of(k, v, w1, row_weight is not None)
    return *[k.new_empty(shape) for shape in rows], w1.new_empty(g)


def forward(
    plan: Plan,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float,
    reduction: str,
    row_weight: Tensor | None,
    new_w1: Tensor,
    new_b1: Tensor,
    new_w2: Tensor,
    new_b2: Tensor,
    new_momentum_w1: Tensor,
    new_momentum_b1: Tensor,
    new_momentum_w2: Tensor,
    new_momentum_b2: Tensor,
    loss: Tensor,
    norm: Tensor,
    ok: Tensor,
    narrow1: Tensor | None,
    narrow2: Tensor | None,
    z: Tensor | None,
    h: Tensor | None,
    dy: Tensor | None,
    e: Tensor | None,
    dh: Tensor | None,
    dz: Tensor | None,
    g: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """One step, into new tensors."""
    old = [w1, b1, w2, b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2]
    new = [
        new_w1, new_b1, new_w2, new_b2, new_momentum_w1, new_momentum_b1, new_momentum_w2, new_momentum_b2
    ]  # fmt: skip
    _take_step(
        plan, k, v, [plan.contiguous(t) for t in old], new, (lr, decay, forget), max_norm, reduction,
        row_weight, (loss, norm, ok, None), tiling, Kept(narrow1, narrow2, z, h, dy, e, dh, dz, g),
    )  # fmt: skip


def _take_step(
    plan: Plan,
    k: Tensor,
    v: Tensor,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    gates: Sequence[Tensor],
    max_norm: float,
    reduction: str,
    row_weight: Tensor | None,
    told: Sequence[Tensor | None],
    tiling: Tiling | None,
    kept: Kept[Tensor | None],
) -> None:
    """Fills `new`, which may be `old`, and `told`: loss, norm, ok, skipped."""
    sizes = Sizes.of(k, v, old[0])
    found = gradient_of(plan, k, v, old[:4], row_weight, reduction, tiling, kept)
    loss, norm, ok, skipped = told
    lr, decay, forget = (plan.contiguous(gate) for gate in gates)
    plan.launch(
        _step, (sizes.G * kernels.blocks(*sizes.features),),
        **dict(zip(_STATE, old, strict=True)),
        **dict(zip([f"new_{name}" for name in _STATE], new, strict=True)),
        g=found.g, squares=found.squares, losses=found.losses, lr=lr, decay=decay, forget=forget,
        loss=loss, norm=norm, ok=ok, skipped=skipped,
        max_norm=max_norm, factor=loss_factor(reduction, sizes.N, sizes.V),
        shares=found.squares.shape[1], losses_each=found.losses.shape[1],
        D=sizes.D, H=sizes.H, V=sizes.V, BLOCK=kernels.BLOCK, num_warps=8,
    )  # fmt: skip


def _tilings(case: Any) -> list[Tiling]:
    return kernels.tilings(case, hardware.multiprocessors(case.device))


_update = kernel_op(
    "memory_update",
    results=results,
    names=(
        "new_w1", "new_b1", "new_w2", "new_b2", "new_momentum_w1", "new_momentum_b1", "new_momentum_w2",
        "new_momentum_b2", "loss", "norm", "ok",
    ),
    keeps=keeps,
    kept=Kept._fields,
    kept_for=(*_SEEN, "lr"),
    forward=forward,
    backward=backward,
    depends={"loss": _SEEN, "norm": _SEEN, "ok": ()},
    materialize=False,
    tilings={"forward": Tilings(Tiling, _tilings), "backward": Tilings(Tiling, _tilings)},
)  # fmt: skip


def _wide(meta: TensorMeta) -> TensorMeta:
    return TensorMeta.dense(meta.shape, torch.float32, grad=meta.requires_grad)


class MemoryUpdate:
    """The candidate: the op, to which no limit of the norm is an infinite one.

    Of float16 rows whose gradients are wanted it takes the step in float32: what the derivative keeps is as
    large as products of two rows, and from rows of some hundreds on float16 has no such numbers.
    """

    def __init__(self, op: KernelOp) -> None:
        self.op = op
        self._bound: dict[str, MemoryUpdate] = {"": self}

    def __call__(self, *args: Any) -> Any:
        """For float16, bfloat16 and float32 rows and a float32 memory."""
        k, v, *state, max_norm, reduction, row_weight = args
        tensors = [t for t in (k, v, *state, row_weight) if t is not None]
        if k.dtype == torch.float16 and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            k, v = k.float(), v.float()
        limit = math.inf if max_norm is None else float(max_norm)
        return self.op(k, v, *state, limit, reduction, row_weight)

    def variants(self, case: Any) -> dict[str, Sequence[Any]]:
        """The tilings that each direction may be launched with for a case, the default first."""
        if case.k.dtype == torch.float16 and case.needs_grad:
            case = case.replace(k=_wide(case.k), v=_wide(case.v))
        return self.op.variants(case)

    def bind(self, text: str) -> "MemoryUpdate":
        """The candidate with the variant that `text` names."""
        if text not in self._bound:
            self._bound[text] = MemoryUpdate(self.op.bind(text))
        return self._bound[text]


memory_update = MemoryUpdate(_update)
"""For float16, bfloat16 and float32 rows and a float32 memory."""


# In place --------------------------------------------------------------------------------------------------


def _over(
    plan: Plan,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    momentum_w1: Tensor,
    momentum_b1: Tensor,
    momentum_w2: Tensor,
    momentum_b2: Tensor,
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    max_norm: float,
    reduction: str,
    row_weight: Tensor | None,
    skipped: Tensor | None,
    loss: Tensor,
    norm: Tensor,
    ok: Tensor,
) -> None:
    """One step, over the old tensors, which are contiguous."""
    old = [w1, b1, w2, b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2]
    _take_step(
        plan, k, v, old, old, (lr, decay, forget), max_norm, reduction, row_weight,
        (loss, norm, ok, skipped), None, _NOTHING,
    )  # fmt: skip


_NOTHING = Kept[Tensor | None](*[None] * len(Kept._fields))
_over_planned = Planned(
    _over,
    {
        **dict.fromkeys(("k", "v"), "Tensor"),
        **dict.fromkeys(("w1", "b1", "w2", "b2"), "Tensor"),
        **dict.fromkeys(("momentum_w1", "momentum_b1", "momentum_w2", "momentum_b2"), "Tensor"),
        **dict.fromkeys(("lr", "decay", "forget"), "Tensor"),
        "max_norm": "", "reduction": "", "row_weight": "Tensor?", "skipped": "Tensor?",
        **dict.fromkeys(("loss", "norm", "ok"), "new"),
    },
)  # fmt: skip


def in_place(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The step written over the memory and the momentum."""
    *tensors, max_norm, reduction, row_weight, skipped = args
    k, w1 = args[0], args[2]
    G = k.shape[0]
    told = w1.new_empty(G), w1.new_empty(G), w1.new_empty(G, dtype=torch.bool)
    limit = math.inf if max_norm is None else float(max_norm)
    _over_planned.run(*tensors, limit, reduction, row_weight, skipped, *told)
    return told
