"""The ``triton`` candidates of adamw_ and global_norm: what their kernels are launched on."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tiled, Tilings
from bakeoff.ops.adamw import kernels
from bakeoff.ops.adamw.group import Guard, grouped, log_beta
from bakeoff.ops.adamw.kernels import NormTiling, Tiling, norm_tilings, tilings
from bakeoff.ops.adamw.tables import Table, table_for
from bakeoff.select.declare.lists import as_list

__all__ = ["fetch", "norm", "update"]

PREPARE_BLOCK = 256
FETCH_BLOCK = 1024
JUDGE_BLOCK = 1024
SUM_BLOCK = 4096
_SHARED = 4  # floats at the start of `constants`: gradient factor, whether to skip, decay, unused
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_fetch = TritonKernel(kernels._fetch)
_sum_squares = TritonKernel(kernels._sum_squares)
_judge = TritonKernel(kernels._judge)
_prepare = TritonKernel(kernels._prepare)
_update = TritonKernel(kernels._update)
_add_up = TritonKernel(kernels._add_up)

_tables: OrderedDict[object, Table] = OrderedDict()
_UPDATE = {(size, sums): tilings(size, sums)[0] for size in (2, 4) for sums in (False, True)}
_NORM = norm_tilings()[0]


def fetch(source: int, target: Tensor) -> None:
    """Copies from an address in pinned memory to an int32 `target`, by a kernel."""
    count = target.numel()
    grid = (-(-count // FETCH_BLOCK),)
    _fetch(grid, target=target, source=source, count=count, BLOCK=FETCH_BLOCK, num_warps=4)


def _take_step(*args: Any, tiling: Tiling | None = None) -> None:
    """Takes one AdamW step in two launches, whatever the number of tensors; three where sums are wanted."""
    group, how = grouped(args)
    params, grads, exp_avg, exp_avg_sq = (as_list(tensors) for tensors in group[:4])
    step = as_list(group.step)
    tiling = tiling or _UPDATE[exp_avg.meta.dtype.itemsize, how.sums is not None]
    n, counters, device = len(params), len(step), params.device
    counts = step.addresses if counters == n else step.addresses * n
    columns = [params.addresses, grads.addresses, counts, exp_avg.addresses, exp_avg_sq.addresses]
    kind = None
    if group.master is not None:
        master = as_list(group.master)
        columns.append(master.addresses)
        kind = "remainder" if master.meta.dtype == torch.int16 else "float32"
    table = table_for(params.sizes, tiling.chunk, device, _tables, fetch)
    rows = table.rows(*columns)
    width = 2 if how.sums is None else 5
    constants = torch.empty(_SHARED + width * counters, dtype=torch.float32, device=device)
    lr_at, lr = (how.lr, 0.0) if isinstance(how.lr, Tensor) else (None, float(how.lr))
    _prepare(
        (-(-counters // PREPARE_BLOCK),), table=rows, constants=constants, lr_at=lr_at,
        lr_mult=how.lr_mult, clip_coef=how.clip_coef, found_inf=how.found_inf, grad_scale=how.grad_scale,
        N=n, S=counters, lr=lr, weight_decay=float(how.weight_decay), log_beta1=log_beta(how.beta1),
        log_beta2=log_beta(how.beta2), sign=-1.0 if how.maximize else 1.0, WIDTH=width,
        BLOCK=PREPARE_BLOCK, num_warps=4,
    )  # fmt: skip
    partial = None
    if how.sums is not None:
        partial = torch.empty((4, table.count), dtype=torch.float32, device=device)
    if table.count:
        _update(
            (table.count,), table=rows, chunks=table.chunks, constants=constants, partial=partial, N=n,
            rest1=1.0 - how.beta1, beta2=float(how.beta2), rest2=1.0 - how.beta2, eps=float(how.eps),
            PARAM=tl.int16 if kind == "remainder" else _DTYPES[params.meta.dtype],
            GRAD=_DTYPES[grads.meta.dtype], STATE=_DTYPES[exp_avg.meta.dtype], MASTER=kind,
            EACH=int(counters > 1), WIDTH=width, CHUNK=tiling.chunk, BLOCK=tiling.block,
            num_warps=tiling.warps,
        )  # fmt: skip
    if partial is not None:
        _add_up((4,), partial=partial, sums=how.sums, P=table.count, BLOCK=SUM_BLOCK, num_warps=8)


def _norm(
    grads: Sequence[Tensor],
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skipped: Tensor | None = None,
    tiling: NormTiling | None = None,
) -> Guard:
    """Judges gradients of one device and dtype by their global norm, in two launches."""
    tiling, grads = tiling or _NORM, as_list(grads)
    device = grads.device
    programs = tiling.programs * hardware.multiprocessors(device.index if device.type == "cuda" else -1)
    partial = torch.empty(programs, dtype=torch.float32, device=device)
    table = table_for(grads.sizes, tiling.chunk, device, _tables, fetch)
    _sum_squares(
        (programs,), table=table.rows(grads.addresses), chunks=table.chunks, partial=partial, N=len(grads),
        count=table.count, GRAD=_DTYPES[grads.meta.dtype], CHUNK=tiling.chunk, BLOCK=tiling.block,
        num_warps=tiling.warps,
    )  # fmt: skip
    verdict = torch.empty((3, 4), dtype=torch.float32, device=device)  # rows of 16 bytes: aligned scalars
    _judge(
        (1,), partial=partial, verdict=verdict, skipped=skipped, found_inf=found_inf, grad_scale=grad_scale,
        P=programs, max_norm=0.0 if max_norm is None else float(max_norm), CLIP=max_norm is not None,
        SKIP=bool(skip_nonfinite), BLOCK=JUDGE_BLOCK, num_warps=4,
    )  # fmt: skip
    return Guard(*verdict[:, 0].unbind())


def _tilings(case: Any) -> list[Tiling]:
    return tilings(case.exp_avg.dtype.itemsize, case.sums is not None)


update = Tiled(_take_step, Tilings(Tiling, _tilings))
"""For float16, bfloat16 and float32."""

norm = Tiled(_norm, Tilings(NormTiling, lambda case: norm_tilings()))
"""For float16, bfloat16 and float32."""
