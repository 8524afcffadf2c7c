"""Large chunks backward. What arrives for y is called y_bar, or, for a result, dy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large.kernels import rows, state, weights
from bakeoff.ops.memory_scan.large.spans import (
    PARTS_OF_STATE,
    Sizes,
    Span,
    columns,
    multiply,
    state_at,
    turned,
)
from bakeoff.ops.memory_scan.large.steps import orthogonalise_backward

__all__ = ["backward"]

_weights_of_backward = TritonKernel(weights._weights_of_backward)
_from_slopes, _from_errors = TritonKernel(rows._from_slopes), TritonKernel(rows._from_errors)
_to_hidden = TritonKernel(rows._to_hidden)
_arriving, _leaving = TritonKernel(state._arriving), TritonKernel(state._leaving)


def backward(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, orthogonalize: int,
    z: Tensor, zq: Tensor, dh: Tensor, e: Tensor, tables: Tensor, ends: Tensor, starts: Tensor, steps: Tensor,
    do: Tensor, dnew_memory_w1: Tensor, dnew_memory_b1: Tensor, dnew_memory_w2: Tensor, dnew_memory_b2:
    Tensor,
    dnew_momentum_w1: Tensor, dnew_momentum_b1: Tensor, dnew_momentum_w2: Tensor, dnew_momentum_b2: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dmemory_w1: Tensor | None, dmemory_b1: Tensor | None, dmemory_w2: Tensor | None, dmemory_b2: Tensor |
    None,
    dmomentum_w1: Tensor | None, dmomentum_b1: Tensor | None, dmomentum_w2: Tensor | None,
    dmomentum_b2: Tensor | None,
    dlr: Tensor | None, ddecay: Tensor | None, dforget: Tensor | None,
) -> None:  # fmt: skip
    """Chunk after chunk, from the last."""
    sizes = Sizes(q, v, memory_w1, chunk)
    G, C, T = sizes.G, sizes.C, sizes.T

    def room(given: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return plan.empty(shape, dtype) if given is None else given

    q, k, do = plan.contiguous(q), plan.contiguous(k), plan.contiguous(do)
    lr, decay, forget = plan.contiguous(lr), plan.contiguous(decay), plan.contiguous(forget)
    old = (memory_w1, memory_b1, memory_w2, memory_b2, momentum_w1, momentum_b1, momentum_w2, momentum_b2)
    begin = [plan.contiguous(part) for part in old]
    coming = [
        plan.contiguous(part)
        for part in (dnew_memory_w1, dnew_memory_b1, dnew_memory_w2, dnew_memory_b2,
                     dnew_momentum_w1, dnew_momentum_b1, dnew_momentum_w2, dnew_momentum_b2)
    ]  # fmt: skip
    asked = (dmemory_w1, dmemory_b1, dmemory_w2, dmemory_b2,
             dmomentum_w1, dmomentum_b1, dmomentum_w2, dmomentum_b2)  # fmt: skip
    going_out = [room(part, shape) for part, shape in zip(asked, sizes.shapes, strict=True)]
    dq, dk, dv = room(dq, q.shape, q.dtype), room(dk, q.shape, q.dtype), room(dv, v.shape, q.dtype)
    dlr, ddecay, dforget = (room(x, lr.shape) for x in (dlr, ddecay, dforget))
    row_dots = plan.empty((G, T, sizes.units + sizes.outputs, 2), torch.float32)
    dots = plan.empty((G, C, sizes.programs, 3), torch.float32)
    beta_bar = plan.zeros((C, G), torch.float32) if orthogonalize else None
    for c in range(C - 1, -1, -1):
        span = Span(plan, sizes, c)
        here = begin if c == 0 else state_at(plan, starts, c - 1, sizes)
        going = going_out if c == 0 else [plan.empty(shape, torch.float32) for shape in sizes.shapes]
        through, to_step = _through_steps(
            span, c, here, coming, ends, steps, beta_bar, orthogonalize, q.dtype
        )
        narrow = _arrives(span, c, here, coming, to_step, dots, q.dtype, orthogonalize)
        sums = _rows_backward(
            span, q, k, do, here, coming, narrow, lr, tables, z, zq, dh, e, dq, dk, dv, row_dots
        )
        _leaves(span, c, coming, through, to_step, going, sums, ends, orthogonalize)
        coming = going
    plan.launch(
        _weights_of_backward, (G * C,), lr=lr, decay=decay, forget=forget, tables=tables, row_dots=row_dots,
        dots=dots, beta_bar=beta_bar, dlr=dlr, ddecay=ddecay, dforget=dforget, G=G, T=T, C=C,
        programs=sizes.programs, PARTS=sizes.units + sizes.outputs, **sizes.scan,
    )  # fmt: skip


def _through_steps(
    span: Span, c: int, here: Sequence[Tensor], coming: Sequence[Tensor], ends: Tensor, steps: Tensor,
    beta_bar: Tensor | None, orthogonalize: int, dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """What arrives for both matrices at the chunk's start past the step, and for the step."""
    if not orthogonalize:
        return [coming[0], coming[2]], [coming[0], coming[2]]
    to_weight, to_step = ([span.plan.empty(here[at].shape, torch.float32) for at in (0, 2)] for _ in range(2))
    for i, at in enumerate((0, 2)):
        span.plan.run(
            orthogonalise_backward, here[at], ends, steps, c, at == 2, orthogonalize, dtype, coming[at],
            to_weight[i], to_step[i], beta_bar,
        )  # fmt: skip
    return to_weight, to_step


def _arrives(
    span: Span, c: int, here: Sequence[Tensor], coming: Sequence[Tensor], to_step: Sequence[Tensor],
    dots: Tensor, dtype: torch.dtype, orthogonalize: int,
) -> list[Tensor]:  # fmt: skip
    """For each matrix, in the dtype of products, below each other what arrives for the step, for the new
    momentum, and the matrix."""
    plan, sizes = span.plan, span.sizes
    narrow = [plan.empty((sizes.G, 3 * here[at].shape[1], here[at].shape[2]), dtype) for at in (0, 2)]
    bars: dict[str, Tensor | None] = {
        f"{n}_bar": part for n, part in zip(PARTS_OF_STATE, coming, strict=True)
    }
    if orthogonalize:
        bars |= {"w1_bar": None, "w2_bar": None}
    plan.launch(
        _arriving, (sizes.G * sizes.programs,), **dict(zip(PARTS_OF_STATE, here, strict=True)), **bars,
        step1_bar=to_step[0], step2_bar=to_step[1], narrow1=narrow[0], narrow2=narrow[1], dots=dots,
        c=c, C=sizes.C, **sizes.block,
    )  # fmt: skip
    return narrow


def _rows_backward(
    span: Span, q: Tensor, k: Tensor, do: Tensor, here: Sequence[Tensor], coming: Sequence[Tensor],
    narrow: Sequence[Tensor], lr: Tensor, tables: Tensor, z: Tensor, zq: Tensor, dh: Tensor, e: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, row_dots: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What arrives for tokens and weights; the chunk's sums over tokens for the memory at its start."""
    plan, sizes, dtype = span.plan, span.sizes, q.dtype
    G, D, H, V = sizes.G, sizes.D, sizes.H, sizes.V
    b1 = here[1]
    _, b1_bar, _, b2_bar, _, c1_bar, _, c2_bar = coming
    arriving1, arriving2 = (plan.derive(Tensor.narrow, narrow[i], 1, 0, 2 * n) for i, n in ((0, H), (1, V)))
    w1, w2 = (plan.derive(Tensor.narrow, narrow[i], 1, 2 * n, n) for i, n in ((0, H), (1, V)))
    keys, errors, outs = span.of(k), span.of(e), span.of(do)
    asked1, h, dh_bar = span.room(2 * H, dtype), span.room(H, dtype), span.room(H, dtype)
    rows1, rows2 = span.room(3 * H, dtype), span.room(3 * V, dtype)
    plan.run(multiply, keys, turned(plan, arriving1), asked1)
    span.launch(
        _from_slopes, sizes.units, z=z, dh=dh, asked=asked1, b1=b1, b1_bar=b1_bar, c1_bar=c1_bar, lr=lr,
        tables=tables, h=h, dh_bar=dh_bar, rows1=rows1, row_dots=row_dots,
    )  # fmt: skip
    asked2, back, sums2 = span.room(2 * V, dtype), span.room(V, dtype), span.sums(V)
    plan.run(multiply, h, turned(plan, arriving2), asked2)
    plan.run(multiply, dh_bar, turned(plan, w2), back)
    span.launch(
        _from_errors, sizes.outputs, e=e, asked=asked2, back=back, do=do, b2_bar=b2_bar, c2_bar=c2_bar, lr=lr,
        tables=tables, rows2=rows2, dv=dv, sums=sums2, row_dots=row_dots,
    )  # fmt: skip
    h_bar, hq_bar, hq, zq_bar = (span.room(H, dtype) for _ in range(4))
    plan.run(multiply, rows2, narrow[1], h_bar)
    plan.run(multiply, outs, w2, hq_bar)
    sums1 = span.sums(H)
    span.launch(
        _to_hidden, sizes.units, z=z, zq=zq, b1=b1, h_bar=h_bar, hq_bar=hq_bar, rows1=rows1, hq=hq,
        zq_bar=zq_bar, sums=sums1,
    )  # fmt: skip
    plan.run(multiply, rows1, narrow[0], span.of(dk))
    plan.run(multiply, zq_bar, w1, span.of(dq))
    matrix1, matrix2 = plan.empty((2, G, H, D), torch.float32), plan.empty((3, G, V, H), torch.float32)
    pairs = (
        (matrix1, 0, columns(plan, rows1, 2 * H, H), keys),
        (matrix1, 1, zq_bar, span.of(q)),
        (matrix2, 0, columns(plan, rows2, 2 * V, V), h),
        (matrix2, 1, errors, dh_bar),
        (matrix2, 2, outs, hq),
    )
    for found, part, left, right in pairs:
        plan.run(multiply, turned(plan, left), right, plan.derive(Tensor.select, found, 0, part))
    return matrix1, matrix2, sums1, sums2


def _leaves(
    span: Span, c: int, coming: Sequence[Tensor], through: Sequence[Tensor], to_step: Sequence[Tensor],
    going: Sequence[Tensor], sums: Sequence[Tensor], ends: Tensor, orthogonalize: int,
) -> None:  # fmt: skip
    """What arrives for the state at the chunk's start."""
    bars = dict(zip((f"{name}_bar" for name in PARTS_OF_STATE), coming, strict=True))
    bars |= {"w1_bar": through[0], "w2_bar": through[1]}
    sizes = span.sizes
    span.plan.launch(
        _leaving, (sizes.G * sizes.programs,), **bars, step1_bar=to_step[0], step2_bar=to_step[1],
        **{f"d{name}": part for name, part in zip(PARTS_OF_STATE, going, strict=True)},
        **dict(zip(("matrix1", "matrix2", "sums1", "sums2"), sums, strict=True)), ends=ends,
        G=sizes.G, tiles=span.tiles, c=c, C=sizes.C, WHOLE=bool(orthogonalize), **sizes.block,
    )  # fmt: skip
