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
    "softcap": "fp32", "target": "*i64", "losses": "*fp32", "scale": "*fp32",
}  # fmt: skip
CASES = {case.name: case for case in OP.cases()}


def rows(case: Case, tiling: triton.Tiling, target: str) -> Built:
    constants: dict[str, Any] = {
        "V": case.weight.shape[0],
        "BLOCK": tiling.block,
        "SMOOTH": case.label_smoothing > 0,
        "CAP": case.softcap is not None,
        "GRADIENTS": case.needs_grad and case.reduction != "none",
    }
    signature = {"logits": TYPES[case.x.dtype], **NUMBERS}
    return build(kernels._rows, signature, constants, target, num_warps=tiling.warps)


@pytest.mark.kernel(of=lambda name, **_: CASES[name].weight.shape[0] <= 16384)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_16_bytes_at_a_time(name: str, further: bool, target: str) -> None:
    """In the default tiling, and in every further one that a contest may try, whatever number of classes."""
    case = CASES[name]
    tilings = [*{t[2:]: t for t in triton.tilings(case)}.values()]
    for tiling in tilings[1:] if further else tilings[:1]:
        found = rows(case, tiling, target)
        assert found.spills == 0
        if target == "sm_90":
            # The target, the first logit, the scale and, in parts of a warp's width, small vocabularies.
            wide = 128 if tiling.block * case.x.dtype.itemsize >= 512 * tiling.warps else 64
            assert max(found.loads) == wide
            if case.needs_grad and case.reduction != "none":
                assert max(found.stores) == wide


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("same", [True, False])
def test_gradients_are_scaled_16_bytes_at_a_time(same: bool, target: str) -> None:
    signature = {"kept": "*bf16", "dloss": "*fp32", "factor": "*fp32", "out": "*bf16", "N": "i64"}
    found = build(kernels._multiply, signature, {"BLOCK": 2048, "SAME": same}, target, num_warps=4)
    assert found.spills == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mean", [True, False])
def test_losses_are_added_up_in_registers(mean: bool, target: str) -> None:
    signature = {
        "losses": "*fp32", "target": "*i64", "loss": "*fp32", "factor": "*fp32", "ignore_index": "i64",
        "share": "fp32", "N": "i64",
    }  # fmt: skip
    constants = {"MEAN": mean, "FACTOR": True, "BLOCK": triton._FINISH}
    assert build(kernels._finish, signature, constants, target, num_warps=8).spills == 0
