"""The `direct` candidate of long_conv: one product after another, on data whose channels or else positions
lie side by side. Nothing is packed, and gates are multiplied on the way.

`channel_last` and `channel_major` say, each for data that lie so, which kernel and how many blocks.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.long_conv.declaration import long_conv_op
from bakeoff.ops.long_conv.direct import channel_last, channel_major, tilings
from bakeoff.ops.long_conv.direct.cut import Cut, Laid
from bakeoff.ops.long_conv.direct.tilings import Tiling

__all__ = ["direct"]


class Layout(Protocol):
    """The modules `channel_last` and `channel_major`."""

    STRIDES: str
    TAPS_FIRST: bool

    def readable(self, plan: Plan, x: Tensor) -> Laid: ...
    def laid(self, x: Tensor) -> Laid: ...
    def cut(
        self,
        plan: Plan,
        u: Tensor,
        taps: int,
        gates: int,
        tensors: list[Laid],
        tiling: Tiling | None,
        backward: bool,
    ) -> Cut: ...


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
    read = {"u": u, "gate_in": gate_in, "gate_out": gate_out}
    _launch(plan, _layout(u), h, skip, read, {"out": out, "y": y}, tiling)


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
    layout, wants_filter = _layout(u), dh is not None or dskip is not None
    read = {"u": u, "dout": dout, "gate_in": gate_in, "gate_out": gate_out}
    read["y"] = None if dgate_out is None else y
    written = {"du": du, "dgate_in": dgate_in, "dgate_out": dgate_out}
    partial = _launch(plan, layout, h, skip, read, written, tiling, backward=True, wants_filter=wants_filter)
    if partial is not None:
        plan.run(_add_up, partial, layout.TAPS_FIRST, dh, dskip)


def _layout(u: Tensor) -> Layout:
    return channel_major if channel_major.positions_side_by_side(u) else channel_last


def _launch(
    plan: Plan,
    layout: Layout,
    h: Tensor,
    skip: Tensor | None,
    read: dict[str, Tensor | None],
    written: dict[str, Tensor | None],
    tiling: Tiling | None,
    *,
    backward: bool = False,
    wants_filter: bool = False,
) -> Tensor | None:
    """Fills what is `written`, by the kernels' names and laid out alike. If `wants_filter` the gradients of h
    and skip follow from the result."""
    u = read["u"]
    assert u is not None
    h, skip = _filters(plan, h, skip)
    gates = (read["gate_in"] is not None) + 2 * (read["gate_out"] is not None)
    source = {name: None if x is None else layout.readable(plan, x) for name, x in read.items()}
    results = [layout.laid(x) for x in written.values() if x is not None]
    tensors = [x for x in source.values() if x is not None] + results
    cut = layout.cut(plan, u, h.shape[1], gates, tensors, tiling, backward)
    partial = plan.empty(cut.sums, torch.float32) if wants_filter else None
    strides = {**source, next(iter(written)): results[0] if results else None}
    plan.launch(
        cut.kernel, (cut.blocks,), threads=cut.threads,
        **{name: None if x is None else x.data for name, x in source.items()}, **written,
        **({"partial": partial} if backward else {}), h=h, skip=skip, h_c=h.stride(0), h_l=h.stride(1),
        **cut.numbers,
        **{
            f"{name}_{letter}": stride
            for name, x in strides.items()
            for letter, stride in zip(layout.STRIDES, (0, 0) if x is None else x.strides, strict=True)
        },
    )  # fmt: skip
    return partial


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
