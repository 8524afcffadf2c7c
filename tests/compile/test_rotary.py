"""The rotary kernel in every production configuration, compiled for GPUs that need not be here."""

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.rotary import kernels
from bakeoff.ops.rotary.op import OP
from bakeoff.select import TensorMeta

TRITON = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
CASES = {case.name: case for case in OP.cases() if case.q_weight is None}
# The directions differ by one negation: both are built for the target of the committed results, of the first
# case by `make test`.
BUILDS = [
    pytest.param(name, conjugate, target, marks=[pytest.mark.exhaustive] if conjugate and number else [])
    for number, name in enumerate(CASES)
    for target in TARGETS
    for conjugate in ((False, True) if target == "sm_90" else (False,))
]


def compiled(case, conjugate, target, tiling=None, **override):
    """The kernel as it is launched for `case`, forward or backward."""
    ids = 0 if case.position_ids is None else len(case.position_ids.shape)
    head_major = tuple(x.stride[1] < x.stride[2] for x in (case.q, case.k))
    _, numbers = kernels.launch(
        case.q.shape, case.k.shape, case.q.stride, case.k.stride, case.q.dtype.itemsize, case.cos.shape,
        case.cos.stride[0], position_ids=ids, interleaved=case.interleaved, conjugate=conjugate,
        head_major=head_major, tiling=tiling, lanes=TARGETS[target].warp_size,
    )  # fmt: skip
    x, table = f"*{TRITON[str(case.q.dtype)]}", f"*{TRITON[str(case.cos.dtype)]}"
    signature = {
        **dict.fromkeys(("q", "k", "q_out", "k_out"), x),
        **dict.fromkeys(("cos", "sin"), table),
        **({"position_ids": "*i64"} if ids else {}),
        **dict.fromkeys(("T", "S"), "i32"),
        **dict.fromkeys(("q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "row"), "i64"),
    }
    constants = {name: value for name, value in numbers.items() if name not in signature} | override
    if not ids:
        constants["position_ids"] = None
    warps = constants.pop("num_warps")
    return build(kernels._rotate, signature, constants, target, num_warps=warps)


@pytest.mark.parametrize(("name", "conjugate", "target"), BUILDS)
def test_no_spills_and_wide_accesses(name, conjugate, target):
    case = CASES[name]
    built = compiled(case, conjugate, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if name == "odd":  # heads of 45 elements start anywhere: every element is its own access
        return
    assert built.registers <= 80
    # Only ids, of 8 bytes, are read in less than 16.
    assert set(built.stores) == {128}
    assert set(built.loads) <= ({128} if case.position_ids is None else {32, 64, 128})
    assert built.loads[128] >= built.stores[128]


def test_narrow_strides_are_not_taken_for_wide_ones():
    """What is promised about strides decides the width: a false promise would read misaligned vectors."""
    narrow = compiled(CASES["small"], False, "sm_90", VECTOR=1, TABLE_VECTOR=1)
    assert 128 not in narrow.loads


def test_no_layout_is_converted():
    """Neither pairing, halves nor interleaved, exchanges data between threads."""
    for name in ("large", "interleaved", "partial", "packed"):
        built = compiled(CASES[name], False, "sm_90")
        assert "convert_layout" not in built.ttgir
        assert built.shared == 0


@pytest.mark.parametrize("R", [2, 64, 16384])
def test_the_widest_head_fits(R):
    """Heads of 16384, the most that is supported: one tile is one head, and nothing spills."""
    shape = (1, 8, 2, 16384)
    q = TensorMeta.dense(shape, torch.float32)
    table = TensorMeta.dense((8, R // 2), torch.float32)
    case = CASES["single"].replace(q=q, k=q, cos=table, sin=table)
    for interleaved in (False, True):
        assert compiled(case.replace(interleaved=interleaved), True, "sm_80").spills == 0


@pytest.mark.parametrize(
    ("name", "tiling"),
    [
        pytest.param(name, tiling, marks=[] if i % 3 == j else [pytest.mark.exhaustive])
        for j, name in enumerate(("large", "small", "interleaved"))
        for i, tiling in enumerate(kernels.tilings(None)[1:])
    ],
)
def test_variants(name, tiling):
    built = compiled(CASES[name], False, "sm_90", tiling)
    assert built.spills == 0
    assert set(built.stores) == {128} if tiling.access >= 16 else set(built.stores) <= {64, 128}
