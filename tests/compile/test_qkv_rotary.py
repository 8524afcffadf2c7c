"""The kernels of qkv_rotary's backward in every production configuration, compiled for absent GPUs; its
forward launches rotary's, on two parts of a tensor."""

from types import SimpleNamespace

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, build
from bakeoff.ops.qkv_rotary import kernels, tilings
from bakeoff.ops.qkv_rotary.op import OP
from bakeoff.ops.qkv_rotary.reference import counts
from bakeoff.ops.rotary import kernels as rotary_kernels
from bakeoff.ops.rotary.normed import kernels as normed_kernels
from bakeoff.ops.rotary.normed.tilings import forward_launch
from bakeoff.select import TensorMeta

TRITON = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CASES = {case.name: case for case in OP.cases()}
TRAINED = [name for name, case in CASES.items() if case.qkv.requires_grad]
ALIKE = {"base", "large", "grouped", "small", "normed offset"}
"""To another case, in what is built for it."""
SMS = 132
STEPS = [f"{name}_{axis}" for name in ("gq", "gk", "gv", "q", "k") for axis in "bth"]


def laid(meta):
    """What a launch asks of a tensor."""
    return SimpleNamespace(shape=meta.shape, dtype=meta.dtype, stride=lambda: meta.stride)


def parts(case):
    """q and k as they stand in qkv, and v."""
    B, T, heads, D = case.qkv.shape
    H, K = counts(heads, case.kv_heads)
    return [laid(TensorMeta((B, T, n, D), case.qkv.dtype, case.qkv.stride)) for n in (H, K, K)]


def options(case, target, tiling):
    ids = 0 if case.position_ids is None else len(case.position_ids.shape)
    return {
        "position_ids": ids, "interleaved": case.interleaved, "tiling": tiling,
        "lanes": TARGETS[target].warp_size,
    }  # fmt: skip


def built_of(kernel, case, numbers, target, override):
    """`kernel` with the pointers and numbers of `case`."""
    x, table = f"*{TRITON[case.qkv.dtype]}", f"*{TRITON[case.cos.dtype]}"
    weight = f"*{TRITON[case.q_weight.dtype]}" if case.q_weight is not None else None
    given = {
        **dict.fromkeys(("q", "k", "q_out", "k_out", "gq", "gk", "gv", "dqkv"), x),
        **dict.fromkeys(("cos", "sin"), table),
        **dict.fromkeys(("q_weight", "k_weight"), weight),
        **dict.fromkeys(("q_partial", "k_partial"), "*fp32"),
        "position_ids": "*i64" if case.position_ids is not None else None,
        **dict.fromkeys(("B", "T", "S"), "i32"),
        **dict.fromkeys((*STEPS, "row"), "i64"),
        **dict.fromkeys(("eps", "offset"), "fp32"),
    }
    taken = {name: kind for name, kind in given.items() if name in kernel.arg_names}
    signature = {name: kind for name, kind in taken.items() if kind is not None and name not in override}
    constants = {name: value for name, value in numbers.items() if name not in signature}
    constants |= {name: None for name, kind in taken.items() if kind is None} | override
    warps = constants.pop("num_warps")
    return build(kernel, signature, constants, target, num_warps=warps)


def forward(case, target):
    q, k, _ = parts(case)
    asked = options(case, target, None)
    if case.q_weight is not None:
        kernel = normed_kernels._forward
        _, numbers = forward_launch(
            q, k, case.cos.shape, case.cos.stride[0], head_major=(False, False), **asked
        )
    else:
        kernel = rotary_kernels._rotate
        _, numbers = rotary_kernels.launch(
            q.shape, k.shape, q.stride(), k.stride(), q.dtype.itemsize, case.cos.shape, case.cos.stride[0],
            conjugate=False, head_major=(False, False), **asked,
        )  # fmt: skip
    return built_of(kernel, case, numbers, target, {})


def backward(case, target, tiling=None, head_major=False, **override):
    q, k, v = parts(case)
    arriving = {}
    for name, x in {"gq": q, "gk": k, "gv": v}.items():
        (_, T, H, D), dense = x.shape, TensorMeta.dense(x.shape, x.dtype)
        outside = TensorMeta(x.shape, x.dtype, (H * T * D, D, T * D, 1))
        arriving[name] = None if name in override else laid(outside if head_major else dense)
    asked = options(case, target, tiling)
    if case.q_weight is not None:
        kernel = kernels._normed_back
        _, numbers = tilings.normed_launch(
            q, k, arriving, case.cos.shape, case.cos.stride[0], sums=True, sms=SMS, **asked
        )
    else:
        kernel = kernels._rotate_back
        _, numbers = tilings.plain_launch(
            q.shape, k.shape[2], arriving, q.dtype.itemsize, case.cos.shape, case.cos.stride[0], **asked
        )
    return built_of(kernel, case, numbers, target, override)


def each(names, exhaustive=()):
    marks = {name: [pytest.mark.exhaustive] for name in (*ALIKE, *exhaustive)}
    marked = [pytest.param(name, marks=marks.get(name, [])) for name in names]
    return pytest.mark.parametrize("name", marked)


def kind(name, **_):
    return CASES[name].q_weight is not None


@pytest.mark.kernel(of=kind)
@pytest.mark.parametrize("target", TARGETS)
@each(CASES, [*CASES][1::2])  # rotary's own tests build its kernels for like tensors
def test_the_forward_spills_nothing(name, target):
    built = forward(CASES[name], target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.kernel(of=kind)
@pytest.mark.parametrize("target", TARGETS)
@each(TRAINED)
def test_the_backward_spills_nothing_and_accesses_are_wide(name, target):
    case = CASES[name]
    built = backward(case, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if name.endswith("odd"):  # heads of 45 elements start anywhere: every element is its own access
        return
    if target.startswith("sm_") and case.q_weight is None:
        assert set(built.stores) == {128}
        assert set(built.loads) <= ({128} if case.position_ids is None else {32, 64, 128})


@pytest.mark.parametrize("name", ["llm-med", "base", "grouped", "normed base"])
def test_gradients_with_heads_outside_of_tokens(name):
    built = backward(CASES[name], "sm_90", head_major=True)
    assert built.spills == 0
    assert 128 in built.stores


def test_the_backward_with_weights_leaves_room_for_its_programs():
    """Three programs of a multiprocessor, as the default launches, may have 168 registers a thread of 4
    warps."""
    for name in ("normed llm-med", "normed base", "normed grouped", "normed single"):
        built = backward(CASES[name], "sm_90")
        assert built.registers <= 168, name


@pytest.mark.parametrize("name", ["base", "normed base"])
@pytest.mark.parametrize("without", ["gq", "gk", "gv"])
def test_what_does_not_arrive_is_not_read(name, without):
    absent = {without: None}
    if name.startswith("normed") and without != "gv":
        absent |= {f"{without[1]}_partial": None}
    fewer, all_of_it = backward(CASES[name], "sm_90", **absent), backward(CASES[name], "sm_90")
    assert fewer.spills == 0
    # Loops copy asynchronously to shared memory what they read.
    reads = [sum(built.loads.values()) + built.assembly.count("cp.async.cg") for built in (fewer, all_of_it)]
    assert reads[0] < reads[1]


def test_gradients_of_the_weights_alone():
    case = CASES["normed base"]
    fewer, all_of_it = backward(case, "sm_90", dqkv=None), backward(case, "sm_90")
    assert sum(fewer.stores.values()) < sum(all_of_it.stores.values())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("name", "D"), [("single", 16384), ("normed single", 4096)])
def test_the_widest_head_fits(name, D, interleaved):
    table = TensorMeta.dense((8, D // 2), torch.float32)
    qkv = TensorMeta.dense((1, 8, 6, D), torch.float32)
    case = CASES[name].replace(qkv=qkv, kv_heads=2, cos=table, sin=table, interleaved=interleaved)
    if case.q_weight is not None:
        weight = TensorMeta.dense((D,), torch.float32)
        case = case.replace(q_weight=weight, k_weight=weight)
    assert backward(case, "sm_80").spills == 0


@pytest.mark.parametrize(
    ("name", "tiling"),
    [
        pytest.param(name, tiling, marks=() if i in (0, 4) and "llm" in name else pytest.mark.exhaustive)
        for name in ("llm-med", "grouped", "normed llm-med", "normed grouped")
        for i, tiling in enumerate(tilings.backward_tilings(CASES[name])[1:])
    ],
)
def test_variants(name, tiling):
    built = backward(CASES[name], "sm_90", tiling)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT["sm_90"]
