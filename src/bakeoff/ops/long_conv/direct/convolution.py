"""The `direct` candidate of long_conv: one product after another, on data whose channels or else positions
lie side by side. Nothing is packed, and gates are multiplied on the way."""

from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.long_conv.declaration import long_conv_op
from bakeoff.ops.long_conv.direct import channel_last, channel_major, tilings
from bakeoff.ops.long_conv.direct.tilings import Tiling

__all__ = ["direct"]


def forward(
    plan: Plan,
    u: Tensor,
    h: Tensor,
    skip: Tensor | None,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    out: Tensor,
    y: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """The output, and where it is kept what `gate_out` multiplied."""
    kernels = channel_major if channel_major.positions_side_by_side(u) else channel_last
    kernels.convolve(plan, u, *_filters(plan, h, skip), gate_in, gate_out, out, y, tiling)


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
    tiling: Tiling | None,
) -> None:
    """The gradients that there is room for."""
    taps, weight = _filters(plan, h, skip)
    wants_filter = dh is not None or dskip is not None
    given = (gate_in, gate_out, None if dgate_out is None else y, du, dgate_in, dgate_out, wants_filter)
    if channel_major.positions_side_by_side(u):
        partial = channel_major.differentiate(plan, dout, u, taps, weight, *given, tiling)
        if partial is not None:
            plan.run(_add_up, partial, False, dh, dskip)
    else:
        partial = channel_last.differentiate(plan, dout, u, taps, weight, *given, tiling)
        if partial is not None:
            plan.run(_add_up, partial, True, dh, dskip)


def _filters(plan: Plan, h: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The filter and the skip, in float32."""
    if h.dtype != torch.float32:
        h = plan.derive(Tensor.float, h)
    if skip is not None:
        skip = plan.contiguous(skip if skip.dtype == torch.float32 else plan.derive(Tensor.float, skip))
    return h, skip


def _add_up(partial: Tensor, taps_first: bool, dh: Tensor | None, dskip: Tensor | None) -> None:
    """The gradients of h [C, taps] and skip from sums [.., C, taps], or [.., taps, C] if `taps_first`.

    Added up in float64: parts with loud positions drown no others.
    """
    sums = partial.sum(0, dtype=torch.float64)
    if taps_first:
        sums = sums.t()
    if dh is not None:
        dh.copy_(sums)
    if dskip is not None:
        dskip.copy_(sums[:, 0])


def _tilings(case: Any, backward: bool) -> list[Tiling]:
    """For channels or positions side by side, as a case's u has them."""
    T, C = case.u.shape[1:]
    _, to_t, to_c = case.u.stride
    taps, itemsize = case.h.shape[1], case.u.dtype.itemsize
    gates = (case.gate_in is not None) + 2 * (case.gate_out is not None)
    if to_c == 1 and (to_t != 1 or C > 1):
        return tilings.channel_last(taps, gates, itemsize, backward)
    return tilings.channel_major(taps, gates, T * itemsize % 16 == 0, backward)


direct = long_conv_op(
    "direct",
    forward,
    backward,
    tilings={
        "forward": Tilings(Tiling, lambda case: _tilings(case, False)),
        "backward": Tilings(Tiling, lambda case: _tilings(case, True)),
    },
)
"""For float16, bfloat16 and float32."""
