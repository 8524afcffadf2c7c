"""The ``triton`` candidate of muon_: what its kernels are launched on."""

from collections import OrderedDict
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tiled, Tilings
from bakeoff.ops.adamw.tables import Table, table_for
from bakeoff.ops.adamw.triton import fetch
from bakeoff.ops.muon import kernels
from bakeoff.ops.muon.kernels import Tiling, tilings
from bakeoff.ops.muon.settings import COEFFICIENTS, EPS, arguments, size_of
from bakeoff.select.declare.lists import as_list

__all__ = ["update"]

BLOCK = 64
"""Side of the tiles that whole matrices are read and written in; tiles of products are multiples of it."""
SUM_BLOCK = 1024
_HIP = torch.version.hip is not None
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_momentum = TritonKernel(kernels._momentum)
_measure = TritonKernel(kernels._measure)
_symmetric = TritonKernel(kernels._symmetric)
_apply = TritonKernel(kernels._apply)
_move = TritonKernel(kernels._move)

_tables: OrderedDict[object, Table] = OrderedDict()


def _take_step(*args: Any, tiling: Tiling | None = None, block: int = BLOCK) -> None:
    """One step of matrices of one shape: three launches, and three an iteration."""
    matrices, how = arguments(args)
    params, grads, momentum = (as_list(c) for c in (matrices.params, matrices.grads, matrices.momentum))
    n, (R, C), device = len(params), params[0].shape, params.device
    tall = R > C
    tiling = tiling or tilings(min(R, C), _HIP)[0]
    M = _rounded(min(R, C), max(tiling.tile, tiling.rows, tiling.depth, block))
    K = _rounded(max(R, C), max(tiling.columns, tiling.depth, block))
    table = table_for(params.sizes, R * C, device, _tables, fetch)
    # On the CPU kernels are interpreted, and bfloat16 is wrong there.
    narrow = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, spare = torch.empty((2, n, M, K), dtype=narrow, device=device).unbind(0)
    tiles = (M // block) * (K // block)
    partial = torch.empty((n, tiles), dtype=torch.float32, device=device)
    units = _units(C, [*params.addresses, *grads.addresses, *momentum.addresses])
    cut = {
        "table": table.rows(params.addresses, grads.addresses, momentum.addresses), "N": n, "R": R,
        "C": C // units, "MT": M // block, "KT": K // block, "TALL": tall, "UNITS": units, "BLOCK": block,
    }  # fmt: skip
    _momentum(
        (tiles, n), x=x, partial=partial, clip_coef=how.clip_coef, found_inf=how.found_inf,
        grad_scale=how.grad_scale, decay=float(how.momentum_decay), sign=-1.0 if how.maximize else 1.0,
        GRAD=_DTYPES[grads.meta.dtype], STATE=_DTYPES[momentum.meta.dtype], NESTEROV=bool(how.nesterov),
        num_warps=8, **cut,
    )  # fmt: skip
    scales = torch.empty((2, _rounded(n, 4)), dtype=torch.float32, device=device)  # two aligned rows
    _measure((n,), partial=partial, scales=scales, N=scales.shape[1], P=tiles, eps=EPS, BLOCK=SUM_BLOCK,
             num_warps=4)  # fmt: skip
    x = _iterate(x, spare, scales, how.steps, tiling)
    lr_at, lr = (how.lr, 0.0) if isinstance(how.lr, Tensor) else (None, float(how.lr))
    _move(
        (tiles, n), x=x, lr_at=lr_at, lr_mult=how.lr_mult, found_inf=how.found_inf, lr=lr,
        weight_decay=float(how.weight_decay), size=size_of((R, C), how.scale),
        PARAM=_DTYPES[params.meta.dtype], num_warps=8, **cut,
    )  # fmt: skip


def _iterate(x: Tensor, spare: Tensor, scales: Tensor, steps: int, tiling: Tiling) -> Tensor:
    """The iterations, in x and `spare` in turn; that of the two which holds the result. The first one also
    divides by the norm."""
    a, b, c = COEFFICIENTS
    n, M, K = x.shape
    gram, poly = torch.empty((2, n, M, M), dtype=x.dtype, device=x.device).unbind(0)
    T = M // tiling.tile
    lower = (T * (T + 1) // 2, n)
    symmetric = {
        "MT": T, "TILE": tiling.tile, "DEPTH": tiling.depth, "num_warps": tiling.tile_warps,
        "num_stages": tiling.stages,
    }  # fmt: skip
    whole = ((M // tiling.rows) * (K // tiling.columns), n)
    for step in range(steps):
        norm, square = (scales[0], scales[1]) if step == 0 else (None, None)
        _symmetric(
            lower, x=x, add=None, out=gram, scales=square, KT=K // tiling.depth, alpha=1.0, beta=0.0,
            **symmetric,
        )  # fmt: skip
        _symmetric(
            lower, x=gram, add=gram, out=poly, scales=None, KT=M // tiling.depth, alpha=c, beta=b, **symmetric
        )
        _apply(
            whole, p=poly, x=x, out=spare, scales=norm, MT=M // tiling.rows, KT=K // tiling.columns, beta=a,
            ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=tiling.depth, num_warps=tiling.warps,
            num_stages=tiling.stages,
        )  # fmt: skip
        x, spare = spare, x
    return x


def _rounded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _units(columns: int, addresses: list[int]) -> int:
    """Elements that rows of a matrix are a whole number of: 16 where all are aligned for wide accesses."""
    return 16 if columns % 16 == 0 and all(address % 16 == 0 for address in addresses) else 1


update = Tiled(_take_step, Tilings(Tiling, lambda case: tilings(min(case.params.shape), _HIP)))
"""For float16, bfloat16 and float32."""
