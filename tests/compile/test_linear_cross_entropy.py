"""linear_cross_entropy's kernels in production configurations, built for GPUs that need not be here."""

from typing import Any

import pytest
import torch

from aot import TARGETS, Built, build
from bakeoff.ops.linear_cross_entropy import kernels, triton
from bakeoff.ops.linear_cross_entropy.op import OP
from bakeoff.select import Case

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
NUMBERS = {
    "row_units": "i64", "scale_step": "i64", "ignore_index": "i64", "smoothing": "fp32", "z_loss": "fp32",
    "softcap": "fp32", "N": "i64", "begin": "i64", "even": "fp32", "rest": "fp32", "target": "*i64",
    **dict.fromkeys(("losses", "scale", "state", "mosts", "weights", "factors", "factor"), "*fp32"),
}  # fmt: skip
CASES = {case.name: case for case in OP.cases()}


def compiled(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], target: str, warps: int) -> Built:
    signature = {name: kind for name, kind in NUMBERS.items() if name in kernel.arg_names}
    signature |= {
        name: TYPES[dtype]
        for name in ("x", "weight", "bias", "logits", "grads", "out")
        if name in kernel.arg_names
    }
    return build(kernel, signature, constants, target, num_warps=warps)


def rows(case: Case, tiling: triton.Tiling, target: str, V: int | None = None) -> Built:
    V = V or case.weight.shape[0]
    constants: dict[str, Any] = {
        "V": V,
        "BLOCK": tiling.block,
        "SMOOTH": case.label_smoothing > 0,
        "CAP": case.softcap is not None,
        "GRADIENTS": case.needs_grad and case.reduction != "none",
    }
    if tiling.tile:
        constants |= {
            "D": case.x.shape[-1], "ROWS": tiling.tile, "DEPTH": 64, "BIAS": case.bias is not None,
            "TOGETHER": case.reduction != "none",
        }  # fmt: skip
        return compiled(kernels._product_and_rows, case.x.dtype, constants, target, tiling.warps)
    if tiling.block >= V:
        constants |= {"ROWS": tiling.each, "TOGETHER": case.reduction != "none"}
        return compiled(kernels._short, case.x.dtype, constants, target, tiling.warps)
    constants["TAIL"] = triton._tail(V, tiling.block)
    return compiled(kernels._long, case.x.dtype, constants, target, tiling.warps)


@pytest.mark.kernel(of=lambda name, **_: CASES[name].weight.shape[0] <= 16384)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_16_bytes_at_a_time(name: str, further: bool, target: str) -> None:
    """In the default tiling, and in every further one that a contest may try, whatever number of classes."""
    case = CASES[name]
    tilings = [*{(*t[2:5], t.tile): t for t in triton.tilings(case)}.values()]
    for tiling in tilings[1:] if further else tilings[:1]:
        found = rows(case, tiling, target)
        assert found.spills == 0
        if target == "sm_90":
            assert tiling.tile or max(found.loads) == 128  # what is multiplied comes another way
            if case.needs_grad and case.reduction != "none":
                assert max(found.stores) == 128


@pytest.mark.parametrize("V", [50257, 50256, 131072, 256])
def test_no_access_of_whole_tiles_is_narrower(V: int) -> None:
    """Apart from a row's numbers, and from the 8 bytes a thread of a tail of 2,048 classes."""
    case = CASES["4096x768->50257 bf16"]
    found = rows(case, triton.default(4096, V, 768, torch.bfloat16), "sm_90", V)
    tail = {64} if V > triton._WHOLE and V % triton._TILE else set()
    # The target is 64 bits, and a loss 32; of long rows one logit is loaded alone.
    assert set(found.loads) <= {128, 64, 32, 16}
    assert found.loads.get(16, 0) <= (V > triton._WHOLE)
    assert set(found.stores) <= {128, 32} | tail


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("V", "block"), [(8192, 8192), (1105, 2048)])
def test_blocks_of_classes_are_read_16_bytes_at_a_time(V: int, block: int, smooth: bool, target: str) -> None:
    """A whole block of the largest case, and what 8,192 leave of 50,257."""
    constants = {"V": V, "BLOCK": block, "TAIL": triton._tail(V, block), "SMOOTH": smooth, "CAP": smooth}
    first = compiled(kernels._part, torch.bfloat16, {**constants, "FIRST": smooth}, target, block // 512)
    second = compiled(kernels._part_slopes, torch.bfloat16, constants, target, block // 512)
    assert first.spills == second.spills == 0
    if target == "sm_90":
        assert max(first.loads) == max(second.loads) == max(second.stores) == 128


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("same", [True, False])
def test_gradients_are_scaled_16_bytes_at_a_time(same: bool, target: str) -> None:
    signature = dict.fromkeys(("of_x", "of_weight", "dx", "dweight", "dbias"), "*bf16")
    signature |= dict.fromkeys(("of_bias", "dloss", "factor"), "*fp32") | dict.fromkeys("XWB", "i64")
    constants = {"BLOCK": triton._MULTIPLY, "SCALED": same, "SAME_X": same, "SAME_W": same}
    found = build(kernels._multiply, signature, constants, target, num_warps=4)
    assert found.spills == 0
    if target == "sm_90":
        assert max(found.loads) == max(found.stores) == 128


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("V", "D"), [(256, 384), (777, 333)])
def test_gradients_of_x_are_written_without_spills(V: int, D: int, target: str) -> None:
    constants = {"V": V, "D": D, "ROWS": 128, "COLS": 128, "DEPTH": 64, "SCALED": True}
    found = compiled(kernels._to_rows, torch.bfloat16, constants, target, 8)
    assert found.spills == 0
    if target == "sm_90" and D % 8 == 0:
        assert max(found.stores) == 128


@pytest.mark.parametrize("target", TARGETS)
def test_losses_are_added_up_and_targets_counted_in_registers(target: str) -> None:
    signature = {"losses": "*fp32", "numbers": "*fp32", "loss": "*fp32", "N": "i64"}
    found = build(kernels._finish, signature, {"BLOCK": triton._FINISH}, target, num_warps=8)
    signature = {
        "target": "*i64", "numbers": "*fp32", "factor": "*fp32", "ignore_index": "i64", "share": "fp32",
        "N": "i64",
    }  # fmt: skip
    constants = {"MEAN": True, "FACTOR": True, "BLOCK": triton._COUNT}
    counted = build(kernels._begin, signature, constants, target, num_warps=32)
    assert found.spills == counted.spills == 0
