"""The derivative of the step in launches."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.memory_update import kernels
from bakeoff.ops.memory_update.kernels import Tiling, state
from bakeoff.ops.memory_update.kernels import backward as backward_kernels
from bakeoff.ops.memory_update.launches import Kept, Sizes, constants, dense, rows_of
from bakeoff.ops.memory_update.reference import loss_factor

__all__ = ["backward"]

_dots = TritonKernel(state._dots)
_spread = TritonKernel(state._spread)
_z_bar = TritonKernel(backward_kernels._z_bar)
_e_bar = TritonKernel(backward_kernels._e_bar)
_h_bar = TritonKernel(backward_kernels._h_bar)
_k_bar = TritonKernel(backward_kernels._k_bar)
_memory_bar = TritonKernel(backward_kernels._memory_bar)
_row_sums = TritonKernel(backward_kernels._row_sums)

_ROW_BLOCK = 256


def backward(
    plan: Plan,
    k: Tensor,
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
    norm: Tensor,
    narrow1: Tensor | None,
    narrow2: Tensor | None,
    z: Tensor | None,
    h: Tensor | None,
    dy: Tensor | None,
    e: Tensor | None,
    dh: Tensor | None,
    dz: Tensor | None,
    g: Tensor | None,
    dnew_w1: Tensor | None,
    dnew_b1: Tensor | None,
    dnew_w2: Tensor | None,
    dnew_b2: Tensor | None,
    dnew_momentum_w1: Tensor | None,
    dnew_momentum_b1: Tensor | None,
    dnew_momentum_w2: Tensor | None,
    dnew_momentum_b2: Tensor | None,
    dloss: Tensor | None,
    dnorm: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dw1: Tensor | None,
    db1: Tensor | None,
    dw2: Tensor | None,
    db2: Tensor | None,
    dmomentum_w1: Tensor | None,
    dmomentum_b1: Tensor | None,
    dmomentum_w2: Tensor | None,
    dmomentum_b2: Tensor | None,
    dlr: Tensor | None,
    ddecay: Tensor | None,
    dforget: Tensor | None,
    drow_weight: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """The gradients that there is room for."""
    memory = [plan.contiguous(t) for t in (w1, b1, w2, b2)]
    momentum = [plan.contiguous(t) for t in (momentum_w1, momentum_b1, momentum_w2, momentum_b2)]
    gates = [plan.contiguous(t) for t in (lr, decay, forget)]
    bars = [
        dense(plan, t)
        for t in (
            dnew_w1, dnew_b1, dnew_w2, dnew_b2, dnew_momentum_w1, dnew_momentum_b1, dnew_momentum_w2,
            dnew_momentum_b2,
        )
    ]  # fmt: skip
    dmemory = _all_or_none(plan, (dw1, db1, dw2, db2), memory)
    through_rows = any(t is not None for t in (dk, dv, drow_weight, *dmemory))
    clips = max_norm < math.inf
    whole = dlr is not None or dnorm is not None or (clips and through_rows)
    speed_grads = (dmomentum_w1, dmomentum_b1, dmomentum_w2, dmomentum_b2)
    u = _spread_out(
        plan, memory, momentum, gates, bars, dense(plan, dnorm), norm, g if whole else None, max_norm,
        (*dmemory, *speed_grads, dlr, ddecay, dforget), k.dtype if through_rows else None,
    )  # fmt: skip
    if through_rows:
        kept = cast("Kept[Tensor]", Kept(narrow1, narrow2, z, h, dy, e, dh, dz, g))
        _through_rows(
            plan, k, memory[0], memory[2], kept, u, norm, dense(plan, row_weight), dense(plan, dloss),
            reduction, tiling, dk, dv, dmemory, drow_weight,
        )  # fmt: skip


def _all_or_none(plan: Plan, grads: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
    """Room for all four gradients where any of them is wanted."""
    if all(grad is None for grad in grads):
        return [None] * 4
    return [
        plan.empty(like.shape, torch.float32) if grad is None else grad
        for grad, like in zip(grads, likes, strict=True)
    ]


def _spread_out(
    plan: Plan,
    memory: Sequence[Tensor],
    momentum: Sequence[Tensor],
    gates: Sequence[Tensor],
    bars: Sequence[Tensor | None],
    norm_bar: Tensor | None,
    norm: Tensor,
    g: Tensor | None,
    max_norm: float,
    grads: Sequence[Tensor | None],
    dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """All that is elementwise. The cotangent of the gradient, its matrices in `dtype`; Nones for None."""
    (G, H, D), V = memory[0].shape, memory[2].shape[1]
    grid = (G * kernels.blocks(D, H, V),)
    numbers = {"D": D, "H": H, "V": V, "BLOCK": kernels.BLOCK, "num_warps": 8}
    dots = plan.empty((3, grid[0]), torch.float32)
    u: list[Tensor | None] = [None] * 4
    if dtype is not None:
        u = [plan.empty(t.shape, dtype if t.dim() == 3 else torch.float32) for t in memory]
    names = ("w1_bar", "b1_bar", "w2_bar", "b2_bar", "s1_bar", "c1_bar", "s2_bar", "c2_bar")
    arriving = dict(zip(names, bars, strict=True))
    old = zip(("w1", "b1", "w2", "b2", "s1", "c1", "s2", "c2"), (*memory, *momentum), strict=True)
    plan.launch(_dots, grid, **dict(old), **arriving, g=g, dots=dots, **numbers)
    filled = ("dw1", "db1", "dw2", "db2", "ds1", "dc1", "ds2", "dc2", "dlr", "ddecay", "dforget")
    plan.launch(
        _spread, grid, **arriving, norm_bar=norm_bar, g=g, dots=dots, norm=norm,
        **dict(zip(("lr", "decay", "forget"), gates, strict=True)),
        **dict(zip(("u1", "v1", "u2", "v2"), u, strict=True)),
        **dict(zip(filled, grads, strict=True)), max_norm=max_norm, **numbers,
    )  # fmt: skip
    return u


def _through_rows(
    plan: Plan,
    k: Tensor,
    w1: Tensor,
    w2: Tensor,
    kept: Kept[Tensor],
    u: Sequence[Tensor | None],
    norm: Tensor,
    weight: Tensor | None,
    loss_bar: Tensor | None,
    reduction: str,
    tiling: Tiling | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dmemory: Sequence[Tensor | None],
    dweight: Tensor | None,
) -> None:
    """The products of the derivative."""
    sizes = Sizes.of(k, kept.dy, w1)
    G, N, D, H, V = sizes
    tiling, rows = constants(tiling, sizes, k)
    factor = 2 * loss_factor(reduction, N, V)
    if k.dtype != w1.dtype:
        w1, w2 = kept.narrow1, kept.narrow2
    to_hidden, to_values = {"N": N, "D": D, "H": H, **rows}, {"N": N, "H": H, "V": V, **rows}
    k, k_numbers = rows_of(plan, k, "k")
    tiles = G * kernels.across(N, rows["ROWS"])
    tiles_v = kernels.across(V, rows["COLS"])
    wide_h, wide_v = tiles * kernels.across(H, rows["COLS"]), tiles * tiles_v
    dh_bar, z_bar = plan.empty((G, N, H), k.dtype), plan.empty((G, N, H), k.dtype)
    e_bar = plan.empty((G, N, V), k.dtype)
    learns = dmemory[0] is not None
    sums1 = plan.empty((tiles, H), torch.float32) if learns else None
    sums2 = plan.empty((tiles, V), torch.float32) if learns else None
    weights = None if dweight is None else plan.empty((G * N, tiles_v), torch.float32)
    u1, v1, u2, v2 = u
    bent = {**to_hidden, "COLS": min(rows["COLS"], kernels.BENT)}
    plan.launch(
        _z_bar, (tiles * kernels.across(H, bent["COLS"]),), k=k,
        u1=u1, v1=v1, z=kept.z, dh=kept.dh, dh_bar=dh_bar, z_bar=z_bar, **k_numbers, **bent,
    )  # fmt: skip
    plan.launch(
        _e_bar, (wide_v,), h=kept.h, u2=u2, dh_bar=dh_bar, w2=w2, v2=v2, dy=kept.dy,
        e=None if weight is None else kept.e, weight=weight, loss_bar=loss_bar, norm=norm, e_bar=e_bar, dv=dv,
        weights=weights, sums2=sums2, factor=factor, **to_values,
    )  # fmt: skip
    if weights is not None:
        plan.launch(
            _row_sums, (kernels.across(G * N, _ROW_BLOCK),), weights=weights, dweight=dweight,
            N=G * N, TILES=tiles_v, BLOCK=_ROW_BLOCK, num_warps=4,
        )  # fmt: skip
    if dk is None and not learns:
        return
    plan.launch(
        _h_bar, (wide_h,), dy=kept.dy, u2=u2, e_bar=e_bar, w2=w2, z=kept.z, z_bar=z_bar, sums1=sums1,
        **to_values,
    )  # fmt: skip
    if dk is not None:
        plan.launch(
            _k_bar, (tiles * kernels.across(D, rows["COLS"]),), dz=kept.dz, u1=u1, z_bar=z_bar, w1=w1,
            norm=norm, dk=dk, factor=factor, **to_hidden,
        )  # fmt: skip
    if learns:
        sums = tiling.over_all(D, H, V)
        programs = kernels.gradient_programs(D, H, V, sums["ROWS"], sums["COLS"])
        plan.launch(
            _memory_bar, (G * programs,), z_bar=z_bar, k=k, dy=kept.dy, dh_bar=dh_bar, e_bar=e_bar,
            h=kept.h, sums1=sums1, sums2=sums2, norm=norm,
            **dict(zip(("dw1", "db1", "dw2", "db2"), dmemory, strict=True)),
            N=N, tiles=tiles // G, factor=factor, D=D, H=H, V=V, PRECISION=rows["PRECISION"],
            **k_numbers, **sums,
        )  # fmt: skip
