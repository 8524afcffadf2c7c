"""The ``hopper`` candidate of dilated_attention: what its forward is launched on, branch by branch."""

from functools import lru_cache

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tilings
from bakeoff.kernels.views import View, ViewKernel
from bakeoff.ops.dilated_attention import triton
from bakeoff.ops.dilated_attention.kernels import BackwardTiling, backward_tilings
from bakeoff.ops.dilated_attention.kernels import hopper as kernels
from bakeoff.ops.dilated_attention.kernels.hopper_tilings import (
    HopperTiling,
    hopper_tilings,
    registers,
    width_of,
)
from bakeoff.ops.dilated_attention.reference import pattern_of

__all__ = ["attend", "hopper"]

_attend = ViewKernel(kernels._attend)
_LOG2E = 1.4426950408889634


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, phase: str, causal: bool,
    scale: float, y: Tensor, lse: Tensor, tiling: HopperTiling | None,
) -> None:  # fmt: skip
    """y and lse, branch by branch; each mixes its share in."""
    if y.numel() == 0:
        return
    (B, T, H, D), heads = q.shape, k.shape[2]
    pattern = pattern_of(segments, rates, phase, heads)
    tiling = tiling or hopper_tilings(triton._Shapes(q, k, segments, rates, phase, causal))[0]
    programs = hardware.multiprocessors(str(plan.device))
    at_start, of_workers, of_copier = registers(tiling.workers)
    data = {name: _mapped(plan, x) for name, x in {"q": q, "k": k, "v": v}.items()} | {"y": y}
    for branch, (longest, rate, row) in enumerate(zip(*pattern, strict=True)):
        w = min(longest, T)
        length = w // rate
        blocks = -(-length // (64 * tiling.workers))
        pairs = -(-blocks // 2) if causal else blocks
        items = B * (T // w) * H * pairs
        tiles = {"q": 64, "k": tiling.keys, "v": tiling.keys, "y": 64}
        views = {name: _branch(data[name], w, rate, (1, n, 1, 1, width_of(D))) for name, n in tiles.items()}
        phases = plan.constant(_phases(row, plan.device))
        plan.launch(
            _attend, (min(items, programs),), views=views, **data, lse=lse, phases=phases, ITEMS=items,
            BLOCKS=pairs, H=H, T=T, SEGMENTS=T // w, LENGTH=length, RATE=rate, scale=scale * _LOG2E,
            G=H // heads, DTYPE=kernels.DTYPES[q.dtype], CAUSAL=causal, RAGGED=length % tiling.keys > 0,
            MERGE=branch > 0, EARLY=bool(tiling.early), WIDTH=width_of(D), WORKERS=tiling.workers,
            BLOCK=tiling.keys, STAGES=tiling.stages, TURNS=bool(tiling.turns), WORKER_REGISTERS=of_workers,
            COPIER_REGISTERS=of_copier, num_warps=4, maxnreg=at_start,
            launch_pdl=bool(tiling.early and branch),
        )  # fmt: skip


def _mapped(plan: Plan, x: Tensor) -> Tensor:
    """x [B, T, h, D], or a copy where the copy engine can't read x: it takes addresses and strides in units
    of 16 bytes, and the rows of one sequence must follow those of the one before."""
    aligned = x.data_ptr() % 16 == 0
    if not aligned:
        plan.recording = False  # an address isn't what a kind of call is told by
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    fits = apart and x.stride(-1) == 1 and all(stride % 8 == 0 for stride in strides[:-1])
    return x if aligned and fits and min(strides) > 0 else plan.derive(_dense, x)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _branch(x: Tensor, w: int, rate: int, tile: tuple[int, ...]) -> View:
    """x [B, T, h, D] as [B * segments, rows, rate, h, D]: a token is segment w + row rate + phase."""
    (B, T, heads, D), (b, t, h, _) = x.shape, x.stride()
    # A stride that leads nowhere may be any number, and the copy engine takes multiples of 16 bytes alone.
    t, h = (8 if size == 1 else stride for size, stride in ((B * T, b if T == 1 else t), (heads, h)))
    return View((B * T // w, w // rate, rate, heads, D), (w * t, rate * t, t, h, 1), tile)


@lru_cache(maxsize=64)
def _phases(row: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(row, dtype=torch.int32, device=device)


attend = kernel_op(
    "dilated_attention.hopper",
    results=triton.results,
    forward=forward,
    backward=triton.backward,
    names=("y", "lse"),
    materialize=False,
    tilings={
        "forward": Tilings(HopperTiling, hopper_tilings),
        "backward": Tilings(BackwardTiling, backward_tilings),
    },
)
"""(q, k, v, cu_seqlens, segments, rates, phase, causal, detached, scale) -> (y, lse)."""

hopper = triton.Fused(attend)
