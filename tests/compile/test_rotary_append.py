"""The kernel of rotary_append_ in every production configuration, compiled for GPUs that need not be here."""

import pytest

from aot import TARGETS, build
from bakeoff.kernels.layout import alignment
from bakeoff.ops.rotary_append import OP, kernels
from bakeoff.ops.rotary_append.triton import sizes

TRITON = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
CASES = {case.name: case for case in OP.cases()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_no_spills_and_wide_accesses(name, target):
    case = CASES[name]
    (H, D), K, half = case.q.shape[2:], case.k.shape[2], case.cos.shape[1]
    cut = sizes(H, K, D, half)
    align = alignment(*(s for x in (case.q, case.k, case.v, case.k_cache) for s in x.stride[:3]))
    signature = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "y"), f"*{TRITON[str(case.q.dtype)]}")
    signature |= {"cos": "*fp32", "sin": "*fp32", "at": "*i64", "T": "i32"}
    signature |= {number: "i64" for number in kernels.NUMBERS if number != "T"}
    constants = {"H": H, "K": K, "D": D, "HALF": half, "ALIGN": align, **cut}
    warps = 4 if cut["HEADS"] * cut["WIDTH"] > 1024 else 1
    built = build(kernels._append, signature, constants, target, num_warps=warps)
    assert built.spills == 0
    assert built.registers <= 128
    if align % 8 == 0 and name != "partial":
        assert 128 in built.stores
