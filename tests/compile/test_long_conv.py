"""Every long_conv kernel in its production tilings, built for GPUs that need not be here."""

import re

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.long_conv.kernels import pack, toeplitz

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
TABLES = {"inner", "outer", "dh", "dskip", "skip", "h"}
SIZES = {"LAGS", "ONE", "TILES", "W8"}


def compiled(kernel, dtype, target, constants, **options) -> Built:
    """`kernel` with data of `dtype`, float32 filters and sums."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        size = name in SIZES or len(name) == 1 and name.isupper() or re.search(r"_[btcl]8?$", name)
        if name == "ONE":
            signature[name] = "fp32"
        elif size:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in TABLES else TYPES[dtype]
    return build(kernel, signature, constants, target, **options)


def convolution(columns, dtype, target, *, backwards=False, parts=1) -> Built:
    how = toeplitz.convolving(columns, dtype, target == "gfx942")
    return compiled(
        toeplitz._convolve,
        dtype,
        target,
        {
            "BACKWARDS": backwards, "PARTS": parts, "COLUMNS": how.columns, "DEEP": how.deep,
            "BLOCK": toeplitz.BLOCK, "COPIES": toeplitz.COPIES, "PRECISION": how.precision,
        },
        num_warps=how.warps,
        num_stages=how.stages,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [16, 64, 512])
@pytest.mark.parametrize("backwards", [False, True])
def test_products_run_on_tensor_cores_from_wide_loads(columns, target, backwards):
    built = convolution(columns, torch.bfloat16, target, backwards=backwards)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    assert MATRIX[target] in built.assembly
    if target.startswith("sm_"):
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (0x\w+|\d+),", built.assembly)
        assert copies
        assert all(int(size, 0) == 16 for size in copies)  # every row of a Toeplitz matrix, too
        assert set(built.stores) == {128}


@pytest.mark.parametrize("target", TARGETS)
def test_filters_of_a_wider_dtype(target):
    built = convolution(512, torch.bfloat16, target, parts=2)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", TARGETS)
def test_float32(target):
    built = convolution(512, torch.float32, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_filters_gradient(target, dtype):
    how = toeplitz.correlating(dtype, target == "gfx942")
    constants = {"PIECE": how.piece, "WIDE": how.wide, "DEEP": how.deep, "PRECISION": how.precision}
    built = compiled(
        toeplitz._correlate, dtype, target, constants, num_warps=how.warps, num_stages=how.stages
    )
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if target != "gfx942" or dtype != torch.float32:
        assert MATRIX[target] in built.assembly


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("last", [False, True])
def test_packing(target, last):
    tiles = {"TIMES": 64, "CHANNELS": 64}
    built = compiled(
        pack._pack, torch.bfloat16, target, {"X_LAST": last, "G_LAST": last, **tiles}, num_warps=4
    )
    assert built.spills == 0
    sides = {"G_LAST": last, "O_LAST": last, "OUT_LAST": last}
    built = compiled(pack._unpack, torch.bfloat16, target, {**sides, **tiles}, num_warps=4)
    assert built.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_filters_copies_and_their_gradients_sum(target):
    shift = {"BACKWARDS": False, "PARTS": 2, "BLOCK": 128, "COPIES": 8, "WIDTH": 256}
    assert compiled(toeplitz._shift, torch.bfloat16, target, shift, num_warps=4).spills == 0
    gather = {"PIECE": 64, "WIDE": 128, "SIZE": 1024}
    assert compiled(toeplitz._gather, torch.bfloat16, target, gather, num_warps=4).spills == 0
