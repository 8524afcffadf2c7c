"""attention's kernels for decoding as they are launched, built for GPUs that need not be here."""

import re
from typing import Any

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.attention import kernels
from bakeoff.ops.attention.op import OP, decode_supports

CASES = {case.name: case for case in OP.cases() if not decode_supports(case)}
SPILLS = {("decode 8 queries, window", "sm_80", kernels.Tiling(64, 16, 4, 1)): 8}
"""Bytes of local memory that a thread needs; no default is among these."""
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def common(case: Any) -> tuple[dict[str, Any], dict[str, str]]:
    D = case.q.shape[-1]
    constants = {"CAUSAL": case.causal, "D": D, "WIDTH": kernels.width_of(D)}
    types = dict.fromkeys(("q", "k", "v", "y"), TYPES[case.q.dtype]) | {"lengths": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("sums", "levels"), "*fp32")
    types |= dict.fromkeys(("T", "S", "H", "KEYS", "PARTS", "window"), "i32")
    return constants, types


def parts(case: Any, target: str, tiling: Any, *, split: bool = True) -> Built:
    """The first kernel as it is launched for `case`."""
    constants, types = common(case)
    (_, T, H, D), K = case.q.shape, case.k.shape[2]
    constants |= {
        "G": H // K, "SPLIT": split, "ALIGN": 16 if D % 16 == 0 else 8, "ROWS": kernels.rows_of(T, H // K),
        "BLOCK": tiling.keys, "STAGES": tiling.stages,
        "PRECISION": "ieee" if case.q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    if not split:
        constants |= {"sums": None, "levels": None}
    signature = {n: types.get(n, "i64") for n in kernels._parts.arg_names if n not in constants}
    return build(kernels._parts, signature, constants, target, num_warps=tiling.warps)


@pytest.mark.kernel(of=lambda **_: "_parts")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_parts_build_without_spills(name: str, target: str) -> None:
    case = CASES[name]
    found = parts(case, target, kernels.tilings(case)[0])
    assert found.shared <= SHARED_LIMIT[target]
    assert found.spills == 0
    if case.q.dtype != torch.float32 and target.startswith("sm_"):
        assert "mma" in found.assembly
        sizes = re.findall(r"cp\.async\.\w+\.shared\.global[^;]*, (\w+)", found.assembly)
        assert set(sizes) == {"0x10"}  # bytes: keys and values come 16 at a time


@pytest.mark.kernel(of=lambda **_: "_parts_alone")
@pytest.mark.parametrize("target", TARGETS)
def test_one_part_builds_without_spills(target: str) -> None:
    case = CASES["decode 64x1024x8x48"]
    found = parts(case, target, kernels.tilings(case)[0], split=False)
    assert found.spills == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_tiling_builds(name: str, target: str) -> None:
    for tiling in kernels.tilings(CASES[name]):
        found = parts(CASES[name], target, tiling)
        assert found.spills <= SPILLS.get((name, target, tiling), 0)
        assert found.shared <= SHARED_LIMIT[target] or tiling.stages > 2


@pytest.mark.kernel(of=lambda **_: "_join")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["decode 1x1024x8x48", "decode 1x8192x32/8x128"])
def test_join_builds_without_spills(name: str, target: str) -> None:
    constants, types = common(CASES[name])
    constants |= {"JOINED": kernels._JOINED}
    signature = {n: types[n] for n in kernels._join.arg_names if n not in constants}
    warps = 4 if constants["WIDTH"] > 64 else 2
    found = build(kernels._join, signature, constants, target, num_warps=warps)
    assert found.spills <= 8
    assert found.shared <= SHARED_LIMIT[target]
