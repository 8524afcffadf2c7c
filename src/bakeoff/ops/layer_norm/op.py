"""The declaration of layer_norm: its candidates, cost, cases and checks."""

from typing import Any

import torch

from bakeoff.ops.layer_norm import peers, plain
from bakeoff.ops.layer_norm.reference import layer_norm as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, kernels_on_gpu
from bakeoff.select.declare.arguments import ANY_FLOATING, Arguments, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]


check = Arguments(
    "layer_norm",
    {
        "x": Tensor("... D+"),
        "weight": Tensor("D", ANY_FLOATING, optional=True),
        "bias": Tensor("D", ANY_FLOATING, optional=True),
        "residual": Tensor("as x", optional=True),
        "eps": Number(least=0),
    },
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up, every tensor in its layout class's plainest form."""
    features = case.x.shape[-1]
    rows = (round_rows(case.x.numel // features), features)
    shapes = {"x": rows, "residual": rows, "weight": (features,), "bias": (features,)}
    return case.replace(**{name: with_layout(meta, shapes[name]) for name, meta in case.tensors.items()})


def cost(case: Case) -> Cost:
    """Every tensor once: forward x, residual, weight, bias in, y, s out; backward dy, s, ds, weight in,
    gradients out."""
    x, residual = case.x, case.residual
    affine = [meta for meta in (case.weight, case.bias) if meta is not None]
    size = x.numel
    s_bytes = x.nbytes
    total = 2 * x.nbytes + sum(meta.nbytes for meta in affine)
    flops = size * (6 + len(affine))
    if residual is not None:
        s_bytes = size * torch.promote_types(x.dtype, residual.dtype).itemsize
        total += residual.nbytes + s_bytes
        flops += size
    if not case.needs_grad:
        return Cost(total, flops)
    total += x.nbytes + s_bytes + (case.weight.nbytes if case.weight is not None else 0)
    total += sum(meta.nbytes for meta in affine if meta.requires_grad)
    flops += size * (3 + 2 * sum(meta.requires_grad for meta in affine))
    if x.requires_grad or (residual is not None and residual.requires_grad):
        flops += 8 * size
        total += x.nbytes
        if residual is not None:
            total += s_bytes + (residual.nbytes if residual.dtype != x.dtype else 0)
    return Cost(total, flops)


def cases() -> list[Case]:
    """The benchmark grid: sizes from launch-bound to 16384^2 in bfloat16, then every other form once."""
    sizes = [
        (1, 4096), (2048, 512), (4096, 384), (24576, 384), (8192, 1024), (1000, 1000), (8192, 4096),
        (32768, 4096), (4096, 8192), (16384, 16384), (12288, 5120), (5120, 2880), (3000, 7168),
    ]  # fmt: skip
    half, full = torch.bfloat16, torch.float32
    return [
        *(_case(rows, features, half) for rows, features in sizes),
        _case(8192, 4096, half, affine="", name="no affine"),
        _case(8192, 4096, half, affine="weight", name="no bias"),
        _case(8192, 4096, half, weight=full, name="fp32 weight"),
        _case(8192, 1024, half, residual=half, name="residual"),
        _case(8192, 4096, half, residual=half, name="residual"),
        _case(8192, 4096, half, residual=full, name="fp32 residual"),
        _case(8192, 4096, half, strided=True, name="strided"),
        _case(8192, 4096, torch.float16),
        _case(8192, 1024, full),
        _case(8192, 4096, full),
        _case(1001, 333, half, name="odd"),
    ]


def _case(
    rows: int,
    features: int,
    dtype: torch.dtype,
    *,
    weight: torch.dtype | None = None,
    affine: str = "weight bias",
    residual: torch.dtype | None = None,
    strided: bool = False,
    name: str = "",
) -> Case:
    x = TensorMeta.dense((rows, features), dtype, grad=True)
    if strided:
        x = TensorMeta(x.shape, dtype, (2 * features, 1), True)
    parameter = TensorMeta.dense((features,), weight or dtype, grad=True)
    args: dict[str, Any] = {
        "x": x,
        "weight": parameter if "weight" in affine else None,
        "bias": parameter if "bias" in affine else None,
        "eps": 1e-5,
        "residual": TensorMeta.dense((rows, features), residual, grad=True) if residual else None,
    }
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return Case(args, "cuda", f"{rows}x{features} {short} {name}".strip())


def _triton() -> Implementation:
    from bakeoff.ops.layer_norm.triton import layer_norm

    return layer_norm


OP = Op(
    name="layer_norm",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        kernel_candidate("triton", _triton),
        Candidate(
            "liger",
            peers.liger,
            supports=peers.liger_supports,
            requires=("liger_kernel",),
            traceable=False,
        ),
        Candidate(
            "quack",
            peers.quack,
            supports=peers.quack_supports,
            requires=("quack",),
            min_capability=(9, 0),
            traceable=False,
        ),
        Candidate(
            "fla",
            peers.fla,
            supports=peers.fla_supports,
            requires=("fla",),
            traceable=False,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=kernels_on_gpu,
    features={"x": 1, "weight": 1, "bias": 1, "residual": 1},
    batched=frozenset({"x", "residual"}),
)

register(OP)
