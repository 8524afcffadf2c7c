"""Every memory_update kernel in every production configuration, compiled for GPUs that need not be here."""

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.kernels.precision import precision
from bakeoff.ops.memory_update import OP, kernels
from bakeoff.ops.memory_update.kernels import backward, forward, state

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
NARROW = {"k", "v", "z", "h", "e", "dy", "dh", "dz", "dh_bar", "z_bar", "e_bar", "u1", "u2", "dk", "dv"}
MATRICES = {"w1", "w2", "narrow1", "narrow2"}
NUMBERS = {
    "N": "i32", "k_units": "i32", "v_units": "i32", "tiles": "i32", "shares": "i32", "losses_each": "i32",
    "factor": "fp32", "max_norm": "fp32", "size1": "i64", "size2": "i64", "ok": "*i1", "skipped": "*i64",
}  # fmt: skip
OVER_ROWS = ["_hidden", "_error", "_hidden_slope", "_z_bar", "_e_bar", "_h_bar", "_k_bar"]
OVER_ALL = ["_gradient", "_memory_bar"]
SPILLS = {"_h_bar": 16, "_error": 48}
"""Bytes of local memory that a thread needs where tiles are large."""
ELEMENTWISE = ["_narrow", "_step", "_dots", "_spread", "_row_sums"]


def compiled(name, target, dtype=torch.bfloat16, *, absent=(), tiling=None, sizes=(512, 512, 512)):
    """The kernel called `name`, by default in the default tiling of a large case; `absent` are None."""
    kernel = next(getattr(room, name) for room in (forward, state, backward) if hasattr(room, name))
    D, H, V = sizes
    hip = target.startswith("gfx")
    tiling = tiling or kernels.tiling_for(8, 2048, D, H, V, dtype.itemsize, 132, hip)
    tile = tiling.over_all(D, H, V) if name in OVER_ALL else tiling.over_rows(D, H, V)
    if name == "_z_bar":
        tile["COLS"] = min(tile["COLS"], kernels.BENT)
    options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
    if name in ELEMENTWISE:
        options = {"num_warps": 4 if name == "_row_sums" else 8}
    constants = {
        "D": D, "H": H, "V": V, "K_ALIGN": 16, "V_ALIGN": 16, "BLOCK": kernels.BLOCK, "TILES": 4,
        "PRECISION": precision(dtype, hip=hip), **tile,
    }  # fmt: skip
    if name == "_row_sums":
        constants["BLOCK"] = 256
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    constants |= dict.fromkeys(absent)
    signature = {}
    for argument in kernel.arg_names:
        narrow = argument in NARROW or (argument in MATRICES and name not in ("_step", "_dots"))
        wide = (name in ELEMENTWISE and argument in ("w1", "w2")) or name == "_row_sums"
        if argument not in constants:
            signature[argument] = NUMBERS.get(argument) or (TYPES[dtype] if narrow and not wide else "*fp32")
    if name == "_row_sums":
        signature["N"] = "i64"
    return build(kernel, signature, constants, target, **options)


EVERY = [
    *[(name, torch.bfloat16) for name in (*OVER_ALL, *OVER_ROWS)],
    *[(name, torch.float32) for name in ("_gradient", "_h_bar")],
    *[
        pytest.param(name, torch.float32, marks=pytest.mark.exhaustive)
        for name in ("_memory_bar", "_hidden", "_error", "_hidden_slope", "_z_bar", "_e_bar", "_k_bar")
    ],
]


@pytest.mark.kernel(of=lambda name, **_: name in OVER_ALL)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=str)
def test_products_run_on_tensor_cores(name, target, dtype):
    built = compiled(name, target, dtype)
    assert built.spills <= SPILLS.get(name, 0)
    assert built.shared <= SHARED_LIMIT[target]
    instruction = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}[target]
    assert instruction in built.assembly or (dtype == torch.float32 and "mma.sync" in built.assembly)


@pytest.mark.kernel(of=lambda name: "")
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("target", TARGETS)
def test_elementwise_passes(name, target):
    built = compiled(name, target)
    room = 16 << 10 if (name, target) == ("_spread", "gfx942") else 8 << 10
    assert (built.spills, built.shared <= room) == (0, True)


def test_elementwise_passes_move_16_bytes_at_a_time():
    assert compiled("_step", "sm_90").loads.get(128, 0) >= 12
    assert compiled("_step", "sm_90").stores.get(128, 0) >= 8


@pytest.mark.parametrize(
    "name",
    [
        "_spread",
        *[pytest.param(n, marks=pytest.mark.exhaustive) for n in ("_dots", "_e_bar", "_error", "_h_bar")],
    ],
)
def test_what_is_absent(name):
    given = {
        "_dots": ("g", "s1_bar", "c1_bar", "s2_bar", "c2_bar"),
        "_spread": ("g", "norm_bar", "ds1", "dc1", "dlr", "u1", "v1", "u2", "v2"),
        "_e_bar": ("e", "weight", "weights", "loss_bar", "dv", "sums2"),
        "_error": ("e", "weight", "losses", "sums2"),
        "_h_bar": ("sums1",),
    }
    assert compiled(name, "sm_90", absent=given[name]).spills <= SPILLS.get(name, 0)


@pytest.mark.parametrize(
    "sizes", [(33, 77, 45), pytest.param((1, 1, 1), marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "_h_bar",
        "_gradient",
        *[pytest.param(n, marks=pytest.mark.exhaustive) for n in OVER_ROWS if n != "_h_bar"],
    ],
)
def test_odd_features(name, sizes):
    assert compiled(name, "sm_90", sizes=sizes).shared <= SHARED_LIMIT["sm_90"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", [*OVER_ROWS, *OVER_ALL])
def test_every_variant_fits(name, dtype):
    case = next(c for c in OP.cases() if c.k.dtype == (dtype if dtype.itemsize == 4 else torch.bfloat16))
    for tiling in kernels.tilings(case, 132):
        built = compiled(name, "sm_90", dtype, tiling=tiling)
        assert built.shared <= SHARED_LIMIT["sm_90"], tiling
