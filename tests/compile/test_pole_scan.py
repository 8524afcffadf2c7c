"""Every pole_scan kernel in every production configuration, compiled for GPUs that need not be here."""

import re

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.pole_scan import kernels
from bakeoff.ops.pole_scan.kernels import backward, edges, forward, poles

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POLES = [1, 4, 8, 16]
ROOMS = (poles, edges, forward, backward)


def compiled(name, K, target, dtype=torch.bfloat16, *, absent=(), C=768, tiling=None, **constants):
    """The kernel called `name` with K poles, by default in its default tiling; `absent` arguments are
    None."""
    kernel = next(getattr(room, name) for room in ROOMS if hasattr(room, name))
    lanes = TARGETS[target].warp_size
    tilings = kernels.backward_tilings if name.startswith("_backward") else kernels.forward_tilings
    tiling = tiling or tilings(C, K, lanes)[0]
    constants = {
        "KP": kernels.padded(K),
        "UNROLL": tiling.unroll,
        "BLOCK": lanes * tiling.warps,
        "GROUP": tiling.grad_group if name == "_backward_poles" else tiling.group,
        **constants,
    }
    warps = constants.pop("num_warps", tiling.warps)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    constants |= dict.fromkeys(absent)
    data = {"u", "y", "x", "dy", "du"}
    integers = {"T", "C", "K", "G", "FIRST", "L", "LAST", "B", "CHUNKS", "SHARES"} | {
        f"{x}_{d}" for x in data for d in "bt"
    }
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in integers:
            signature[argument] = "i64"
        elif argument in ("powers", "partial"):
            signature[argument] = "*fp64"
        else:
            signature[argument] = TYPES[dtype] if argument in data else "*fp32"
    return build(kernel, signature, constants, target, num_warps=warps)


WALKS = [
    ("_forward", {}),
    ("_backward_input", {}),
    ("_backward_poles", {}),
    ("_local", {"REVERSED": False}),
    ("_local", {"REVERSED": True}),
]


def spills(name, constants):
    """Bytes of local memory that a thread needs, two registers: eight poles walked backwards."""
    return 8 if name == "_local" and constants["REVERSED"] else 0


@pytest.mark.kernel(of=lambda name, constants, **_: (name, str(constants)))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("K", [8, 16])
@pytest.mark.parametrize(("name", "constants"), WALKS, ids=str)
def test_walks_stay_in_registers(name, constants, K, target):
    """No spills, and nothing crosses threads: all of a channel's poles are in one."""
    built = compiled(name, K, target, **constants)
    assert built.spills <= spills(name, constants)
    assert built.shared == 0
    assert "tt.reduce" not in built.ttgir or not re.search(r"shfl|ds_bpermute|ds_swizzle|dpp", built.assembly)


@pytest.mark.parametrize(
    ("K", "some"),
    [(8, slice(1, 2)), *(pytest.param(K, slice(None), marks=pytest.mark.exhaustive) for K in (8, 16))],
    ids=str,
)
@pytest.mark.parametrize(("name", "constants"), WALKS, ids=str)
def test_walks_of_every_variant_stay_in_registers(name, constants, K, some):
    tilings = kernels.backward_tilings if name.startswith("_backward") else kernels.forward_tilings
    for tiling in tilings(768, K, 32)[some]:
        built = compiled(name, K, "sm_90", tiling=tiling, **constants)
        assert built.spills <= spills(name, constants), tiling
        assert built.shared == 0


@pytest.mark.parametrize(
    ("K", "dtype"),
    [
        pytest.param(K, dtype, marks=[] if dtype == torch.bfloat16 or K == 8 else [pytest.mark.exhaustive])
        for K in POLES
        for dtype in TYPES
    ],
    ids=str,
)
def test_work_is_what_the_definition_needs(K, dtype):
    """7 K FMAs a position, not 9 K: sums of products are contracted."""
    built = compiled("_forward", K, "sm_90", dtype)
    poles, unroll = kernels.padded(K), kernels.forward_tilings(768, K, 32)[0].unroll
    floating = len(re.findall(r"(?:fma\.rn|mul|add|sub)\.f32", built.assembly))
    assert floating <= (7 * poles + 10) * (unroll + 1)
    assert built.spills == 0


@pytest.mark.kernel(of=lambda name, constants: (name, str(constants)))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("_prepare", {"BLOCK": 128, "num_warps": 4}),
        ("_carry", {"BLOCK": 64, "AHEAD": 8, "REVERSED": False, "num_warps": 2}),
        ("_carry", {"BLOCK": 64, "AHEAD": 8, "REVERSED": True, "num_warps": 2}),
        ("_carry", {"BLOCK": 64, "AHEAD": 8, "REVERSED": True, "num_warps": 2, "absent": ("state", "end")}),
        ("_finish", {"BLOCK": 64, "AHEAD": 8, "num_warps": 2}),
        ("_finish", {"BLOCK": 64, "AHEAD": 8, "num_warps": 2, "absent": ("dtheta", "dcoef")}),
        ("_step", {"BLOCK": 32, "ITEMS": 4, "num_warps": 4}),
        ("_step", {"BLOCK": 32, "ITEMS": 4, "num_warps": 4, "absent": ("state",)}),
    ],
    ids=str,
)  # fmt: skip
def test_the_rest_builds(name, constants, target):
    built = compiled(name, 8, target, **constants)
    # sin and cos of a large float64 keep a table of 2 / pi on the stack.
    assert built.spills <= (64 if name in ("_prepare", "_step") else 0)
    assert built.shared <= min(SHARED_LIMIT[target], 8 << 10)


@pytest.mark.parametrize(
    "name",
    [
        "_forward",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("_backward_input", "_backward_poles")),
    ],
)
@pytest.mark.parametrize("C", [1, *(pytest.param(C, marks=pytest.mark.exhaustive) for C in (40, 100))])
def test_few_channels(name, C):
    built = compiled(name, 5, "sm_90", C=C)
    assert (built.spills, built.shared) == (0, 0)
