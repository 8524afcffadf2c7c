"""short_conv's kernels in production configurations, built for GPUs that need not be here."""

from typing import Any

import pytest
import torch

from aot import TARGETS, Built, build
from bakeoff.ops.short_conv import kernels, tilings
from bakeoff.ops.short_conv.op import OP
from bakeoff.select import Case

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
CASES = {case.name: case for case in OP.cases()}
SOME = (
    "16x2048x2048 W4",
    "8 taps",
    "no activation",
    "fp32",
    "fp32 weight",
    "packed, with state",
    "decode",
    "odd",
)
FEW = ("16x2048x2048 W4", "packed, with state", "decode")
_SMS = 132


def built(case: Case, way: str, target: str) -> Built:
    """The kernel as it is launched for `case`, in its default tiling."""
    (B, T, C), W, itemsize = case.x.shape, case.weight.shape[1], case.x.dtype.itemsize
    packed = case.cu_seqlens is not None
    items = case.cu_seqlens.shape[0] - 1 if packed else B
    strides = {"x_b": T * C, "x_t": C}
    of_x, of_weight = TYPES[case.x.dtype], TYPES[case.weight.dtype]
    table = {"cu_seqlens": "*i32", "table": "*i32"} if packed else {}
    given = {"x": of_x, "weight": of_weight, **table}
    given |= {
        name: kind for name, kind in (("bias", of_weight), ("state", of_x)) if case.args[name] is not None
    }
    if way == "forward":
        _, numbers = tilings.forward_launch((B, T, C), W, itemsize, items, strides, _SMS, None)
        given |= {"y": of_x, "end": of_x}
    else:
        strides |= {"dy_b": T * C, "dy_t": C}
        _, _, numbers = tilings.backward_launch((B, T, C), W, itemsize, strides, _SMS, None)
        given |= {"dy": of_x, "dx": of_x, "partial": "*fp32"}
        given |= {"dend": of_x} if case.state is not None else {}
    kernel = {"forward": kernels._forward, "backward": kernels._backward}[way]
    constants: dict[str, Any] = {
        name: None for name in kernel.arg_names if name not in {*given, *numbers, "SILU"}
    }
    signature = {name: kind for name, kind in given.items() if name in kernel.arg_names}
    for parameter in kernel.params:
        if parameter.name in numbers:
            if parameter.is_constexpr:
                constants[parameter.name] = numbers[parameter.name]
            else:
                signature[parameter.name] = "i64" if parameter.name.endswith("units") else "i32"
    constants["SILU"] = case.activation == "silu"
    return build(kernel, signature, constants, target, num_warps=numbers["num_warps"])


@pytest.mark.kernel(of=lambda way, **_: way)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.exhaustive]) for name in SOME]
)
def test_no_spills_and_wide_accesses(name: str, way: str, target: str) -> None:
    """Inputs of rows are asked for AHEAD at a time, and what came before stays in registers."""
    found = built(CASES[name], way, target)
    assert found.spills == 0
    if target == "sm_90" and name == "16x2048x2048 W4":
        width, ahead, before = {"forward": (128, 8, 3), "backward": (64, 4, 6)}[way]
        # Inputs (and dy, of which three positions are the next walker's), beside the filter and the bias.
        least = ahead + before if way == "forward" else 2 * ahead + before + 3
        assert found.loads[width] in (least, least + 1)
        assert found.stores[width] in (ahead, ahead + 1)
