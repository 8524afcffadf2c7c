"""Large chunks forward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large.kernels import rows, state, weights
from bakeoff.ops.memory_scan.large.spans import PARTS_OF_STATE, Sizes, Span, multiply, state_at, turned
from bakeoff.ops.memory_scan.large.steps import orthogonalise

__all__ = ["forward"]

_weights_of, _step = TritonKernel(weights._weights_of), TritonKernel(state._step)
_hidden, _errors, _slopes = (TritonKernel(k) for k in (rows._hidden, rows._errors, rows._slopes))


def forward(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, orthogonalize: int,
    o: Tensor, new_memory_w1: Tensor, new_memory_b1: Tensor, new_memory_w2: Tensor, new_memory_b2: Tensor,
    new_momentum_w1: Tensor, new_momentum_b1: Tensor, new_momentum_w2: Tensor, new_momentum_b2: Tensor,
    z: Tensor | None, zq: Tensor | None, dh: Tensor | None, e: Tensor | None, tables: Tensor | None,
    ends: Tensor | None, starts: Tensor | None, steps: Tensor | None,
) -> None:  # fmt: skip
    """Chunk after chunk its queries, its keys and its update."""
    sizes = Sizes(q, v, memory_w1, chunk)
    # Where nothing is kept, two slots take turns.
    slots = sizes.C - 1 if starts is not None else min(sizes.C - 1, 2)
    rooms = sizes.kept(q.dtype, orthogonalize, slots)
    z, zq, dh, e, tables, ends, starts, steps = (
        plan.empty(*room) if t is None else t
        for t, room in zip((z, zq, dh, e, tables, ends, starts, steps), rooms, strict=True)
    )
    q, k, v = plan.contiguous(q), plan.contiguous(k), plan.contiguous(v)
    lr, decay, forget = plan.contiguous(lr), plan.contiguous(decay), plan.contiguous(forget)
    old = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    last = [new_memory_w1, new_memory_b1, new_memory_w2, new_memory_b2,
            new_momentum_w1, new_momentum_b1, new_momentum_w2, new_momentum_b2]  # fmt: skip
    here = [plan.contiguous(part) for part in old]
    plan.launch(
        _weights_of, (sizes.G * sizes.C,), lr=lr, decay=decay, forget=forget, tables=tables, ends=ends,
        G=sizes.G, T=sizes.T, C=sizes.C, **sizes.scan,
    )  # fmt: skip
    for c in range(sizes.C):
        span = Span(plan, sizes, c)
        new = last if c == sizes.C - 1 else state_at(plan, starts, c % slots, sizes)
        sums = _rows_forward(span, q, k, v, here, lr, tables, o, z, zq, dh, e)
        _state_forward(span, c, here, new, sums, ends, steps, orthogonalize, q.dtype)
        here = new


def _rows_forward(
    span: Span, q: Tensor, k: Tensor, v: Tensor, here: Sequence[Tensor], lr: Tensor, tables: Tensor,
    o: Tensor, z: Tensor, zq: Tensor, dh: Tensor, e: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Answers, and the sums over the chunk's tokens: both matrices' of memory and momentum in float32, and
    those of the biases by tiles."""
    plan, sizes, dtype = span.plan, span.sizes, q.dtype
    G, D, H, V = sizes.G, sizes.D, sizes.H, sizes.V
    w1, b1, w2, b2 = here[:4]
    if dtype != w1.dtype:
        w1, w2 = plan.derive(Tensor.to, w1, dtype), plan.derive(Tensor.to, w2, dtype)
    keys = span.of(k)
    plan.run(multiply, keys, turned(plan, w1), span.of(z))
    plan.run(multiply, span.of(q), turned(plan, w1), span.of(zq))
    h, hq = span.room(H, dtype), span.room(H, dtype)
    span.launch(_hidden, sizes.units, z=z, zq=zq, b1=b1, h=h, hq=hq)
    y = span.room(V, dtype)
    plan.run(multiply, h, turned(plan, w2), y)
    plan.run(multiply, hq, turned(plan, w2), span.of(o))
    rows2, sums2 = span.room(2 * V, dtype), span.sums(2 * V)
    span.launch(
        _errors, sizes.outputs, y=y, v=v, o=o, b2=b2, lr=lr, tables=tables, e=e, weighted=rows2, sums=sums2
    )
    plan.run(multiply, span.of(e), w2, span.of(dh))
    rows1, sums1 = span.room(2 * H, dtype), span.sums(2 * H)
    span.launch(_slopes, sizes.units, z=z, dh=dh, b1=b1, lr=lr, tables=tables, weighted=rows1, sums=sums1)
    matrix1 = plan.empty((G, 2 * H, D), torch.float32)
    matrix2 = plan.empty((G, 2 * V, H), torch.float32)
    plan.run(multiply, turned(plan, rows1), keys, matrix1)
    plan.run(multiply, turned(plan, rows2), h, matrix2)
    return matrix1, matrix2, sums1, sums2


def _state_forward(
    span: Span, c: int, here: Sequence[Tensor], new: Sequence[Tensor], sums: Sequence[Tensor], ends: Tensor,
    steps: Tensor, orthogonalize: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The state behind the chunk."""
    plan, sizes = span.plan, span.sizes
    before: dict[str, Tensor | None] = dict(zip(PARTS_OF_STATE, here, strict=True))
    after = dict(zip(PARTS_OF_STATE, new, strict=True))
    if orthogonalize:
        before |= {"w1": None, "w2": None}
        after |= {
            "w1": plan.empty(new[0].shape, torch.float32),
            "w2": plan.empty(new[2].shape, torch.float32),
        }
    plan.launch(
        _step, (sizes.G * sizes.programs,), **before, **{f"new_{name}": part for name, part in after.items()},
        **dict(zip(("matrix1", "matrix2", "sums1", "sums2"), sums, strict=True)), ends=ends,
        tiles=span.tiles, c=c, C=sizes.C, **sizes.block,
    )  # fmt: skip
    if orthogonalize:
        for name, at in (("w1", 0), ("w2", 2)):
            plan.run(
                orthogonalise, after[name], here[at], ends, steps, c, at == 2, orthogonalize, dtype, new[at]
            )
