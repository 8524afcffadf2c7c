"""fp8_linear's quantisation kernels, built for GPUs that need not be here; sm_80 has no products of FP8."""

import re

import pytest

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.fp8_linear import triton as room
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2, LARGEST

FP8 = [name for name in TARGETS if name in ("sm_90", "sm_100")]
TYPES = {E4M3: "fp8e4nv", E5M2: "fp8e5"}


@pytest.mark.kernel(of=lambda K, kind: (K > 16384, kind))
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("kind", TYPES, ids=TYPES.values())
@pytest.mark.parametrize("K", [16, 333, 1024, 4096, 5120, 14336, 16384, 28672])
def test_quantisation(K: int, kind: object, target: str) -> None:
    kernel, _, numbers = room.launch(8192, K, K, 2)
    constants = {**numbers, "LARGEST": LARGEST[kind], "ROUND": False}  # type: ignore[index]
    signature = {"x": "*bf16", "q": f"*{TYPES[kind]}", "scale": "*fp32", "N": "i64", "x_units": "i64"}  # type: ignore[index]
    function = kernel.function
    signature = {name: text for name, text in signature.items() if name in function.arg_names}
    own = {name: value for name, value in constants.items() if name in kernel.constexprs}
    built = build(function, signature, own, target, num_warps=numbers["num_warps"])
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    assert "div.rn.f32" in built.assembly
    assert "div.full.f32" not in built.assembly
    assert ".ftz" not in built.assembly
    assert f"cvt.rn.satfinite.{'e4m3' if kind is E4M3 else 'e5m2'}x2.f32" in built.assembly
    if K % 16 == 0 and K > 1024:
        assert re.search(r"ld\.global\S*\.v4\.b32", built.assembly), "no 16-byte load"
        assert re.search(r"st\.global\S*\.v[24]\.b32", built.assembly), "no 8-byte store"
