"""Large chunks forward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large.kernels import Tiling, rows, sums, weights
from bakeoff.ops.memory_scan.large.spans import KEPT, PARTS_OF_STATE, Sizes, Span, state_at
from bakeoff.ops.memory_scan.large.steps import orthogonalise

__all__ = ["forward"]

_weights_of, _learn = TritonKernel(weights._weights_of), TritonKernel(sums._learn)
_hidden, _answers = TritonKernel(rows._hidden), TritonKernel(rows._answers)
_errors, _slopes = TritonKernel(rows._errors), TritonKernel(rows._slopes)


def forward(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, orthogonalize: int,
    o: Tensor, new_memory_w1: Tensor, new_memory_b1: Tensor, new_memory_w2: Tensor, new_memory_b2: Tensor,
    new_momentum_w1: Tensor, new_momentum_b1: Tensor, new_momentum_w2: Tensor, new_momentum_b2: Tensor,
    z: Tensor | None, zq: Tensor | None, h: Tensor | None, hq: Tensor | None, dh: Tensor | None,
    dz: Tensor | None, e: Tensor | None, tables: Tensor | None,
    ends: Tensor | None, starts: Tensor | None, steps: Tensor | None, tiling: Tiling | None,
) -> None:  # fmt: skip
    """Chunk after chunk its queries, its keys and its update."""
    sizes = Sizes(q, v, memory_w1, chunk)
    tiling = tiling or sizes.default("forward", q)
    # Where nothing is kept, two slots take turns.
    slots = sizes.C - 1 if starts is not None else min(sizes.C - 1, 2)
    rooms = dict(zip(KEPT, sizes.kept(q.dtype, orthogonalize, slots), strict=True))

    def made(given: Tensor | None, name: str) -> Tensor:
        return plan.empty(*rooms[name]) if given is None else given

    z, h, hq, dz, e = made(z, "z"), made(h, "h"), made(hq, "hq"), made(dz, "dz"), made(e, "e")
    tables, ends, starts = made(tables, "tables"), made(ends, "ends"), made(starts, "starts")
    steps = made(steps, "steps")
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
        span = Span(plan, sizes, c, tiling)
        new = last if c == sizes.C - 1 else state_at(plan, starts, c % slots, sizes)
        _chunk_forward(
            span, c, q, k, v, here, new, tables, ends, o, z, zq, h, hq, dh, dz, e, steps, orthogonalize
        )  # fmt: skip
        here = new


def _chunk_forward(
    span: Span, c: int, q: Tensor, k: Tensor, v: Tensor, here: Sequence[Tensor], new: Sequence[Tensor],
    tables: Tensor, ends: Tensor, o: Tensor, z: Tensor, zq: Tensor | None, h: Tensor, hq: Tensor,
    dh: Tensor | None, dz: Tensor, e: Tensor, steps: Tensor, orthogonalize: int,
) -> None:  # fmt: skip
    """Answers, and the state behind the chunk."""
    plan, sizes, dtype = span.plan, span.sizes, q.dtype
    H, V = sizes.H, sizes.V
    w1, b1, w2, b2 = here[:4]
    if dtype != w1.dtype:
        w1, w2 = plan.derive(Tensor.to, w1, dtype), plan.derive(Tensor.to, w2, dtype)
    sums1, sums2 = span.sums(2 * H), span.sums(2 * V)
    span.over_rows(_hidden, H, x=q, w1=w1, b1=b1, z=zq, h=hq)
    span.over_rows(_answers, V, hq=hq, w2=w2, b2=b2, o=o)
    span.over_rows(_hidden, H, x=k, w1=w1, b1=b1, z=z, h=h)
    span.over_rows(_errors, V, h=h, w2=w2, b2=b2, v=v, tables=tables, e=e, sums=sums2)
    span.over_rows(_slopes, H, e=e, w2=w2, z=z, b1=b1, tables=tables, dh=dh, dz=dz, sums=sums1)
    before: dict[str, Tensor | None] = dict(zip(PARTS_OF_STATE, here, strict=True))
    after = dict(zip(PARTS_OF_STATE, new, strict=True))
    if orthogonalize:
        before |= {"w1": None, "w2": None}
        after |= {name: plan.empty(after[name].shape, torch.float32) for name in ("w1", "w2")}
    span.over_all(
        _learn, 1, k=k, h=h, dz=dz, e=e, tables=tables, **before,
        **{f"new_{name}": part for name, part in after.items()}, sums1=sums1, sums2=sums2, ends=ends, c=c,
        C=sizes.C,
    )  # fmt: skip
    if orthogonalize:
        for name, at in (("w1", 0), ("w2", 2)):
            plan.run(
                orthogonalise, after[name], here[at], ends, steps, c, at == 2, orthogonalize, dtype, new[at]
            )
