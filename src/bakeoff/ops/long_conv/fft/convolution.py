"""The `fft` candidate of long_conv: `bakeoff.fft_conv` on rows of time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff import hardware
from bakeoff.channel_major.rows import Rows
from bakeoff.fft_conv import launch, plans
from bakeoff.fft_conv.plans import FFTPlan, Tiling
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.long_conv.declaration import long_conv_op
from bakeoff.ops.long_conv.on_rows import planners

__all__ = ["fft"]


def convolve(
    plan: Plan,
    x: Rows,
    h: Tensor,
    skip: Tensor | None,
    y: Rows,
    T: int,
    *,
    backwards: bool,
    tiling: Tiling | None,
) -> None:
    """y = h * x (correlated with h if `backwards`) + skip x."""
    L = min(h.shape[1], T)
    fft = _plan(x, T, L, False, None if backwards else tiling)
    if fft is None:
        plan.run(_convolve_by_torch, x.data, x[1:], h, skip, y.data, y[1:], T, backwards)
    else:
        launch.convolve(plan, fft, x, *_filters(plan, h, skip, L), y, T, backwards=backwards)


def differentiate(
    plan: Plan,
    x: Rows,
    dy: Rows,
    h: Tensor,
    skip: Tensor | None,
    dx: Rows | None,
    dh: Tensor | None,
    dskip: Tensor | None,
    T: int,
    *,
    tiling: Tiling | None,
) -> None:
    """The gradients of h and skip; that of x into dx if it is given."""
    L = min(h.shape[1], T)
    fft = _plan(x, T, L, True, tiling)
    if fft is None:
        if dx is not None:
            plan.run(_convolve_by_torch, dy.data, dy[1:], h, skip, dx.data, dx[1:], T, True)
        sums: Tensor | None = plan.derive(_correlate_by_torch, x.data, x[1:], dy.data, dy[1:], T, L)
    else:
        taps, skip = _filters(plan, h, skip, L)
        whole = dh if dh is not None and dh.shape[1] == L and dh.dtype == torch.float32 else None
        sums = launch.differentiate_convolution(plan, fft, x, dy, taps, skip, dx, T, whole)
    if sums is not None:
        plan.run(_add_up, sums, dh, dskip)
    elif dskip is not None and dh is not None:
        plan.run(_first_tap, dh, dskip)


def _plan(x: Rows, T: int, L: int, backward: bool, tiling: Tiling | None) -> FFTPlan | None:
    """None for rows too long for this device. `supports` keeps them away, but a graph of torch.compile, made
    once for every length, brings them."""
    shared = hardware.shared_memory(x.data.get_device())
    return plans.choose(T, L, shared, single=x.shape[0] == 1, backward=backward, tiling=tiling)


def _filters(plan: Plan, h: Tensor, skip: Tensor | None, L: int) -> tuple[Tensor, Tensor | None]:
    """The first taps and the skip, in float32."""
    if h.shape[1] != L or h.dtype != torch.float32:
        h = plan.derive(_first_taps, h, L)
    if skip is not None and skip.dtype != torch.float32:
        skip = plan.derive(Tensor.float, skip)
    return plan.contiguous(h), None if skip is None else plan.contiguous(skip)


def _first_taps(h: Tensor, L: int) -> Tensor:
    return h[:, :L].to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _add_up(sums: Tensor, dh: Tensor | None, dskip: Tensor | None) -> None:
    """The gradients of filters [C, taps] and the skip, from sums [splits, C, L]; 0 for taps beyond L."""
    total = sums[0] if sums.shape[0] == 1 else sums.sum(0)
    L = total.shape[1]
    if dh is not None:
        dh[:, :L].copy_(total)
        if dh.shape[1] > L:
            dh[:, L:].zero_()
    if dskip is not None:
        dskip.copy_(total[:, 0])


def _first_tap(dh: Tensor, dskip: Tensor) -> None:
    dskip.copy_(dh[:, 0])


def _convolve_by_torch(
    x: Tensor,
    x_rows: Sequence[Any],
    h: Tensor,
    skip: Tensor | None,
    y: Tensor,
    y_rows: Sequence[Any],
    T: int,
    backwards: bool,
) -> None:
    """What `launch.convolve` does, by PyTorch's FFTs; rows as (shape, strides) in the memory of a tensor."""
    L = min(h.shape[1], T)
    n = 1 << (T + L - 2).bit_length()
    values = Rows(x, *x_rows).view()[..., :T].float()
    spectrum = torch.fft.rfft(h[:, :L].float(), n)
    product = torch.fft.rfft(values, n) * (spectrum.conj() if backwards else spectrum)
    result = torch.fft.irfft(product, n)[..., :T]
    if skip is not None:
        result = result + skip.float()[:, None] * values
    Rows(y, *y_rows).view()[..., :T] = result


def _correlate_by_torch(
    x: Tensor, x_rows: Sequence[Any], dy: Tensor, dy_rows: Sequence[Any], T: int, L: int
) -> Tensor:
    """The gradient of L taps as sums [1, C, L] in float32."""
    n = 1 << (T + L - 2).bit_length()
    values, gradients = (Rows(t, *rows).view()[..., :T].float() for t, rows in ((x, x_rows), (dy, dy_rows)))
    spectra = torch.fft.rfft(values, n).conj() * torch.fft.rfft(gradients, n)
    found: Tensor = torch.fft.irfft(spectra.sum(0, keepdim=True), n)[..., :L]
    return found.contiguous()


def _tilings(case: Any, backward: bool) -> list[Tiling]:
    B, T, _ = case.u.shape
    shared = hardware.shared_memory(hardware.index(case.device))
    return plans.tilings(T, case.h.shape[1], shared, single=B == 1, backward=backward)


fft = long_conv_op(
    "fft",
    *planners(convolve, differentiate),
    tilings={
        "forward": Tilings(Tiling, lambda case: _tilings(case, False)),
        "backward": Tilings(Tiling, lambda case: _tilings(case, True)),
    },
)
"""For float16, bfloat16 and float32."""
