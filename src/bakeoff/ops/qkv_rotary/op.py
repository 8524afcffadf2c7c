"""The declaration of `qkv_rotary`: candidates, checks, buckets, cost, cases."""

from math import prod

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.qkv_rotary import plain
from bakeoff.ops.qkv_rotary.reference import counts, reference
from bakeoff.ops.rotary.op import bucket_of_others, canonical, check_norm, check_tables, draw, kernels_cannot
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.arguments import INTEGER, Arguments, Flag, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows

__all__ = ["OP"]

_OP = "qkv_rotary"


def relations(case: Case) -> None:
    """Raises ValueError where heads, tables or positions don't fit qkv, or half of a normalisation is
    given."""
    (B, T, heads, D), K = case.qkv.shape, case.kv_heads
    if not isinstance(K, int | None):
        raise ValueError(f"{_OP}: kv_heads must be a whole number, got {K}")
    if K is None and heads % 3:
        raise ValueError(
            f"{_OP}: qkv has {heads} heads a token, no multiple of 3: give kv_heads, of which there are as "
            f"many keys and as many values"
        )
    if K is not None and heads <= 2 * K:
        raise ValueError(
            f"{_OP}: qkv has {heads} heads a token; kv_heads = {K} keys and as many values leave none for "
            f"queries"
        )
    check_norm(_OP, case)
    check_tables(_OP, case, B, T, D)


check = Arguments(
    _OP,
    {
        "qkv": Tensor("B T N+ D", hint="N = H + 2 Hk heads: torch.unflatten(qkv, -1, (-1, D))"),
        "cos": Tensor("S R/2+", hint="S positions, one column a rotated pair"),
        "sin": Tensor("as cos", dtype_of="cos"),
        "kv_heads": Number(least=1, optional=True),
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
    """Rounds B, T and the tables' length, as `rotary` does."""
    B, T, heads, D = case.qkv.shape
    B, T = round_rows(B), round_rows(T)
    return case.replace(
        qkv=canonical(case.qkv, (B, T, heads, D)),
        kv_heads=counts(heads, case.kv_heads)[1],
        **bucket_of_others(case, B, T),
    )


def cost(case: Case) -> Cost:
    """Read and write q and k, read the table rows in use once; 3 FLOPs a rotated element. Backward moves all
    of qkv. Normalising adds 4 an element of q and k; its backward reads them again, and adds 3 for a weight's
    gradient, 8 for theirs."""
    B, T, heads, D = case.qkv.shape
    heads = sum(counts(heads, case.kv_heads))  # those that are turned
    ids = case.position_ids
    rows = T if ids is None else min(case.cos.shape[0], prod(ids.shape))
    tables = 2 * rows * case.cos.shape[1] * case.cos.dtype.itemsize + (ids.nbytes if ids else 0)
    turned = B * T * heads * D  # elements of q and k
    turning = 6 * case.cos.shape[1] * B * T * heads
    moved = 2 * turned * case.qkv.dtype.itemsize + tables
    weights = [meta for meta in (case.q_weight, case.k_weight) if meta is not None]
    flops = turning + (4 * turned if weights else 0)
    moved += sum(weight.nbytes for weight in weights)
    summed = any(weight.requires_grad for weight in weights)
    if not case.qkv.requires_grad and not summed:
        return Cost(moved, flops)
    moved += tables + sum(weight.nbytes * (1 + weight.requires_grad) for weight in weights)
    flops += turning
    if weights:
        moved += turned * case.qkv.dtype.itemsize
        flops += (3 * summed + 3) * turned
    if case.qkv.requires_grad:
        moved += 2 * case.qkv.nbytes
        flops += 5 * turned if weights else 0
    else:
        moved += turned * case.qkv.dtype.itemsize
    return Cost(moved, flops)


def cases() -> list[Case]:
    """The models of this package and a Llama, then every option once; the same normalised."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("llm-med", 48, 512, 8, 8, 48, bf16),
        _case("base", 32, 1024, 12, 12, 64, bf16),
        _case("large", 4, 4096, 32, 32, 128, bf16),
        _case("grouped", 4, 4096, 32, 8, 128, bf16),
        _case("small", 16, 256, 8, 8, 48, bf16),
        _case("token", 64, 1, 32, 8, 128, bf16, ids=True, grad=False),
        _case("half", 8, 1024, 16, 16, 64, fp16),
        _case("single", 8, 1024, 16, 16, 64, fp32),
        _case("interleaved", 4, 2048, 16, 16, 128, bf16, interleaved=True),
        _case("partial", 4, 2048, 32, 8, 128, bf16, rotated=32),
        _case("packed", 4, 2048, 32, 8, 128, bf16, ids=True),
        _case("part of a wider tensor", 4, 2048, 16, 4, 96, bf16, wider=True),
        _case("narrow tables", 4, 2048, 16, 16, 128, bf16, table=bf16),
        _case("odd", 3, 1001, 5, 3, 45, bf16, rotated=30),
        _case("normed llm-med", 48, 512, 8, 8, 48, bf16, weight=fp32),
        _case("normed base", 32, 1024, 12, 12, 64, bf16, weight=fp32),
        _case("normed grouped", 4, 4096, 32, 8, 128, bf16, weight=bf16),
        _case("normed offset", 8, 1024, 16, 16, 64, fp16, weight=fp16, offset=1.0),
        _case("normed single", 8, 1024, 16, 16, 64, fp32, weight=fp32),
        _case("normed interleaved", 4, 2048, 16, 16, 128, bf16, interleaved=True, weight=bf16),
        _case("normed packed", 4, 2048, 32, 8, 128, bf16, ids=True, weight=bf16),
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
    wider: bool = False,
    table: torch.dtype = torch.float32,
    grad: bool = True,
    weight: torch.dtype | None = None,
    offset: float = 0.0,
) -> Case:
    scale = None if weight is None else TensorMeta.dense((D,), weight, grad=grad)
    half, heads = (rotated or D) // 2, H + 2 * HK
    row = heads * D * (2 if wider else 1)
    return Case(
        {
            "qkv": TensorMeta((B, T, heads, D), dtype, (T * row, row, D, 1), grad),
            "cos": TensorMeta.dense((T, half), table),
            "sin": TensorMeta.dense((T, half), table),
            "kv_heads": HK,
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


def triton_supports(case: Case) -> str | None:
    """Why the kernels can't take `case`, or None."""
    return kernels_cannot(case, case.qkv)


def heuristic(case: Case, regime: str) -> str:
    """Triton on a GPU; plain PyTorch on the CPU, and where Inductor can fuse it with its neighbours."""
    fused = case.device.startswith("cuda") and regime != "compiled" and triton_supports(case) is None
    return "triton" if fused else "eager"


def _triton() -> Implementation:
    from bakeoff.ops.qkv_rotary.triton import qkv_rotary

    return qkv_rotary


OP = Op(
    name=_OP,
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate("triton", load=_triton, supports=triton_supports, requires=("triton",), launches=launches),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"qkv": 2, "cos": 1, "sin": 1, "position_ids": 0, "q_weight": 1, "k_weight": 1},
    batched=frozenset({"qkv", "position_ids"}),
    draw=draw,
)

register(OP)
