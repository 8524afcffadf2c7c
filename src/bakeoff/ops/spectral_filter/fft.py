"""The ``fft`` candidate of spectral_filter: `bakeoff.fft_conv` on a circle; weights are the spectrum."""

from typing import Any

from torch import Tensor

from bakeoff import hardware
from bakeoff.channel_major.rows import Rows, empty_rows, pack, result_like, rows_in, unpack
from bakeoff.fft_conv import launch, plans
from bakeoff.fft_conv.plans import FFTPlan, Tiling
from bakeoff.kernels.op import kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.spectral_filter import kernels

__all__ = ["TILE", "fft"]

TILE = {"FREQUENCIES": 128, "CHANNELS": 8, "num_warps": 4}
_fold = TritonKernel(kernels._fold)


def results(x: Tensor, weight: Tensor) -> Tensor:
    """y, laid out like x."""
    del weight
    return result_like(x)


def forward(plan: Plan, x: Tensor, weight: Tensor, y: Tensor, tiling: Tiling | None) -> None:
    """y = irfft(weight rfft(x)), where frequencies beyond the weights are kept."""
    weights = plan.reals(weight)
    T = x.shape[1]
    source = pack(plan, x)
    in_place = rows_in(y)
    result = in_place or empty_rows(plan, x)
    fft = _plan(source, T, False, tiling)
    launch.multiply_spectrum(plan, fft, source, weights, result, T, conjugate=False)
    if in_place is None:
        unpack(plan, result, y)


def backward(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    tiling: Tiling | None,
) -> None:
    """The gradients that there is room for."""
    weights = plan.reals(weight)
    dweights = None if dweight is None else plan.reals(dweight)
    T = x.shape[1]
    gradient = pack(plan, dy)
    in_place = None if dx is None else rows_in(dx)
    result = None if dx is None else in_place or empty_rows(plan, x)
    if dweights is not None:
        source = pack(plan, x)
        fft = _plan(source, T, True, tiling)
        sums = launch.differentiate_spectrum(plan, fft, source, gradient, weights, result, T)
        if dweights.numel():
            _fold_sums(plan, fft, sums, dweights)
    elif result is not None:
        fft = _plan(gradient, T, False, None)
        launch.multiply_spectrum(plan, fft, gradient, weights, result, T, conjugate=True)
    if result is not None and in_place is None:
        unpack(plan, result, dx)


def _plan(x: Rows, T: int, backward: bool, tiling: Tiling | None) -> FFTPlan:
    shared = hardware.shared_memory(x.data.get_device())
    fft = plans.choose(T, T, shared, circular=True, single=x.shape[0] == 1, backward=backward, tiling=tiling)
    assert fft is not None  # `supports` keeps other lengths away
    return fft


def _fold_sums(plan: Plan, fft: FFTPlan, sums: Tensor, dweights: Tensor) -> None:
    """The gradient of the weights, from sums in the order in which `fft.cu` leaves them."""
    K, C, _ = dweights.shape
    plan.launch(
        _fold, (-(-K // TILE["FREQUENCIES"]), -(-C // TILE["CHANNELS"])),
        sums=sums, dw=dweights, C=C, K=K, splits=sums.shape[0], **fold_constants(fft), **TILE,
    )  # fmt: skip


def fold_constants(fft: FFTPlan) -> dict[str, int]:
    """What `kernels._fold` knows of a transform."""
    r1, r2, r3 = fft.passes.radices
    return {"T": fft.total, "SEGMENTS": fft.segments, "PARTS": fft.parts, "R1": r1, "R2": r2, "R3": r3}


def _tilings(case: Any, backward: bool) -> list[Tiling]:
    B, T, _ = case.x.shape
    shared = hardware.shared_memory(hardware.index(case.device))
    return plans.tilings(T, T, shared, circular=True, single=B == 1, backward=backward)


fft = kernel_op(
    "spectral_filter.fft",
    results=results,
    forward=forward,
    backward=backward,
    gradients={"x": result_like},
    tilings={
        "forward": Tilings(Tiling, lambda case: _tilings(case, False)),
        "backward": Tilings(Tiling, lambda case: _tilings(case, True)),
    },
)
"""For float16, bfloat16 and float32, and complex64 weights."""
