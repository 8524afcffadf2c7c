"""dilated_attention's kernels in their production configurations, built for GPUs that need not be here."""

import re
from typing import Any

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from aot import SHARED_LIMIT, Built, build
from bakeoff.ops.dilated_attention import kernels
from bakeoff.ops.dilated_attention.kernels import backward, forward, hopper
from bakeoff.ops.dilated_attention.kernels.hopper_tilings import (
    HopperTiling,
    hopper_tilings,
    registers,
    width_of,
)
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


def built_for_hopper(case: Any, tiling: HopperTiling, merge: bool, dtype: torch.dtype) -> Built:
    """The forward for Hopper as it is launched for a branch of `case`; `merge`: for a later branch."""
    of_kernel, of_workers, of_copier = registers(tiling.workers)
    width, name = width_of(case.q.shape[-1]), TYPES[dtype][1:]
    constants: dict[str, Any] = {
        "G": case.q.shape[2] // case.k.shape[2], "DTYPE": hopper.DTYPES[dtype], "CAUSAL": case.causal,
        "RAGGED": merge, "MERGE": merge, "EARLY": bool(tiling.early), "WIDTH": width,
        "WORKERS": tiling.workers, "BLOCK": tiling.keys, "STAGES": tiling.stages,
        "TURNS": bool(tiling.turns), "WORKER_REGISTERS": of_workers, "COPIER_REGISTERS": of_copier,
    }  # fmt: skip
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    tiles = {"q": 64, "k": tiling.keys, "v": tiling.keys, "y": 64}
    signature = {x: f"tensordesc<{name}[1, {rows}, 1, 1, {width}],{layout!r}>" for x, rows in tiles.items()}
    signature |= {"lse": "*fp32", "phases": "*i32", "scale": "fp32"}
    signature |= {x: "i32" for x in hopper._attend.arg_names if x not in signature and x not in constants}
    return build(hopper._attend, signature, constants, "sm_90", num_warps=4, maxnreg=of_kernel)


def check_hopper(built: Built) -> None:
    assert built.shared <= SHARED_LIMIT["sm_90"]
    assert built.spills <= 32
    for instruction in (
        "wgmma.mma_async",
        "cp.async.bulk.tensor.5d.shared",
        "cp.async.bulk.tensor.5d.global",
    ):
        assert instruction in built.assembly
    # A tile is given back after all four warps have read it: they meet between their wait and the arrival.
    waits = re.split(r"wgmma\.wait_group", built.assembly)[1:]
    assert waits
    for after in waits:
        before_arrival = after.partition("mbarrier.arrive")[0]
        assert "bar.sync" in before_arrival


LONG = CASES["1x131072x16x128"], CASES["1x131072x16x128 causal"]
SHORT = CASES["1x8192x16x64"], CASES["1x8192x16x64 causal"]


@pytest.mark.parametrize(
    ("case", "merge", "dtype"),
    [
        pytest.param(LONG[0], False, torch.bfloat16, marks=pytest.mark.exhaustive),
        (LONG[0], True, torch.float16),
        pytest.param(LONG[1], True, torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(SHORT[0], True, torch.bfloat16, marks=pytest.mark.exhaustive),
        (SHORT[1], False, torch.bfloat16),
        pytest.param(SHORT[1], False, torch.float16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_hopper_fits_the_chip(case: Any, merge: bool, dtype: torch.dtype) -> None:
    check_hopper(built_for_hopper(case, hopper_tilings(case)[0], merge, dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("case", [*LONG, *SHORT], ids=lambda case: case.name)
def test_every_tiling_for_hopper_fits_the_chip(
    case: Any, number: int, merge: bool, dtype: torch.dtype
) -> None:
    check_hopper(built_for_hopper(case, hopper_tilings(case)[number], merge, dtype))
