"""Every adamw_ and global_norm kernel in its production tilings, built for GPUs that need not be here."""

from typing import Any

import pytest
import triton.language as tl

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.adamw import kernels, triton
from bakeoff.ops.adamw.kernels import Tiling, norm_tilings, tilings

FORMS: dict[str, tuple[Any, Any, Any, str | None]] = {
    "fp32": (tl.float32, tl.float32, tl.float32, None),
    "fp16": (tl.float16, tl.float16, tl.float16, None),
    "bf16": (tl.bfloat16, tl.bfloat16, tl.bfloat16, None),
    "fp32 master": (tl.bfloat16, tl.bfloat16, tl.float32, "float32"),
    "remainder": (tl.int16, tl.bfloat16, tl.float32, "remainder"),
}


def fits(built: Built) -> None:
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[built.target]


def wide(built: Built, loads: int, stores: int) -> None:
    """Whole blocks move 16 bytes an access. On AMD the compiler can't be asked for that by a hint alone."""
    if built.target.startswith("sm_"):
        assert built.loads.get(128, 0) >= loads
        assert built.stores.get(128, 0) >= stores


def build_update(target: str, form: str, each: int, tiling: Tiling, summed: bool = False) -> Built:
    param, grad, state, master = FORMS[form]
    return build(
        kernels._update,
        {
            "table": "*i64", "chunks": "*i32", "constants": "*fp32", "N": "i64",
            "rest1": "fp32", "beta2": "fp32", "rest2": "fp32", "eps": "fp32",
            **({"partial": "*fp32"} if summed else {}),
        },
        {
            "PARAM": param, "GRAD": grad, "STATE": state, "MASTER": master, "EACH": each,
            "WIDTH": 5 if summed else 2, "CHUNK": tiling.chunk, "BLOCK": tiling.block,
            **({} if summed else {"partial": None}),
        },
        target,
        num_warps=tiling.warps,
    )  # fmt: skip


@pytest.mark.kernel(of=lambda form, **_: form == "remainder")
@pytest.mark.parametrize(
    ("form", "each"),
    [
        pytest.param(
            form, each, marks=[] if each or form in ("fp32", "remainder") else [pytest.mark.exhaustive]
        )
        for form in FORMS
        for each in (1, 0)
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_update(target: str, form: str, each: int) -> None:
    param, grad, state, master = FORMS[form]
    tiling = tilings(state.primitive_bitwidth // 8)[0]
    built = build_update(target, form, each, tiling)
    fits(built)
    each_thread = tiling.block // (32 * tiling.warps)
    # Elements of 4 and 2 bytes: what a block's p, g, m, v and master come to in accesses of 16 bytes.
    bits = {"read": [param, grad, state, state], "written": [param, state, state]}
    if master is not None:
        bits["read"] = [grad, state, state, tl.float32 if master == "float32" else tl.int16]
        bits["read"] += [param] if master == "remainder" else []
        bits["written"] = [param, state, state, tl.float32 if master == "float32" else tl.int16]
    loads, stores = (
        sum(each_thread * t.primitive_bitwidth // 128 for t in bits[side]) for side in ("read", "written")
    )
    wide(built, loads, stores)


@pytest.mark.kernel(of=lambda form, **_: form == "fp32")
@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[pytest.mark.exhaustive] if f == "fp16" else []) for f in FORMS]
)
@pytest.mark.parametrize("target", TARGETS)
def test_update_with_sums(target: str, form: str) -> None:
    state = FORMS[form][2]
    fits(build_update(target, form, 1, tilings(state.primitive_bitwidth // 8, sums=True)[0], summed=True))


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_added_up(target: str) -> None:
    pointers = {"partial": "*fp32", "sums": "*fp32", "P": "i64"}
    fits(build(kernels._add_up, pointers, {"BLOCK": triton.SUM_BLOCK}, target, num_warps=8))


def most_a_thread(tiling: Tiling) -> int:
    return tiling.block // tiling.warps


@pytest.mark.parametrize(
    ("form", "tiling"),
    [
        ("fp32", tilings(4)[1]),
        ("fp32", max(tilings(4), key=most_a_thread)),
        ("remainder", max(tilings(4), key=most_a_thread)),
        ("bf16", max(tilings(2), key=most_a_thread)),
        ("fp32", min(tilings(4))),
    ],
)
def test_other_tilings_of_update(form: str, tiling: Tiling) -> None:
    fits(build_update("sm_90", form, 1, tiling))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("grad", [tl.float32, tl.bfloat16, tl.float16], ids=str)
def test_sum_of_squares(target: str, grad: Any) -> None:
    tiling = norm_tilings()[0]
    built = build(
        kernels._sum_squares,
        {"table": "*i64", "chunks": "*i32", "partial": "*fp32", "N": "i64", "count": "i32"},
        {"GRAD": grad, "CHUNK": tiling.chunk, "BLOCK": tiling.block},
        target,
        num_warps=tiling.warps,
    )
    fits(built)
    wide(built, tiling.block // (32 * tiling.warps) * grad.primitive_bitwidth // 128, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("full", [False, True])
def test_judge(target: str, full: bool) -> None:
    optional = {"skipped": "*i64", "found_inf": "*fp32", "grad_scale": "*fp32"}
    built = build(
        kernels._judge,
        {
            "partial": "*fp32",
            "verdict": "*fp32",
            "P": "i32",
            "max_norm": "fp32",
            **(optional if full else {}),
        },
        {
            "CLIP": full,
            "SKIP": full,
            "BLOCK": triton.JUDGE_BLOCK,
            **({} if full else dict.fromkeys(optional)),
        },
        target,
        num_warps=4,
    )
    fits(built)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("full", [False, True])
def test_prepare(target: str, full: bool) -> None:
    optional = {
        "lr_at": "*fp64", "lr_mult": "*fp32",
        "clip_coef": "*fp32", "found_inf": "*fp32", "grad_scale": "*fp32",
    }  # fmt: skip
    numbers = dict.fromkeys(("lr", "weight_decay", "log_beta1", "log_beta2"), "fp64")
    built = build(
        kernels._prepare,
        {
            "table": "*i64", "constants": "*fp32", "N": "i64", "S": "i32", "sign": "fp32", **numbers,
            **(optional if full else {}),
        },
        {
            "WIDTH": 5 if full else 2,
            "BLOCK": triton.PREPARE_BLOCK,
            **({} if full else dict.fromkeys(optional)),
        },
        target,
        num_warps=4,
    )  # fmt: skip
    fits(built)


@pytest.mark.parametrize("target", TARGETS)
def test_fetch(target: str) -> None:
    numbers = {"source": "i64", "count": "i32"}
    fits(
        build(
            kernels._fetch, {"target": "*i32", **numbers}, {"BLOCK": triton.FETCH_BLOCK}, target, num_warps=4
        )
    )


def test_chunks_are_whole_blocks_that_keep_the_alignment() -> None:
    """Chunks start on 16 bytes in any dtype, so only a tensor's own address decides about its alignment."""
    for tiling in (*tilings(2), *tilings(4), *norm_tilings()):
        assert tiling.chunk % tiling.block == 0
        assert tiling.block % (8 * 32) == 0
