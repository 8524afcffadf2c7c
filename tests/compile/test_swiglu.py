"""Both swiglu kernels in every production configuration, built for GPUs that need not be here."""

from typing import Any

import pytest
import torch

from aot import TARGETS, Built, build
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.swiglu import kernels
from bakeoff.ops.swiglu.op import OP
from bakeoff.select import Case, TensorMeta

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
CASES = {case.name: case for case in OP.cases()}


def built(case: Case, way: str, target: str, without: str = "", **override: Any) -> Built:
    """The kernel as it is launched for `case`, forward or backward, `without` that gradient."""
    packed = case.up is None
    rows = case.gate.shape[0]
    features = case.gate.shape[1] // (1 + packed)
    strides = dict.fromkeys(("gate", "up"), case.gate.stride[0])
    if way == "backward":
        strides["dy"] = features
    _, constants = kernels.launch(
        rows, features, case.gate.dtype.itemsize, strides, packed=packed, lanes=TARGETS[target].warp_size
    )
    kernel = {"forward": kernels._forward, "backward": kernels._backward}[way]
    absent = {"up", "dup"} if packed else {without}
    tensors = [name for name in ("dy", "gate", "up", "y", "dgate", "dup") if name in kernel.arg_names]
    signature = {name: TYPES[case.gate.dtype] for name in tensors if name not in absent}
    signature |= {name: "i64" for name in kernel.arg_names if name.endswith("units")}
    constants = {name: value for name, value in constants.items() if name not in signature}
    constants |= {name: None for name in tensors if name in absent} | override
    warps = constants.pop("num_warps")
    return build(kernel, signature, constants, target, num_warps=warps)


@pytest.mark.kernel(of=lambda way, **_: way)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_no_spills_and_wide_accesses(name: str, way: str, target: str) -> None:
    """Every byte moves 16 at a time and once; values never go from thread to thread."""
    found = built(CASES[name], way, target)
    assert found.spills == 0
    assert found.shared == 0
    assert "convert_layout" not in found.ttgir
    if "1001x77" in name:  # rows start anywhere, and the total is odd: every element is its own access
        assert found.registers <= 128
        return
    assert found.registers <= 48
    read, written = {"forward": (2, 1), "backward": (3, 2)}[way]
    assert found.loads == {128: read}
    assert found.stores == {128: written}


def test_a_profile_says_which_op_a_kernel_is_of() -> None:
    TritonKernel(kernels._forward)
    found = built(CASES["8192x4096 bf16 halves"], "forward", "sm_90", num_warps=1)  # as no other test has it
    assert ".entry swiglu_forward(" in found.assembly


@pytest.mark.parametrize("without", ["dgate", "dup"])
def test_a_gradient_that_nobody_wants_costs_nothing(without: str) -> None:
    case = CASES["8192x4096 bf16 halves"]
    found = built(case, "backward", "sm_90", without)
    assert found.stores == {128: 1}
    assert found.loads == {128: 2 if without == "dgate" else 3}  # up is needed for dgate alone


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_narrow_strides_are_not_taken_for_wide_ones(way: str) -> None:
    """What is promised about strides decides the width: a false promise would read misaligned vectors."""
    packed = CASES["24576x1008 bf16 packed"]
    assert set(built(packed, way, "sm_90").loads) == {128}
    for stride, width in ((2 * 1008 + 4, 64), (2 * 1008 + 2, 32), (2 * 1008 + 1, 16)):
        gate = TensorMeta(packed.gate.shape, packed.gate.dtype, (stride, 1))
        assert width in built(packed.replace(gate=gate), way, "sm_90").loads
        assert 128 not in built(packed.replace(gate=gate), "forward", "sm_90").loads


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_rows_beyond_32_bits(way: str) -> None:
    """Rows of 2^31 elements and more: their columns take 64 bits, and the accesses stay wide."""
    gate = TensorMeta.dense((3, 2 << 31), torch.bfloat16)
    found = built(CASES["8192x4096 bf16 packed"].replace(gate=gate), way, "sm_90")
    assert set(found.loads) == set(found.stores) == {128}
    assert found.spills == 0
