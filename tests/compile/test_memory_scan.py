"""Every memory_scan kernel in every production configuration, compiled for GPUs that need not be here."""

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.memory_scan.kernels import (
    PAIR,
    backward_keys,
    backward_queries,
    forward,
    gates,
    tiles,
    tilings,
)

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# Bytes of local memory a thread, where they aren't 0.
SPILLS = {("_learn", "sm_90"): 8, ("_from_answers", "sm_100"): 8}
TOKENS = {"q", "k", "v", "do", "o", "dq", "dk", "dv"}
IN_TURN = ("_learn", "_to_states")
"""What chunks wait for."""
PRODUCTS = ["_learn", "_query_hidden", "_answers", "_from_answers", "_to_tokens", "_to_states"]
CHUNKS = [*PRODUCTS, "_errors", "_to_errors", "_tables", "_tables_backward"]


def compiled(name, target, *, chunk=64, D=64, H=256, dtype=torch.bfloat16, tiling=None, shift=1):
    rooms = (gates, forward, backward_queries, backward_keys)
    kernel = next(getattr(room, name) for room in rooms if hasattr(room, name))
    direction = "forward" if hasattr(forward, name) else "backward"
    tiling = tiling or tilings(direction, H, D, dtype.itemsize, hip=target.startswith("gfx"))[0]
    narrow = min(tiling.width, max(16, 1 << (D - 1).bit_length()))
    rows, parts = max(16, 1 << (chunk - 1).bit_length()), -(-H // tiling.hidden)
    exact = "tf32x3" if dtype == torch.float32 else "bf16x3"
    constants = {
        "CHUNK": chunk, "D": D, "H": H, "V": D, "SHIFT": shift, "BT": rows, "BE": 16, "ROWS": 16,
        "BD": narrow, "BV": narrow, "BH": tiling.hidden, "PARTS": parts, "ALL_PARTS": parts + -(-D // 16),
        "PRECISION": exact if target.startswith("sm") else "ieee", "TURNED": tiling.turned,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        key: "i64" if key in ("T", "c", "C") else TYPES[dtype] if key in TOKENS else "*fp32"
        for key in kernel.arg_names
        if key not in constants
    }
    warps = tiling.warps if name in IN_TURN else PAIR
    return build(kernel, signature, constants, target, num_warps=warps, num_stages=tiling.stages)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in PRODUCTS else [pytest.mark.exhaustive]) for n in CHUNKS]
)
def test_chunks_of_64_fit_without_wgmma(name):
    built = compiled(name, "sm_90")
    assert "wgmma" not in built.assembly  # with which kernels read outside shared memory
    assert name not in PRODUCTS or "mma.sync" in built.assembly
    assert built.shared <= SHARED_LIMIT["sm_90"]


@pytest.mark.parametrize("tiling", tilings("forward", 64, 64, 2)[1:2])
@pytest.mark.parametrize("name", IN_TURN)
def test_more_warps_do_without_wgmma_too(name, tiling):
    built = compiled(name, "sm_90", D=384, H=1536, dtype=torch.float32, tiling=tiling)
    assert "wgmma" not in built.assembly
    assert "mma.sync" in built.assembly


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("which", range(1, len(tilings("forward", 64, 64, 2))))
@pytest.mark.parametrize("name", IN_TURN)
def test_every_tiling_fits(name, which, dtype, target):
    tiling = tilings("forward", 64, 64, 2, hip=target.startswith("gfx"))[which]
    built = compiled(name, target, D=384, H=1536, dtype=dtype, tiling=tiling)
    assert "wgmma" not in built.assembly
    assert built.shared <= SHARED_LIMIT[target]


# For sm_90 those of 64 are built.
@pytest.mark.kernel(of=lambda name: name)
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[pytest.mark.exhaustive] if t == "sm_90" else []) for t in TARGETS]
)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_16_spill_little(name, target):
    built = compiled(name, target, chunk=16, H=64)
    assert built.spills <= SPILLS.get((name, target), 0)
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(
    "form",
    [{}, {"dtype": torch.float32}, {"D": 128}, {"D": 384, "H": 1536}, {"shift": -1}],
    ids=str,
)
def test_other_forms_fit(form, name, target):
    built = compiled(name, target, **form)
    assert built.shared <= SHARED_LIMIT[target]
    assert "wgmma" not in built.assembly


@pytest.mark.parametrize("kernel", [tiles._pack, tiles._unpack], ids=lambda kernel: kernel.__name__)
def test_moves_of_the_state_build(kernel):
    constants = {"N1": 64 * 256, "H": 256, "N2": 64 * 256, "V": 64, "BLOCK": 1024}
    signature = {
        key: "i64" if key in ("packed_g", "at") else "*fp32"
        for key in kernel.arg_names
        if key not in constants
    }
    built = build(kernel, signature, constants, "sm_90", num_warps=4)
    assert built.spills == 0
