"""dilated_attention's kernels in their production configurations, built for GPUs that need not be here."""

from typing import Any

import pytest
import torch

from aot import SHARED_LIMIT, Built, build
from bakeoff.ops.dilated_attention import kernels
from bakeoff.ops.dilated_attention.kernels import backward, forward
from bakeoff.ops.dilated_attention.op import OP

CASES = {case.name: case for case in OP.cases()}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
KERNELS = {"forward": forward._forward, "queries": backward._queries, "keys": backward._keys_and_values}


def built(case: Any, way: str, target: str, tiling: Any) -> Built:
    """The kernel as it is launched for `case`."""
    kernel, D = KERNELS[way], case.q.shape[-1]
    letter = "" if way == "forward" else f"{way[0]}_"
    constants: dict[str, Any] = {
        "G": case.q.shape[2] // case.k.shape[2], "BRANCHES": case.rates.count(",") + 1, "CAUSAL": case.causal,
        "D": D, "WIDTH": kernels.width_of(D), "ALIGN": 16 if D % 16 == 0 else 8,
        "PRECISION": "ieee" if case.q.dtype == torch.float32 else "tf32",
        "BLOCK_M": getattr(tiling, f"{letter}rows"), "BLOCK_N": getattr(tiling, f"{letter}keys"),
        "STAGES": getattr(tiling, f"{letter}stages"), "MERGE": False,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "y", "dy", "dq", "dk", "dv"), TYPES[case.q.dtype])
    types |= dict.fromkeys(("lse", "delta"), "*fp32")
    types |= dict.fromkeys(("intervals", "branches", "phases"), "*i32") | {"scale": "fp32", "plane": "i64"}
    types |= dict.fromkeys(("CLASSES", "BLOCKS", "TILES", "H", "T", "branch"), "i32")
    signature = {name: types.get(name, "i64") for name in kernel.arg_names if name not in constants}
    return build(kernel, signature, constants, target, num_warps=getattr(tiling, f"{letter}warps"))


def default(case: Any, way: str, target: str) -> Any:
    if way != "forward":
        return kernels.backward_tilings(case)[0]
    return kernels.forward_tilings(case, 2 if target == "gfx942" else 4)[0]


@pytest.mark.kernel(of=lambda way, **_: f"_{way}")
@pytest.mark.parametrize("target", ["sm_90"])
@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("name", ["1x8192x16x64", "1x131072x16x128"])
def test_tensor_cores_with_few_spills(name: str, way: str, target: str) -> None:
    found = built(CASES[name], way, target, default(CASES[name], way, target))
    assert found.shared <= SHARED_LIMIT[target]
    assert ("wgmma" if target == "sm_90" else "mma.sync") in found.assembly
    assert found.spills <= (64 if way == "forward" else 200)  # faster than smaller tiles that spill nothing


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_every_case_builds_everywhere(name: str, way: str, target: str) -> None:
    found = built(CASES[name], way, target, default(CASES[name], way, target))
    assert found.shared <= SHARED_LIMIT[target]
