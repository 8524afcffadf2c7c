"""long_conv by methods that convolve rows of time: gates are multiplied where data become rows and back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bakeoff.channel_major.rows import empty_rows, pack, rows_in, unpack
from bakeoff.kernels.plan import Plan, Planner

__all__ = ["planners"]


def planners(convolve: Callable[..., None], differentiate: Callable[..., None]) -> tuple[Planner, Planner]:
    """Forward and backward of `bakeoff.ops.long_conv.declaration.long_conv_op`, for a method that says

    - convolve(plan, x, h, skip, y, T, backwards=, tiling=): y = h * x + skip x, for rows of T times; with
      `backwards` x is correlated with h.
    - differentiate(plan, x, dy, h, skip, dx, dh, dskip, T, tiling=): the gradients of h and skip and, where
      there is room for it, of x.
    """

    def forward(
        plan: Plan,
        u: Tensor,
        h: Tensor,
        skip: Tensor | None,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        out: Tensor,
        y: Tensor | None,
        tiling: Any,
    ) -> None:
        x = pack(plan, u, gate_in)
        in_place = rows_in(out) if gate_out is None else None
        result = in_place or empty_rows(plan, u)
        convolve(plan, x, h, skip, result, u.shape[1], backwards=False, tiling=tiling)
        if in_place is None:
            unpack(plan, result, out, gate_out, product=y)

    def backward(
        plan: Plan,
        u: Tensor,
        h: Tensor,
        skip: Tensor | None,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        y: Tensor | None,
        dout: Tensor,
        du: Tensor | None,
        dh: Tensor | None,
        dskip: Tensor | None,
        dgate_in: Tensor | None,
        dgate_out: Tensor | None,
        tiling: Any,
    ) -> None:
        T = u.shape[1]
        wants_input = du is not None or dgate_in is not None
        wants_filter = dh is not None or dskip is not None
        if wants_input or wants_filter:
            dy = pack(plan, dout, gate_out)
            in_place = rows_in(du) if du is not None and gate_in is None else None
            dx = (in_place or empty_rows(plan, u)) if wants_input else None
            if wants_filter:
                x = pack(plan, u, gate_in)
                differentiate(plan, x, dy, h, skip, dx, dh, dskip, T, tiling=tiling)
            elif dx is not None:
                convolve(plan, dy, h, skip, dx, T, backwards=True, tiling=tiling)
            if dx is not None and in_place is None:
                unpack(plan, dx, du, gate_in, product=dgate_in, factor=u)
        if dgate_out is not None:
            plan.run(torch.mul, dout, y, out=dgate_out)

    return forward, backward
