"""spectral_filter's Triton kernel, built for GPUs that need not be here; long_conv's tests build its FFTs."""

import pytest

from aot import TARGETS, build
from bakeoff.fft_conv.plans import FFTPlan
from bakeoff.ops.spectral_filter import kernels
from bakeoff.ops.spectral_filter.fft import TILE, fold_constants


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "fft", [FFTPlan(256), FFTPlan(8192), FFTPlan(16384, 4), FFTPlan(16384, 4, single=True)], ids=str
)
def test_the_weights_gradient(fft, target):
    sizes = dict.fromkeys(("C", "K", "splits"), "i32")
    constants = {**fold_constants(fft), **TILE}
    warps = constants.pop("num_warps")
    signature = {"sums": "*fp32", "dw": "*fp32", **sizes}
    assert build(kernels._fold, signature, constants, target, num_warps=warps).spills == 0
