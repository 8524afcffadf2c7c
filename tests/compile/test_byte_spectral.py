"""Every byte_spectral kernel in its production tilings, built for GPUs that need not be here."""

from typing import Any

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.byte_spectral import OP, kernels
from bakeoff.ops.byte_spectral.kernels import backward as backward_room
from bakeoff.ops.byte_spectral.kernels import forward as forward_room
from bakeoff.ops.byte_spectral.op import _case
from bakeoff.select import Case

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}
SMS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
GENERATION = {"sm_80": 8, "sm_90": 9, "sm_100": 10, "gfx942": 9}
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
CASES = {case.name: case for case in OP.cases()}
FORMS = [
    "16x1024", "4x8192 D512", "8x2048 C4", "16x1024 grid", "16x1024 complex", "16x1024 log",
    "16x1024 features alone", "16x1024 fp32", "odd",
]  # fmt: skip
# Committed results come from sm_90; elsewhere a form, and two that differ most from it.
BUILDS = [(name, "sm_90") for name in FORMS]
BUILDS += [(name, t) for t in TARGETS if t != "sm_90" for name in ("16x1024", "8x2048 C4", "16x1024 fp32")]


def builds(alike: set[str]) -> list[Any]:
    """Exhaustive are forms `alike` to another, and off sm_90 all but the first."""

    def marks(name: str, target: str) -> list[Any]:
        some = name not in alike and (target == "sm_90" or name == FORMS[0])
        return [] if some else [pytest.mark.exhaustive]

    return [pytest.param(*build, marks=marks(*build)) for build in BUILDS]


# Bytes of local memory a thread is known to need, by how many bfloat16 parts a float32 operand has: all
# gradients in one kernel hold more than a thread's 255 registers.
BACKWARD_SPILLS = {
    "sm_80": {2: 2944, 3: 3584}, "sm_90": {2: 472, 3: 744}, "sm_100": {2: 392, 3: 664},
    "gfx942": {2: 76, 3: 1424},
}  # fmt: skip
FORWARD_SPILLS = 256  # gfx942, three parts


def arguments(case: Case, target: str) -> tuple[dict[str, str], dict[str, Any]]:
    """What all kernels take: tensors' types and scalars, None for tensors that are absent, constants."""
    names = ("ids", "table", "window", "omega", "weight", "bias")
    signature = {name: TYPES[case.args[name].dtype] for name in names if case.args[name] is not None}
    constants: dict[str, Any] = {name: None for name in names if case.args[name] is None}
    W = case.window.shape[0]
    K = W // 2 + 1 if case.omega is None else case.omega.shape[0]
    D = case.weight.shape[1] if case.weight else 1
    result = case.weight or case.table
    constants |= kernels.constants(case.table.shape[1], W, K, D, case.features, result.dtype, True)
    return signature | dict.fromkeys(("T", "row"), "i64"), constants


def without(names: str, *tables: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in table.items() if name not in names.split()} for table in tables]


def forward_tilings(case: Case, target: str) -> list[kernels.ForwardTiling]:
    itemsize = (case.weight or case.table).dtype.itemsize
    return kernels.forward_tilings(
        arguments(case, target)[1], itemsize, GENERATION[target], SHARED_LIMIT[target]
    )


def backward_tilings(case: Case, target: str) -> list[kernels.BackwardTiling]:
    return kernels.backward_tilings(arguments(case, target)[1], GENERATION[target])


def compiled(kernel: Any, signature: Any, numbers: dict[str, Any], target: str) -> Built:
    """The kernel with a launch's numbers and constants."""
    options = {name: numbers[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in numbers.items() if name not in (*signature, *options)}
    return build(kernel, signature, constants, target, **options)


def forward(case: Case, target: str, tiling: kernels.ForwardTiling | None = None) -> Built:
    signature, constants = arguments(case, target)
    signature["out"] = TYPES[(case.weight or case.table).dtype]
    tiling = tiling or forward_tilings(case, target)[0]
    _, numbers = kernels.forward_launch(*case.ids.shape, constants, tiling)
    return compiled(forward_room._forward, signature, numbers, target)


def backward(case: Case, target: str, tiling: kernels.BackwardTiling | None = None) -> Built:
    signature, constants = without("bias", *arguments(case, target))
    signature |= {"dout": TYPES[(case.weight or case.table).dtype], "partial": "*fp32"}
    signature |= dict.fromkeys(("tiles", "columns", "bias_at", "signal_at"), "i64")
    tiling = tiling or backward_tilings(case, target)[0]
    _, numbers = kernels.backward_launch(*case.ids.shape, constants, tiling, SMS[target])
    numbers |= {"WEIGHT": case.weight is not None, "BIAS": case.bias is not None}
    numbers |= {"TABLE": True, "WINDOW": True, "OMEGA": case.omega is not None}
    return compiled(backward_room._backward, signature, numbers, target)


def check(built: Built, spills: int) -> None:
    assert built.registers > 32, "nothing was compiled: the kernel traps"
    assert built.spills <= spills
    assert built.shared <= SHARED_LIMIT[built.target]
    assert MATRIX[built.target] in built.assembly or "mma.sync" in built.assembly


def split(case: Case) -> int:
    return int(arguments(case, "sm_90")[1]["SPLIT"])


@pytest.mark.parametrize(("name", "target"), builds({"4x8192 D512", "16x1024 grid"}))
def test_forward(name: str, target: str) -> None:
    check(
        forward(CASES[name], target), FORWARD_SPILLS if target == "gfx942" and split(CASES[name]) == 3 else 0
    )


# To another form, in what the backward is made of.
ALIKE = {"4x8192 D512", "16x1024 grid", "16x1024 log", "odd", "8x2048 C4"}


@pytest.mark.parametrize(("name", "target"), builds(ALIKE))
def test_backward(name: str, target: str) -> None:
    check(backward(CASES[name], target), BACKWARD_SPILLS[target][split(CASES[name])])


LARGEST = _case("largest", 4, 1024, C=2, W=64, K=64, D=512, features="complex")
LARGEST_EXACT = _case("largest", 4, 1024, C=2, W=64, K=64, D=512, features="complex", weight=torch.float32)


some = pytest.mark.parametrize(
    "some", [slice(1, 2), pytest.param(slice(2, None), marks=pytest.mark.exhaustive)], ids=["first", "others"]
)


@some
@pytest.mark.parametrize("name", ["16x1024", pytest.param("8x2048 C4", marks=pytest.mark.exhaustive)])
def test_variants_of_the_forward(name: str, some: slice) -> None:
    tilings = forward_tilings(CASES[name], "sm_90")
    assert len(set(tilings)) == len(tilings) > 5
    for tiling in tilings[::2][some]:
        check(forward(CASES[name], "sm_90", tiling), 0)


@pytest.mark.exhaustive
def test_every_variant_of_the_largest_forward_fits_the_chip() -> None:
    """Where tiles of the weight are largest; registers may run out, shared memory must not."""
    for tiling in forward_tilings(LARGEST, "sm_90")[1:]:
        check(forward(LARGEST, "sm_90", tiling), 1024)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [LARGEST, LARGEST_EXACT], ids=["bf16", "fp32"])
def test_the_largest_forward_fits_every_chip(case: Case, target: str) -> None:
    assert forward(case, target).shared <= SHARED_LIMIT[target]


@some
def test_variants_of_the_backward(some: slice) -> None:
    for tiling in backward_tilings(CASES["16x1024"], "sm_90")[some]:
        check(backward(CASES["16x1024"], "sm_90", tiling), BACKWARD_SPILLS["sm_90"][2])


@pytest.mark.parametrize("target", TARGETS)
def test_sum_of_partials(target: str) -> None:
    signature = {"partial": "*fp32", "dweight": "*bf16", "dbias": "*bf16"}
    signature |= dict.fromkeys(("dtable", "dwindow", "domega"), "*fp32")
    signature |= dict.fromkeys(("columns", "bias_at", "table_at", "window_at", "omega_at"), "i64")
    signature["rows"] = "i32"
    _, constants = kernels.sum_launch(1000)
    warps = constants.pop("num_warps")
    built = build(backward_room._sum_partials, signature, constants, target, num_warps=warps)
    assert built.spills == 0
