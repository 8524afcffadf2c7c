"""Every kernel of memory_scan's large chunks in production configurations, compiled for absent GPUs."""

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.kernels.precision import precision
from bakeoff.ops.memory_scan.large import kernels
from bakeoff.ops.memory_scan.large.kernels import rows, state, sums, weights

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
WHOLE = {"G", "T", "C", "c", "first", "b", "chunk", "tiles", "programs"}
TOKENS = {
    "q", "k", "x", "z", "zq", "h", "hq", "v", "o", "e", "dh", "weighted", "do", "dv", "dh_bar", "zq_bar",
    "z_bar", "dz",
    "narrow1", "narrow2",
}  # fmt: skip
ROOMS = {name: room for room in (rows, sums, state, weights) for name in room.__all__}
PRODUCTS = (*rows.__all__, *sums.__all__)
BACKWARD = ("_from_slopes", "_from_errors", "_from_queries", "_to_hidden", "_to_keys", "_arrived")
SPILLS = {
    "_learn": 320, "_from_queries": 272, "_slopes": 248, "_from_slopes": 216, "_from_errors": 152,
    "_to_hidden": 112, "_arrived": 88, "_errors": 80, "_to_keys": 32, "_hidden": 16,
}  # fmt: skip
"""Bytes of local memory that a thread needs where two programs share a multiprocessor or two sums are
held."""
KINDS = {"_from_slopes": "slope", **dict.fromkeys(("_from_errors", "_to_hidden", "_to_keys"), "pair")}


def compiled(name, target, *, D=512, H=512, dtype=torch.bfloat16, whole=False, tiling=None):
    kernel, room = getattr(ROOMS[name], name), ROOMS[name]
    hip = target.startswith("gfx")
    axis = "backward" if name in BACKWARD else "forward"
    tiling = tiling or kernels.tiling_for(axis, 8192, H, dtype.itemsize, 132, hip)
    tile = {"COLS": kernels.NARROW, "BLOCK": kernels.BLOCK, "SCAN": kernels.SCAN, "num_warps": 8}
    if name in PRODUCTS:
        tile = tiling.over_all(D, H) if room is sums else tiling.over_rows(KINDS.get(name, "single"), D, H)
    options = {
        option: tile.pop(option) for option in ("num_warps", "num_stages", "maxnreg") if option in tile
    }
    constants = {
        "D": D, "H": H, "V": D, "PART": 8, "PARTS": 16, "WHOLE": whole,
        "PRECISION": precision(dtype, hip=hip), **tile,
    }  # fmt: skip
    absent = (
        {"_learn": ("w1", "w2"), "_arriving": ("w1_bar", "w2_bar")}.get(name, ()) if whole else ("beta_bar",)
    )
    constants |= dict.fromkeys(absent)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    narrow = TOKENS | ({"w1", "w2"} if room is rows else set())
    signature = {
        key: "i64" if key in WHOLE else TYPES[dtype] if key in narrow else "*fp32"
        for key in kernel.arg_names
        if key not in constants
    }
    return build(kernel, signature, constants, target, **options)


@pytest.mark.kernel(of=lambda name: name)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROOMS)
def test_kernels_fit(name, target):
    built = compiled(name, target)
    assert built.spills <= SPILLS.get(name, 0)
    assert built.shared <= SHARED_LIMIT[target]
    if name in PRODUCTS:
        instruction = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}[target]
        assert instruction in built.assembly


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("form", [{"dtype": torch.float32}, {"D": 96, "H": 160}, {"whole": True}], ids=str)
def test_other_forms_fit(form, name, target):
    built = compiled(name, target, **form)
    assert built.spills <= SPILLS.get(name, 0)
    assert built.shared <= SHARED_LIMIT[target]
