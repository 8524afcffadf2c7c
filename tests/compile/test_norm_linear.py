"""norm_linear's kernels in production configurations, built for GPUs that need not be here."""

import pytest

from aot import TARGETS, Built, build
from bakeoff.ops.norm_linear import kernels, triton

NUMBERS = {"N": "i64", "P": "i32", "x_units": "i64", "eps": "fp32"}
FLOATS = ("partial",)


def built(name: str, constants: dict[str, int], target: str, **options: int) -> Built:
    kernel = getattr(kernels, name)
    given = {"LAYER": True, "ALIGN": 8, **constants}
    constexprs = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    signature = {
        name: NUMBERS.get(name, "*fp32" if name in FLOATS else "*bf16")
        for name in kernel.arg_names
        if name not in constexprs
    }
    return build(kernel, signature, constexprs, target, **options)


@pytest.mark.kernel(of=lambda name, **_: name)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["_normalize", "_backward"])
@pytest.mark.parametrize("K", [512, 4096, 333])
def test_kernels_over_rows(K: int, name: str, target: str) -> None:
    """Each row's values are read once, 16 bytes at a time where rows are so aligned."""
    cut = triton._whole_rows(8192, K)
    warps = cut.pop("num_warps")
    found = built(name, {"K": K, "ALIGN": 8 if K % 8 == 0 else 1, **cut}, target, num_warps=warps)
    assert found.spills == 0
    if K % 8 == 0 and target == "sm_90":
        assert max(found.loads) == 128
