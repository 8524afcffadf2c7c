"""spectral_filter's Triton kernel, built for GPUs that need not be here; its FFTs are long_conv's."""

import pytest

from aot import TARGETS, build
from bakeoff.ops.long_conv.plan import Plan
from bakeoff.ops.spectral_filter import kernels
from bakeoff.ops.spectral_filter.fft import TILE


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "how", [Plan(256, 1), Plan(8192, 1), Plan(16384, 4), Plan(16384, 4, alone=True)], ids=str
)
def test_the_weights_gradient(how, target):
    r1, r2, r3 = how.tuning.radices
    sizes = dict.fromkeys(("C", "K", "shares"), "i32")
    constants = {"T": how.total, "OUTER": how.outer, "MADE": how.made, "R1": r1, "R2": r2, "R3": r3, **TILE}
    built = build(kernels._fold, {"sums": "*fp32", "dw": "*fp32", **sizes}, constants, target, num_warps=4)
    assert built.spills == 0
