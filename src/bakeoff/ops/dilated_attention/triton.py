"""The ``fused`` candidate of dilated_attention: what its kernels are launched on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels.layout import laid_out
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tiling, Tilings
from bakeoff.ops.dilated_attention import kernels
from bakeoff.ops.dilated_attention.kernels import BackwardTiling, ForwardTiling
from bakeoff.ops.dilated_attention.kernels import backward as backward_kernels
from bakeoff.ops.dilated_attention.kernels import forward as forward_kernels
from bakeoff.ops.dilated_attention.reference import Pattern, pattern_of
from bakeoff.ops.dilated_attention.tables import classes_of, planned_tables

__all__ = ["Fused", "attend", "fused"]

_forward = TritonKernel(forward_kernels._forward)
_delta = TritonKernel(backward_kernels._delta)
_branch_delta = TritonKernel(backward_kernels._branch_delta)
_queries = TritonKernel(backward_kernels._queries)
_keys_and_values = TritonKernel(backward_kernels._keys_and_values)


def results(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str, phase: str,
    causal: bool, detached: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Room for y, [B, T, H, D], and lse, [B, H, T]."""
    del k, v, cu_seqlens, segments, rates, phase, causal, detached, scale
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str,
    phase: str, causal: bool, scale: float, y: Tensor, lse: Tensor, tiling: ForwardTiling | None,
) -> None:  # fmt: skip
    """y and lse in one launch."""
    if y.numel() == 0:
        return
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    tiling = tiling or kernels.forward_tilings(_Shapes(q, k, segments, rates, phase, causal))[0]
    laid, numbers = laid_out(plan, "bth", q=q, k=k, v=v)
    for group in _groups(pattern, tiling.split):
        tables, cut = _cut(plan, group, q, cu_seqlens, causal, tiling.rows, tiling.classes)
        plan.launch(
            _forward, (q.shape[0] * q.shape[2] * cut["TILES"],), **laid, y=y, lse=lse, **tables, **cut,
            **numbers, **_fixed(q, k, group, causal, scale), BLOCK_M=tiling.rows, BLOCK_N=tiling.keys,
            STAGES=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip


def backward(
    plan: Plan, dy: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor,
    lse: Tensor, cu_seqlens: Tensor | None, segments: str, rates: str, phase: str, causal: bool,
    detached: bool, scale: float, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    tiling: BackwardTiling | None,
) -> None:  # fmt: skip
    """The gradients that there is room for."""
    if y.numel() == 0:
        for gradient in (dk, dv):
            if gradient is not None:
                plan.run(Tensor.zero_, gradient)
        return
    B, T, H, D = q.shape
    pattern = pattern_of(segments, rates, phase, k.shape[2])
    tiling = tiling or kernels.backward_tilings(_Shapes(q, k, segments, rates, phase, causal))[0]
    dy = plan.zeros(q.shape, q.dtype) if dy is None else dy
    dlse = None if dlse is None else plan.contiguous(dlse)
    laid, numbers = laid_out(plan, "bth", q=q, k=k, v=v, dy=dy)
    numbers["plane"] = B * H * T if detached else 0
    for_queries = {
        "BLOCK_M": tiling.q_rows, "BLOCK_N": tiling.q_keys, "STAGES": tiling.q_stages,
        "num_warps": tiling.q_warps,
    }  # fmt: skip
    if detached:
        delta = plan.empty((len(pattern.rates), B, H, T), torch.float32)
        tables, cut = _cut(plan, _Group(pattern, 0), q, cu_seqlens, causal, tiling.q_rows, tiling.classes)
        plan.launch(
            _branch_delta, (B * H * cut["TILES"],), **laid, lse=lse, dlse=dlse, delta=delta, **tables, **cut,
            **numbers, branch=0, **_fixed(q, k, _Group(pattern, 0), causal, scale), **for_queries,
        )  # fmt: skip
    else:
        delta = plan.empty((B, H, T), torch.float32)
        own = {name: numbers[name] for name in ("ALIGN", "dy_b", "dy_t", "dy_h")}
        plan.launch(
            _delta, (B * H * -(-T // 64),), dy=laid["dy"], y=y, dlse=dlse, delta=delta, H=H, T=T, **own,
            D=D, WIDTH=kernels.width_of(D), BLOCK=64, num_warps=4,
        )  # fmt: skip
    for group in _groups(pattern, tiling.split):
        fixed = numbers | _fixed(q, k, group, causal, scale) | {"branch": group.first}
        if dq is not None:
            tables, cut = _cut(plan, group, q, cu_seqlens, causal, tiling.q_rows, tiling.classes)
            plan.launch(
                _queries, (B * H * cut["TILES"],), **laid, lse=lse, delta=delta, dq=dq, **tables, **cut,
                **fixed, **for_queries,
            )  # fmt: skip
        if dk is not None or dv is not None:
            tables, cut = _cut(plan, group, q, cu_seqlens, causal, tiling.k_rows, tiling.classes)
            plan.launch(
                _keys_and_values, (B * k.shape[2] * cut["TILES"],), **laid, lse=lse, delta=delta, dk=dk,
                dv=dv, **tables, **cut, **fixed, BLOCK_M=tiling.k_rows, BLOCK_N=tiling.k_keys,
                STAGES=tiling.k_stages, num_warps=tiling.k_warps,
            )  # fmt: skip


class _Group(NamedTuple):
    """The branches of one launch."""

    pattern: Pattern
    first: int
    """Which the first of them is."""


def _groups(pattern: Pattern, split: int) -> list[_Group]:
    """All branches together, or each for itself."""
    if not split:
        return [_Group(pattern, 0)]
    return [_Group(Pattern(*[(part[i],) for part in pattern]), i) for i in range(len(pattern.rates))]  # type: ignore[arg-type]


class _Shapes:
    """What tilings look at, of tensors as of a case."""

    def __init__(self, q: Tensor, k: Tensor, segments: str, rates: str, phase: str, causal: bool) -> None:
        self.q, self.k, self.causal = q, k, causal
        self.segments, self.rates, self.phase = segments, rates, phase


def _fixed(q: Tensor, k: Tensor, group: _Group, causal: bool, scale: float) -> dict[str, Any]:
    D, exact = q.shape[3], q.dtype == torch.float32
    return {
        "scale": scale if exact else scale * forward_kernels.LOG2E.value,
        "G": q.shape[2] // k.shape[2],
        "BRANCHES": len(group.pattern.rates),
        "CAUSAL": causal,
        "D": D,
        "WIDTH": kernels.width_of(D),
        "PRECISION": "ieee" if exact else "tf32",
        "MERGE": group.first > 0,
    }


def _cut(
    plan: Plan, group: _Group, q: Tensor, cu_seqlens: Tensor | None, causal: bool, rows: int, classes: int
) -> tuple[dict[str, Tensor], dict[str, int]]:  # fmt: skip
    """The tables of intervals, branches and phases, and how many tiles there are of them."""
    pattern, T, H = group.pattern, q.shape[1], q.shape[2]
    interval = min(pattern.segments[0], T)
    if group.first:  # over the rows of one branch
        classes, tiles = pattern.rates[0], 1
    else:
        classes = classes or classes_of(pattern.segments, pattern.rates, T, rows, causal)
        tiles = classes
    tables = planned_tables(plan, pattern, T, cu_seqlens)
    blocks = math.ceil(math.ceil(interval / classes) / rows)
    tiles *= tables["intervals"].shape[0] * blocks
    return tables, {"CLASSES": classes, "BLOCKS": blocks, "TILES": tiles, "H": H, "T": T}


attend = kernel_op(
    "dilated_attention",
    results=results,
    forward=forward,
    backward=backward,
    names=("y", "lse"),
    materialize=False,
    tilings={
        "forward": Tilings(ForwardTiling, kernels.forward_tilings),
        "backward": Tilings(BackwardTiling, kernels.backward_tilings),
    },
)
"""(q, k, v, cu_seqlens, segments, rates, phase, causal, detached, scale) -> (y, lse)."""


class Fused:
    """The candidate, with the op's arguments in their order."""

    def __init__(self, attend: KernelOp) -> None:
        self.attend = attend
        self._bound: dict[str, Fused] = {"": self}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: str, rates: str, causal: bool, phase: str,
        combine_grad: str, cu_seqlens: Tensor | None, scale: float | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        """y, or (y, lse), for float16, bfloat16 and float32."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        detached = combine_grad == "detached"
        y, lse = self.attend(q, k, v, cu_seqlens, segments, rates, phase, causal, detached, scale)
        return (y, lse) if return_lse else y

    def variants(self, case: Any) -> dict[str, Sequence[Tiling]]:
        """The tilings that each direction may be launched with for a case, the default first."""
        return self.attend.variants(case)

    def bind(self, text: str) -> "Fused":
        """The candidate with the variant that `text` names."""
        if text not in self._bound:
            self._bound[text] = self._with(self.attend.bind(text))
        return self._bound[text]

    def _with(self, attend: KernelOp) -> "Fused":
        return type(self)(attend)


fused = Fused(attend)
