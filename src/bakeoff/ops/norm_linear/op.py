"""The declaration of norm_linear: its candidates, checks, buckets, cost and cases."""

from typing import Any

import torch

from bakeoff.ops.norm_linear import plain
from bakeoff.ops.norm_linear.reference import norm_linear as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import ANY_FLOATING, Arguments, Choice, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_SMALL = 1 << 22  # elements of x; on an H200 the kernels' backward loses at 2^20 and wins at 2^23

_LONGEST = 16384  # a row that fits one program's registers


def relations(case: Case) -> None:
    """Raises TypeError where gamma and beta differ in dtype."""
    gamma, beta = case.gamma, case.beta
    if gamma is not None and beta is not None and gamma.dtype != beta.dtype:
        raise TypeError(f"norm_linear: beta is {beta.dtype} and gamma {gamma.dtype}: cast one of them")


check = Arguments(
    "norm_linear",
    {
        "x": Tensor("... K+", hint="a row is x[None]"),
        "weight": Tensor("M K", dtype_of="x", hint="one row for each result, as in torch.nn.Linear"),
        "bias": Tensor("M", optional=True, dtype_of="x"),
        "gamma": Tensor("K", ANY_FLOATING, optional=True),
        "beta": Tensor("K", ANY_FLOATING, optional=True),
        "eps": Number(least=0.0),
        "kind": Choice(("layer", "rms")),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up; the rest dense."""
    K = case.x.shape[-1]
    found: dict[str, Any] = {"x": with_layout(case.x, (round_rows(case.x.numel // K), K))}
    for name in ("weight", "bias", "gamma", "beta"):
        meta = case.args[name]
        if isinstance(meta, TensorMeta):
            found[name] = TensorMeta.dense(meta.shape, meta.dtype, grad=meta.requires_grad)
    return case.replace(**found)


def cost(case: Case) -> Cost:
    """Every argument and y once; backward the arguments and dy again, and the gradients. FLOPs: the product,
    and in backward one for x and the normalisation, one for the weight."""
    x, (M, K) = case.x, case.weight.shape
    rows = x.numel // K
    read = sum(meta.nbytes for meta in case.tensors.values())
    y = rows * M * x.dtype.itemsize
    product = 2 * rows * M * K
    if not case.needs_grad:
        return Cost(read + y, product)
    gradients = sum(meta.nbytes for meta in case.tensors.values() if meta.requires_grad)
    wanted = {name for name, meta in case.tensors.items() if meta.requires_grad}
    through = bool(wanted & {"x", "gamma", "beta"})
    return Cost(2 * (read + y) + gradients, product * (1 + through + case.weight.requires_grad))


def cases() -> list[Case]:
    """In front of projections from small to large, both kinds, then every other form once."""
    fp16, fp32 = torch.float16, torch.float32
    return [
        _case(2048, 512, 1536),
        _case(8192, 1024, 4096),
        _case(16384, 4096, 4096),
        _case(2048, 512, 1536, kind="rms"),
        _case(8192, 1024, 4096, kind="rms"),
        _case(16384, 4096, 4096, kind="rms"),
        _case(128, 1024, 3072),
        _case(1, 4096, 4096, grad=False),
        _case(4096, 768, 256),
        _case(8192, 1024, 4096, gamma=fp32, name="fp32 gamma"),
        _case(8192, 1024, 4096, dtype=fp16),
        _case(2048, 1024, 1024, dtype=fp32),
        _case(1001, 333, 77, name="odd"),
    ]


def _case(
    rows: int,
    K: int,
    M: int,
    *,
    kind: str = "layer",
    dtype: torch.dtype = torch.bfloat16,
    gamma: torch.dtype | None = None,
    grad: bool = True,
    name: str = "",
) -> Case:
    def dense(*shape: int, dtype: torch.dtype = dtype) -> TensorMeta:
        return TensorMeta.dense(shape, dtype, grad=grad)

    layer = kind == "layer"
    args: dict[str, Any] = {
        "x": dense(rows, K),
        "weight": dense(M, K),
        "bias": dense(M) if layer else None,
        "gamma": dense(K, dtype=gamma or dtype),
        "beta": dense(K, dtype=gamma or dtype) if layer else None,
        "eps": 1e-5,
        "kind": kind,
    }
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return Case(args, "cuda", f"{rows}x{K}->{M} {short} {kind} {name}".strip())


def separate_supports(case: Case) -> str | None:
    """Why the normalising kernels can't take `case`, or None."""
    if case.x.shape[-1] > _LONGEST:
        return f"takes rows of up to {_LONGEST} elements, not {case.x.shape[-1]}"
    return needs_native(case)


def heuristic(case: Case, regime: str) -> str:
    """One pass to normalise and PyTorch's matrix product. Small inputs with gradients go to plain PyTorch,
    whose backward launches less."""
    fused = case.device.startswith("cuda") and regime != "compiled" and separate_supports(case) is None
    small = case.needs_grad and case.x.numel < _SMALL
    return "separate" if fused and not small else "eager"


def _separate() -> Implementation:
    from bakeoff.ops.norm_linear.triton import separate

    return separate


OP = Op(
    name="norm_linear",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        kernel_candidate("separate", _separate, separate_supports),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"x": 1, "weight": 2, "bias": 1, "gamma": 1, "beta": 1},
    batched=frozenset({"x"}),
)

register(OP)
