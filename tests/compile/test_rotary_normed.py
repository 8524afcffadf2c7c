"""Rotary's kernels that normalise heads, in every production configuration, compiled for absent GPUs."""

from types import SimpleNamespace

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.rotary.normed import kernels
from bakeoff.ops.rotary.normed.tilings import (
    SUM_TILING,
    backward_launch,
    backward_tilings,
    forward_launch,
    forward_tilings,
)
from bakeoff.ops.rotary.op import OP
from bakeoff.select import TensorMeta

TRITON = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CASES = {case.name: case for case in OP.cases() if case.q_weight is not None}
ALIKE = {"normed grouped", "normed offset"}
"""To another case, in what is built for it."""
SMS = 132
STEPS = [f"{name}_{axis}" for name in ("gq", "gk", "q", "k") for axis in "bth"]


def laid(meta):
    """What a launch asks of a tensor."""
    return SimpleNamespace(shape=meta.shape, dtype=meta.dtype, stride=lambda: meta.stride)


def arguments(case):
    """Pointers and numbers of both kernels, by their Triton types; None where an argument is None."""
    x, table = f"*{TRITON[case.q.dtype]}", f"*{TRITON[case.cos.dtype]}"
    weight = f"*{TRITON[case.q_weight.dtype]}"
    ids = "*i64" if case.position_ids is not None else None
    return {
        **dict.fromkeys(("q", "k", "q_out", "k_out", "gq", "gk", "dq", "dk"), x),
        **dict.fromkeys(("cos", "sin"), table),
        **dict.fromkeys(("q_weight", "k_weight"), weight),
        **dict.fromkeys(("q_partial", "k_partial"), "*fp32"),
        "position_ids": ids,
        **dict.fromkeys(("B", "T", "S"), "i32"),
        **dict.fromkeys((*STEPS, "row"), "i64"),
        **dict.fromkeys(("eps", "offset"), "fp32"),
    }


def compiled(case, target, backward, tiling=None, **override):
    """The kernel of one direction as it is launched for `case`."""
    q, k = laid(case.q), laid(case.k)
    ids = 0 if case.position_ids is None else len(case.position_ids.shape)
    options = {
        "position_ids": ids, "interleaved": case.interleaved, "tiling": tiling,
        "lanes": TARGETS[target].warp_size,
    }  # fmt: skip
    if backward:
        gq, gk = (laid(TensorMeta.dense(x.shape, x.dtype)) for x in (q, k))
        _, numbers = backward_launch(
            gq, gk, q, k, case.cos.shape, case.cos.stride[0], sums=True, sms=SMS, **options
        )
    else:
        head_major = tuple(x.stride[1] < x.stride[2] for x in (case.q, case.k))
        _, numbers = forward_launch(
            q, k, case.cos.shape, case.cos.stride[0], head_major=head_major, **options
        )
    kernel = kernels._backward if backward else kernels._forward
    taken = {name: kind for name, kind in arguments(case).items() if name in kernel.arg_names}
    signature = {name: kind for name, kind in taken.items() if kind is not None and name not in override}
    constants = {name: value for name, value in numbers.items() if name not in signature}
    constants |= {name: None for name, kind in taken.items() if kind is None} | override
    warps = constants.pop("num_warps")
    return build(kernel, signature, constants, target, num_warps=warps)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if name in ALIKE else []) for name in CASES],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_spills_and_wide_accesses(name, backward, target):
    case = CASES[name]
    built = compiled(case, target, backward)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if 2 * case.cos.shape[1] == case.q.shape[3] and not backward and target.startswith("sm_"):
        assert set(built.stores) == {128}


def test_the_backward_leaves_room_for_its_programs():
    """Three programs of a multiprocessor, as the default launches, may have 168 registers a thread of 4
    warps."""
    for name in ("normed llm-med", "normed base", "normed grouped", "normed single"):
        built = compiled(CASES[name], "sm_90", True)
        assert built.registers <= 168, name


@pytest.mark.parametrize("without", ["dq", "q_partial", "gk"])
def test_what_nobody_wants_is_left_out(without):
    absent = {without: None} | ({"dk": None, "k_partial": None} if without == "gk" else {})
    fewer = compiled(CASES["normed base"], "sm_90", True, **absent)
    assert sum(fewer.stores.values()) < sum(compiled(CASES["normed base"], "sm_90", True).stores.values())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_widest_head_fits(interleaved):
    q = TensorMeta.dense((1, 8, 2, 4096), torch.float32)
    table = TensorMeta.dense((8, 2048), torch.float32)
    weight = TensorMeta.dense((4096,), torch.float32)
    case = CASES["normed single"].replace(
        q=q, k=q, cos=table, sin=table, q_weight=weight, k_weight=weight, interleaved=interleaved
    )
    for backward in (False, True):
        assert compiled(case, "sm_80", backward).spills == 0


VARIANTS = [
    *[(False, tiling) for tiling in forward_tilings(None)[1:]],
    *[(True, tiling) for tiling in backward_tilings(CASES["normed grouped"])[1:]],
]


@pytest.mark.parametrize(
    ("name", "backward", "tiling"),
    [
        pytest.param(
            name, backward, tiling,
            marks=() if name == "normed llm-med" and i in (0, 8) else pytest.mark.exhaustive,
        )
        for name in ("normed llm-med", "normed grouped")
        for i, (backward, tiling) in enumerate(VARIANTS)
    ],
)  # fmt: skip
def test_variants(name, backward, tiling):
    built = compiled(CASES[name], "sm_90", backward, tiling)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT["sm_90"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_final_sum(target):
    block_p, block_d, warps = SUM_TILING
    signature = {"q_partial": "*fp32", "k_partial": "*fp32", "dq_weight": "*fp32", "dk_weight": "*bf16"}
    built = build(
        kernels._sum_partials, signature | {"P": "i32"},
        {"D": 48, "BLOCK_P": block_p, "BLOCK_D": block_d}, target, num_warps=warps,
    )  # fmt: skip
    assert built.spills == 0
