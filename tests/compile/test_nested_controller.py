"""The kernel of a nested optimizer's controller compiles everywhere without spilling."""

import pytest

from aot import TARGETS, build
from bakeoff.optim import kernels


@pytest.mark.parametrize("target", TARGETS)
def test_advance(target: str) -> None:
    kernel = kernels._advance
    numbers = ("log_ratio", "rate", "inner", "margin", "pull", "decay", "wait")
    sizes = {"GROUPS": 4, "HIDDEN": 16, "G": 4, "H": 16}
    pointers = [name for name in kernel.arg_names if name not in (*numbers, *sizes)]
    types = {**dict.fromkeys(pointers, "*fp32"), **dict.fromkeys(numbers, "fp32")}
    built = build(kernel, types, sizes, target, num_warps=4)
    assert built.spills == 0
