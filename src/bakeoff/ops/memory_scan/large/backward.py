"""Large chunks backward. What arrives for y is called y_bar, or, for a result, dy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_scan.large.kernels import Tiling, across, rows, state, sums, weights
from bakeoff.ops.memory_scan.large.spans import PARTS_OF_STATE, Sizes, Span, multiply, state_at
from bakeoff.ops.memory_scan.large.steps import orthogonalise_backward

__all__ = ["backward"]

_weights_of_backward = TritonKernel(weights._weights_of_backward)
_from_slopes, _from_errors = TritonKernel(rows._from_slopes), TritonKernel(rows._from_errors)
_from_queries, _to_hidden = TritonKernel(rows._from_queries), TritonKernel(rows._to_hidden)
_to_keys = TritonKernel(rows._to_keys)
_arrived = TritonKernel(sums._arrived)
_arriving, _leaving = TritonKernel(state._arriving), TritonKernel(state._leaving)


def backward(
    plan: Plan,
    q: Tensor, k: Tensor, v: Tensor,
    memory_w1: Tensor, memory_b1: Tensor, memory_w2: Tensor, memory_b2: Tensor,
    momentum_w1: Tensor, momentum_b1: Tensor, momentum_w2: Tensor, momentum_b2: Tensor,
    lr: Tensor, decay: Tensor, forget: Tensor, chunk: int, orthogonalize: int,
    z: Tensor, zq: Tensor, h: Tensor, hq: Tensor, dh: Tensor, dz: Tensor, e: Tensor,
    tables: Tensor, ends: Tensor, starts: Tensor, steps: Tensor,
    do: Tensor, dnew_memory_w1: Tensor, dnew_memory_b1: Tensor, dnew_memory_w2: Tensor, dnew_memory_b2:
    Tensor,
    dnew_momentum_w1: Tensor, dnew_momentum_b1: Tensor, dnew_momentum_w2: Tensor, dnew_momentum_b2: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dmemory_w1: Tensor | None, dmemory_b1: Tensor | None, dmemory_w2: Tensor | None, dmemory_b2: Tensor |
    None,
    dmomentum_w1: Tensor | None, dmomentum_b1: Tensor | None, dmomentum_w2: Tensor | None,
    dmomentum_b2: Tensor | None,
    dlr: Tensor | None, ddecay: Tensor | None, dforget: Tensor | None, tiling: Tiling | None,
) -> None:  # fmt: skip
    """Chunk after chunk, from the last."""
    sizes = Sizes(q, v, memory_w1, chunk)
    tiling = tiling or sizes.default("backward", q)
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
    parts = _parts(Span(plan, sizes, 0, tiling))["PARTS"]
    row_dots = plan.empty((2, parts, G, T), torch.float32)
    dots = plan.empty((G, C, sizes.programs, 3), torch.float32)
    beta_bar = plan.zeros((C, G), torch.float32) if orthogonalize else None
    for c in range(C - 1, -1, -1):
        span = Span(plan, sizes, c, tiling)
        here = begin if c == 0 else state_at(plan, starts, c - 1, sizes)
        going = going_out if c == 0 else [plan.empty(shape, torch.float32) for shape in sizes.shapes]
        through, to_step = _through_steps(
            span, c, here, coming, ends, steps, beta_bar, orthogonalize, q.dtype
        )
        narrow = _arrives(span, c, here, coming, to_step, going, ends, dots, q.dtype, orthogonalize)
        found = _rows_backward(
            span, q, k, do, here, coming, narrow, tables, z, zq, h, hq, dh, dz, e, dq, dk, dv, row_dots
        )
        _leaves(span, c, coming, through, going, found, ends, orthogonalize)
        coming = going
    plan.launch(
        _weights_of_backward, (G * C,), lr=lr, decay=decay, forget=forget, tables=tables, row_dots=row_dots,
        dots=dots, beta_bar=beta_bar, dlr=dlr, ddecay=ddecay, dforget=dforget, G=G, T=T, C=C,
        programs=sizes.programs, PARTS=parts, **sizes.scan,
    )  # fmt: skip


def _parts(span: Span) -> dict[str, int]:
    """Shares of what arrives for a token's weights: those of hidden units, and of these and the outputs."""
    units = across(span.sizes.H, span.tile("slope")["COLS"])
    return {"PART": units, "PARTS": units + across(span.sizes.V, span.tile("pair")["COLS"])}


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
    going: Sequence[Tensor], ends: Tensor, dots: Tensor, dtype: torch.dtype, orthogonalize: int,
) -> list[Tensor]:  # fmt: skip
    """For each matrix, in the dtype of products, below each other what arrives for the step, for the new
    momentum, and the matrix. Also fills what arrives for the momentum at the chunk's start."""
    plan, sizes = span.plan, span.sizes
    narrow = [plan.empty((sizes.G, 3 * here[at].shape[1], here[at].shape[2]), dtype) for at in (0, 2)]
    bars: dict[str, Tensor | None] = {
        f"{n}_bar": part for n, part in zip(PARTS_OF_STATE, coming, strict=True)
    }
    if orthogonalize:
        bars |= {"w1_bar": None, "w2_bar": None}
    plan.launch(
        _arriving, (sizes.G * sizes.programs,), **dict(zip(PARTS_OF_STATE, here, strict=True)), **bars,
        step1_bar=to_step[0], step2_bar=to_step[1],
        **{f"d{name}": part for name, part in zip(PARTS_OF_STATE[4:], going[4:], strict=True)},
        narrow1=narrow[0], narrow2=narrow[1], ends=ends, dots=dots, c=c, C=sizes.C, **sizes.block,
    )  # fmt: skip
    return narrow


def _rows_backward(
    span: Span, q: Tensor, k: Tensor, do: Tensor, here: Sequence[Tensor], coming: Sequence[Tensor],
    narrow: Sequence[Tensor], tables: Tensor, z: Tensor, zq: Tensor, h: Tensor, hq: Tensor, dh: Tensor,
    dz: Tensor, e: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, row_dots: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What arrives for tokens and weights; the chunk's sums over tokens for the memory at its start."""
    plan, sizes, dtype = span.plan, span.sizes, q.dtype
    G, D, H, V = sizes.G, sizes.D, sizes.H, sizes.V
    b1 = here[1]
    _, b1_bar, _, b2_bar, _, c1_bar, _, c2_bar = coming
    dh_bar, z_bar, zq_bar = (span.room(H, dtype) for _ in range(3))
    sums1, sums2 = span.sums(2 * H), span.sums(V)
    parts = _parts(span)
    span.over_rows(
        _from_slopes, H, "slope", k=k, narrow1=narrow[0], z=z, dh=dh, dz=dz, b1=b1, b1_bar=b1_bar,
        c1_bar=c1_bar, tables=tables, dh_bar=dh_bar, z_bar=z_bar, row_dots=row_dots, PARTS=parts["PARTS"],
    )  # fmt: skip
    span.over_rows(
        _from_errors, V, "pair", h=h, dh_bar=dh_bar, narrow2=narrow[1], e=e, do=do, b2_bar=b2_bar,
        c2_bar=c2_bar, tables=tables, dv=dv, sums=sums2, row_dots=row_dots, **parts,
    )  # fmt: skip
    span.over_rows(
        _to_hidden, H, "pair", e=e, dv=dv, narrow2=narrow[1], z=z, b1=b1, tables=tables, z_bar=z_bar,
        sums=sums1,
    )  # fmt: skip
    span.over_rows(_to_keys, D, "pair", dz=dz, z_bar=z_bar, narrow1=narrow[0], tables=tables, dk=dk)
    span.over_rows(_from_queries, H, do=do, narrow2=narrow[1], zq=zq, b1=b1, zq_bar=zq_bar, sums=sums1)
    w1 = plan.derive(Tensor.narrow, narrow[0], 1, 2 * H, H)
    plan.run(multiply, zq_bar, w1, span.of(dq))
    matrix1, matrix2 = plan.empty((2, G, H, D), torch.float32), plan.empty((2, G, V, H), torch.float32)
    span.over_all(
        _arrived, 2, k=k, q=q, h=h, hq=hq, e=e, do=do, dv=dv, dh_bar=dh_bar, z_bar=z_bar, zq_bar=zq_bar,
        matrix1=matrix1, matrix2=matrix2,
    )  # fmt: skip
    return matrix1, matrix2, sums1, sums2


def _leaves(
    span: Span, c: int, coming: Sequence[Tensor], through: Sequence[Tensor], going: Sequence[Tensor],
    found: Sequence[Tensor], ends: Tensor, orthogonalize: int,
) -> None:  # fmt: skip
    """What arrives for the memory at the chunk's start."""
    names, sizes = PARTS_OF_STATE[:4], span.sizes
    bars = {f"{name}_bar": part for name, part in zip(names, coming[:4], strict=True)}
    bars |= {"w1_bar": through[0], "w2_bar": through[1]}
    span.plan.launch(
        _leaving, (sizes.G * sizes.programs,), **bars,
        **{f"d{name}": part for name, part in zip(names, going[:4], strict=True)},
        **dict(zip(("matrix1", "matrix2", "sums1", "sums2"), found, strict=True)), ends=ends,
        G=sizes.G, tiles=span.tiles, c=c, C=sizes.C, WHOLE=bool(orthogonalize), **sizes.block,
    )  # fmt: skip
