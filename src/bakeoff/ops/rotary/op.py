"""The declaration of `rotary`: candidates, checks, buckets, cost, cases."""

import os
from math import prod
from typing import Any

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.rotary import peers, plain
from bakeoff.ops.rotary.reference import reference, rotary_tables
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.arguments import INTEGER, Arguments, Flag, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import layout, round_rows, with_layout

__all__ = ["OP", "bucket_of_others", "canonical", "check_norm", "check_tables", "draw", "kernels_cannot"]

_NATIVE = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEAD = 16384  # a wider head would not fit one program's registers
_MOST_NORMED_HEAD = 4096  # nor would one that is normalised, with all that its backward holds


def relations(case: Case) -> None:
    """Raises ValueError where tables and positions don't fit q and k, or half of a normalisation is given."""
    B, T, _, D = case.q.shape
    check_norm("rotary", case)
    check_tables("rotary", case, B, T, D)


def check_tables(op: str, case: Case, B: int, T: int, D: int) -> None:
    """Raises ValueError where cos, sin and position_ids don't fit B rows of T tokens, heads of D elements."""
    rows, half = case.cos.shape
    if half > D // 2:
        raise ValueError(
            f"{op}: cos has {half} columns, expected R/2 with 2 <= R <= D = {D}: one column a rotated pair "
            f"(tables that repeat the angles to full width must be cut: cos[:, :{D // 2}])"
        )
    ids = case.position_ids
    if ids is None:
        if rows < T:
            raise ValueError(
                f"{op}: cos has {rows} rows for T = {T} positions: make the tables at least {T} long, "
                f"or give position_ids"
            )
        return
    if ids.shape not in ((T,), (B, T)):
        raise ValueError(
            f"{op}: position_ids has shape {ids.shape}, expected [{T}] or [{B}, {T}] "
            f"(one row for all sequences: position_ids[0])"
        )
    if rows == 0 and B * T > 0:
        raise ValueError(f"{op}: cos has no rows, so no position_ids can be in it")


def check_norm(op: str, case: Case) -> None:
    """Raises ValueError where half of a normalisation is given."""
    given = [name for name in ("q_weight", "k_weight") if case.args[name] is not None]
    if len(given) == 1:
        (missing,) = {"q_weight", "k_weight"} - {*given}
        raise ValueError(
            f"{op}: {given[0]} is given and {missing} is None: pass both, which normalise q and k, or "
            f"neither (torch.ones(D) scales by 1)"
        )
    if not given and case.offset:
        raise ValueError(f"{op}: offset={case.offset} is added to weights, and there are none; pass both")
    if given and (case.eps is None or case.offset is None):
        raise ValueError(f"{op}: eps and offset must be numbers where q_weight and k_weight are given")


check = Arguments(
    "rotary",
    {
        "q": Tensor("B T H D"),
        "k": Tensor("B T Hk D", dtype_of="q"),
        "cos": Tensor("S R/2+", hint="S positions, one column a rotated pair"),
        "sin": Tensor("as cos", dtype_of="cos"),
        "interleaved": Flag(),
        "position_ids": Tensor("...", INTEGER, optional=True),
        "q_weight": Tensor("D", optional=True),
        "k_weight": Tensor("D", optional=True),
        "eps": Number(least=0, optional=True),
        "offset": Number(optional=True),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """Rounds B, T and the tables' length; makes q and k dense, cut from a fused projection, or head-major.

    `position_ids` of one row stand for equal rows: their cost differs by 8 bytes a token, and every q and k
    item then has its own row. Without weights there is no eps either.
    """
    B, T, H, D = case.q.shape
    B, T = round_rows(B), round_rows(T)
    return case.replace(
        q=canonical(case.q, (B, T, H, D)),
        k=canonical(case.k, (B, T, case.k.shape[2], D)),
        **bucket_of_others(case, B, T),
    )


def bucket_of_others(case: Case, B: int, T: int) -> dict[str, Any]:
    """The bucket's tables, positions and weights for B rows of T tokens."""
    ids = case.position_ids
    rows = T if ids is None else max(T, round_rows(case.cos.shape[0]))
    half = case.cos.shape[1]
    norm: dict[str, Any] = dict.fromkeys(("q_weight", "k_weight", "eps", "offset"))
    if case.q_weight is not None:
        norm = {
            name: with_layout(meta, meta.shape)
            for name, meta in case.tensors.items()
            if name in ("q_weight", "k_weight")
        }
    return {
        "cos": with_layout(case.cos, (rows, half)),
        "sin": with_layout(case.sin, (rows, half)),
        "position_ids": None if ids is None else TensorMeta.dense((B, T), ids.dtype),
        **norm,
    }


def canonical(meta: TensorMeta, shape: tuple[int, int, int, int]) -> TensorMeta:
    """Heads of the bucket: dense, cut from a wider tensor, or head-major."""
    if layout(meta, 2) == "other":
        return _head_major(shape, meta.dtype, meta.requires_grad)
    return with_layout(meta, shape, 2)


def _head_major(shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> TensorMeta:
    """A dense [B, H, T, D] seen as [B, T, H, D]."""
    _, T, H, D = shape
    return TensorMeta(shape, dtype, (H * T * D, D, T * D, 1), grad)


def cost(case: Case) -> Cost:
    """Read and write q and k, read the table rows in use once; 3 FLOPs a rotated element. Normalising adds 4
    an element; its backward reads q and k again, and adds 3 for a weight's gradient, 8 for an input's."""
    B, T = case.q.shape[:2]
    ids = case.position_ids
    rows = T if ids is None else min(case.cos.shape[0], prod(ids.shape))
    tables = 2 * rows * case.cos.shape[1] * case.cos.dtype.itemsize + (ids.nbytes if ids else 0)
    turning = 6 * case.cos.shape[1] * B * T
    bytes_, flops, back_bytes, back_flops = tables, 0, 0, 0
    for x, weight in ((case.q, case.q_weight), (case.k, case.k_weight)):
        bytes_ += 2 * x.nbytes
        flops += turning * x.shape[2]
        if weight is not None:
            bytes_ += weight.nbytes
            flops += 4 * x.numel
            if x.requires_grad or weight.requires_grad:
                back_bytes += 2 * x.nbytes + weight.nbytes * (1 + weight.requires_grad)
                back_flops += turning * x.shape[2] + (3 * weight.requires_grad + 3) * x.numel
            if x.requires_grad:
                back_bytes += x.nbytes
                back_flops += 5 * x.numel
        elif x.requires_grad:
            back_bytes += 2 * x.nbytes
            back_flops += turning * x.shape[2]
    if not back_bytes:
        return Cost(bytes_, flops)
    return Cost(bytes_ + back_bytes + tables, flops + back_flops)


def cases() -> list[Case]:
    """The published set-up and language models from small to large, then every option and layout once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("small", 16, 256, 8, 8, 48, bf16),
        _case("llm-med", 48, 512, 8, 8, 48, bf16),
        _case("large", 4, 4096, 32, 32, 128, bf16),
        _case("grouped", 4, 4096, 32, 8, 128, bf16),
        _case("multi-query", 8, 2048, 16, 1, 64, bf16),
        _case("short", 256, 64, 12, 12, 64, bf16),
        _case("decode", 64, 1, 32, 8, 128, bf16, ids=True, grad=False),
        _case("half", 8, 1024, 16, 16, 64, fp16),
        _case("single", 8, 1024, 16, 16, 64, fp32),
        _case("interleaved", 4, 2048, 16, 16, 128, bf16, interleaved=True),
        _case("partial", 4, 2048, 32, 8, 128, bf16, rotated=32),
        _case("packed", 4, 2048, 32, 8, 128, bf16, ids=True),
        _case("fused projection", 4, 2048, 32, 8, 128, bf16, form="strided"),
        _case("head-major", 4, 2048, 16, 16, 128, bf16, form="other"),
        _case("narrow tables", 4, 2048, 16, 16, 128, bf16, table=bf16),
        _case("odd", 3, 1001, 5, 3, 45, bf16, rotated=30),
        *_normed_cases(),
    ]


def _normed_cases() -> list[Case]:
    """With QK-norm: the models of this package and one as Llama's, then every option once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("normed llm-med", 48, 512, 8, 8, 48, bf16, form="strided", weight=fp32),
        _case("normed base", 32, 1024, 12, 12, 64, bf16, form="strided", weight=fp32),
        _case("normed grouped", 4, 4096, 32, 8, 128, bf16, weight=bf16),
        _case("normed token", 64, 1, 32, 8, 128, bf16, ids=True, grad=False, weight=bf16),
        _case("normed offset", 8, 1024, 16, 16, 64, fp16, weight=fp16, offset=1.0),
        _case("normed single", 8, 1024, 16, 16, 64, fp32, weight=fp32),
        _case("normed partial", 4, 2048, 32, 8, 128, bf16, rotated=32, weight=bf16),
        _case("normed interleaved", 4, 2048, 16, 16, 128, bf16, interleaved=True, weight=bf16),
        _case("normed packed", 4, 2048, 32, 8, 128, bf16, ids=True, weight=bf16),
        _case("normed head-major", 4, 2048, 16, 16, 128, bf16, form="other", weight=bf16),
        _case("normed odd", 3, 1001, 5, 3, 45, bf16, rotated=30, weight=bf16),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    H: int,
    HK: int,
    D: int,
    dtype: torch.dtype,
    *,
    rotated: int | None = None,
    interleaved: bool = False,
    ids: bool = False,
    form: str = "dense",
    table: torch.dtype = torch.float32,
    grad: bool = True,
    weight: torch.dtype | None = None,
    offset: float = 0.0,
) -> Case:
    scale = None if weight is None else TensorMeta.dense((D,), weight, grad=grad)
    half = (rotated or D) // 2
    if form == "strided":  # [q | k | v] of one projection
        step = (H + 2 * HK) * D
        q, k = (TensorMeta((B, T, n, D), dtype, (T * step, step, D, 1), grad) for n in (H, HK))
    elif form == "other":
        q, k = (_head_major((B, T, n, D), dtype, grad) for n in (H, HK))
    else:
        q, k = (TensorMeta.dense((B, T, n, D), dtype, grad=grad) for n in (H, HK))
    return Case(
        {
            "q": q,
            "k": k,
            "cos": TensorMeta.dense((T, half), table),
            "sin": TensorMeta.dense((T, half), table),
            "interleaved": interleaved,
            "position_ids": TensorMeta.dense((B, T), torch.int64) if ids else None,
            "q_weight": scale,
            "k_weight": scale,
            "eps": None if weight is None else 1e-6,
            "offset": None if weight is None else offset,
        },
        "cuda",
        name,
    )


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Tables of real angles, starting at position 1 so that no row is the identity; ids below T."""
    if name == "position_ids":
        # Every table in a contest has at least T rows.
        high = max(meta.shape[-1], 1)
        return torch.randint(high, meta.shape, generator=generator, dtype=meta.dtype, device=generator.device)
    if name in ("cos", "sin"):
        length, half = meta.shape
        positions = torch.arange(1, length + 1, device=generator.device)
        return rotary_tables(positions, 2 * half, dtype=meta.dtype)[name == "sin"]
    return None


def heuristic(case: Case, regime: str) -> str:
    """Triton on a GPU; plain PyTorch on the CPU, and where Inductor can fuse it with its neighbours."""
    fused = case.device.startswith("cuda") and regime != "compiled" and _triton_cannot(case) is None
    return "triton" if fused else "eager"


def _tables_want_grad(case: Case) -> bool:
    return bool(case.cos.requires_grad or case.sin.requires_grad)


def _triton_cannot(case: Case) -> str | None:
    return kernels_cannot(case, case.q)


def kernels_cannot(case: Case, x: TensorMeta) -> str | None:
    """Why the kernels can't take heads like those of `x` with the case's tables and weights, or None."""
    if not case.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on a GPU, not on {case.device}"
    if x.dtype not in _NATIVE or case.cos.dtype not in _NATIVE:
        return "computes in float32, not in float64"
    if _tables_want_grad(case):
        return "gradient of cos and sin"
    most = _MOST_HEAD if case.q_weight is None else _MOST_NORMED_HEAD
    if x.shape[-1] > most:
        return f"head dimension over {most}"
    weights = [meta for meta in (case.q_weight, case.k_weight) if meta is not None]
    if any(meta.dtype not in _NATIVE for meta in weights):
        return "computes in float32: takes float16, bfloat16 and float32 weights"
    return None


def _peer_cannot(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on a GPU, not on {case.device}"
    if case.q.dtype not in _NATIVE or case.cos.dtype not in _NATIVE:
        return "no float64"
    if _tables_want_grad(case):
        return "gradient of cos and sin"
    if case.q_weight is not None:
        return "normalises no heads"
    if case.position_ids is not None:
        return "takes no position_ids"
    if 0 in case.q.shape or 0 in case.k.shape:
        return "empty tensor"
    return None


def _liger_cannot(case: Case) -> str | None:
    return "pairs are halves only" if case.interleaved else _peer_cannot(case)


def _quack_cannot(case: Case) -> str | None:
    D, half = case.q.shape[-1], case.cos.shape[-1]
    if D > 512 or D % 8 or half % 4:
        return "needs D <= 512, D and R multiples of 8"
    return _peer_cannot(case)


def _fla_cannot(case: Case) -> str | None:
    if case.q.dtype != case.cos.dtype:
        return "needs cos and sin in the dtype of q"
    return "needs D <= 256" if case.q.shape[-1] > 256 else _peer_cannot(case)


def _triton() -> Implementation:
    from bakeoff.ops.rotary.triton import rotary

    return rotary


OP = Op(
    name="rotary",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate(
            "triton",
            load=_triton,
            supports=_triton_cannot,
            requires=("triton",),
            launches=launches,
        ),
        Candidate(
            "liger",
            peers.liger,
            supports=_liger_cannot,
            requires=("liger_kernel", "triton"),
            traceable=False,
        ),
        Candidate(
            "quack",
            peers.quack,
            supports=_quack_cannot,
            requires=("quack",),
            traceable=False,
            min_capability=(9, 0),
        ),
        Candidate("fla", peers.fla, supports=_fla_cannot, requires=("fla", "triton"), traceable=False),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"q": 2, "k": 2, "cos": 1, "sin": 1, "position_ids": 0, "q_weight": 1, "k_weight": 1},
    batched=frozenset({"q", "k", "position_ids"}),
    draw=draw,
)

register(OP)
