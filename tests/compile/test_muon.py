"""muon_'s kernels in production configurations, built for GPUs that need not be here."""

from typing import Any

import pytest
import triton.language as tl

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.muon import kernels, triton
from bakeoff.ops.muon.kernels import Tiling, tilings

TYPES = {
    "table": "*i64", "partial": "*fp32", "scales": "*fp32", "clip_coef": "*fp32", "found_inf": "*fp32",
    "grad_scale": "*fp32", "lr_at": "*fp32", "lr_mult": "*fp32", "N": "i64", "P": "i32",
    "R": "i32", "C": "i32", "MT": "i32", "KT": "i32", "decay": "fp32", "sign": "fp32", "alpha": "fp32",
    "beta": "fp32", "eps": "fp32", "lr": "fp64", "weight_decay": "fp64", "size": "fp64",
}  # fmt: skip


def built(name: str, constants: dict[str, Any], target: str, **options: int) -> Built:
    kernel = getattr(kernels, name)
    signature = {n: TYPES.get(n, "*bf16") for n in kernel.arg_names if n not in constants}
    if name == "_measure":
        signature["N"] = "i32"
    found = build(kernel, signature, constants, target, **options)
    assert found.spills == 0
    assert found.shared <= SHARED_LIMIT[target]
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("units", [16, 1])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("kind", [tl.float32, tl.bfloat16], ids=str)
def test_kernels_over_elements(kind: Any, tall: bool, units: int, target: str) -> None:
    """Rows that are aligned are read and written 16 bytes at a time."""
    cut = {"TALL": tall, "UNITS": units, "BLOCK": triton.BLOCK}
    momentum = built(
        "_momentum", {"GRAD": kind, "STATE": tl.float32, "NESTEROV": True, **cut}, target, num_warps=8
    )
    move = built("_move", {"PARAM": kind, **cut}, target, num_warps=8)
    if units == 16 and target.startswith("sm_"):
        assert momentum.loads.get(128, 0) >= 2
        assert momentum.stores.get(128, 0) >= 2
        assert move.stores.get(128, 0) >= 1


@pytest.mark.parametrize("target", TARGETS)
def test_norms_are_added_up(target: str) -> None:
    built("_measure", {"BLOCK": triton.SUM_BLOCK}, target, num_warps=4)


def products(target: str, tiling: Tiling) -> list[Built]:
    """Both kinds of symmetric products, and the other one in the first iteration."""
    square = {"TILE": tiling.tile, "DEPTH": tiling.depth}
    how = {"num_warps": tiling.tile_warps, "num_stages": tiling.stages}
    whole = {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth}
    return [
        built("_symmetric", {"add": None, **square}, target, **how),
        built("_symmetric", {"scales": None, **square}, target, **how),
        built("_apply", whole, target, num_warps=tiling.warps, num_stages=tiling.stages),
    ]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [768, 64])
def test_products(rows: int, target: str) -> None:
    """By default: on tensor cores, in as large instructions as the GPU has."""
    instruction = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}[target]
    for found in products(target, tilings(rows, target == "gfx942")[0]):
        assert instruction in found.assembly


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiling", tilings(768, False)[1:], ids=str)
def test_other_tilings(tiling: Tiling) -> None:
    products("sm_90", tiling)
