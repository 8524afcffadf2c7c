"""Every kernel of memory_scan's large chunks in production configurations, compiled for absent GPUs."""

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.memory_scan.large import kernels
from bakeoff.ops.memory_scan.large.kernels import rows, state, weights

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
WHOLE = {"G", "T", "C", "c", "first", "b", "chunk", "tiles", "programs"}
TOKENS = {
    "z", "zq", "h", "hq", "y", "v", "o", "e", "dh", "weighted", "asked", "back", "do", "dv", "dh_bar",
    "h_bar", "hq_bar", "zq_bar", "rows1", "rows2", "narrow1", "narrow2",
}  # fmt: skip
ROOMS = {name: room for room in (rows, state, weights) for name in room.__all__}


def compiled(name, target, *, D=512, H=512, dtype=torch.bfloat16, whole=False):
    kernel, room = getattr(ROOMS[name], name), ROOMS[name]
    cols = kernels.NARROW if room is state else kernels.COLS
    constants = {
        "D": D, "H": H, "V": D, "ROWS": kernels.ROWS, "COLS": cols, "BLOCK": kernels.BLOCK,
        "SCAN": kernels.SCAN, "PART": 4, "PARTS": 8, "WHOLE": whole,
    }  # fmt: skip
    absent = (
        {"_step": ("w1", "w2"), "_arriving": ("w1_bar", "w2_bar")}.get(name, ()) if whole else ("beta_bar",)
    )
    constants |= dict.fromkeys(absent)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        key: "i64" if key in WHOLE else TYPES[dtype] if key in TOKENS else "*fp32"
        for key in kernel.arg_names
        if key not in constants
    }
    return build(kernel, signature, constants, target, num_warps=8 if room is state else 4)


@pytest.mark.kernel(of=lambda name: name)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROOMS)
def test_kernels_fit(name, target):
    built = compiled(name, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("name", rows.__all__)
def test_rows_move_in_full_width(name):
    """16 bytes an access, but for weights, biases and sums."""
    built = compiled(name, "sm_90")
    assert built.loads[128] >= 4
    assert built.stores[128] >= 4
    assert built.stores.keys() <= {32, 128}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("form", [{"dtype": torch.float32}, {"D": 96, "H": 160}, {"whole": True}], ids=str)
def test_other_forms_fit(form, name, target):
    built = compiled(name, target, **form)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
