"""The declaration of rms_norm: its candidates, cost, cases and checks."""

from typing import Any

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.rms_norm import native, peers, plain
from bakeoff.ops.rms_norm.reference import rms_norm as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.arguments import ANY_FLOATING, Arguments, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_HOST_BOUND = 1 << 26  # bytes of x


def relations(case: Case) -> None:
    """Raises ValueError for an offset that nothing is there to be added to."""
    if case.weight is None and case.offset:
        raise ValueError(f"rms_norm: offset={case.offset} is added to a weight, and weight is None; pass one")


check = Arguments(
    "rms_norm",
    {
        "x": Tensor("... D+"),
        "weight": Tensor("D", ANY_FLOATING, optional=True),
        "residual": Tensor("as x", optional=True),
        "eps": Number(least=0),
        "offset": Number(),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up, every tensor in its layout class's plainest form."""
    features = case.x.shape[-1]
    shape = (round_rows(case.x.numel // features), features)
    plain: dict[str, Any] = {"x": with_layout(case.x, shape)}
    if case.residual is not None:
        plain["residual"] = with_layout(case.residual, shape)
    if case.weight is not None:
        plain["weight"] = with_layout(case.weight, case.weight.shape)
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """Every tensor once: forward x, residual, weight in, y, s out; backward dy, s, ds in, gradients out."""
    x, weight, residual = case.x, case.weight, case.residual
    size = x.numel
    total = 2 * x.nbytes
    flops = 4 * size
    s_bytes = x.nbytes
    if residual is not None:
        s_bytes = size * torch.promote_types(x.dtype, residual.dtype).itemsize
        total += residual.nbytes + s_bytes
        flops += size
    if weight is not None:
        total += weight.nbytes
    if not case.needs_grad:
        return Cost(total, flops)
    wants_input = x.requires_grad or (residual is not None and residual.requires_grad)
    total += x.nbytes + s_bytes
    flops += 3 * size
    if weight is not None:
        total += weight.nbytes * (1 + weight.requires_grad)
    if wants_input:
        flops += 6 * size
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
        _case(8192, 4096, half, affine=False, name="no weight"),
        _case(8192, 4096, half, weight=full, name="fp32 weight"),
        _case(8192, 4096, half, offset=1.0, name="offset"),
        _case(8192, 1024, half, residual=half, name="residual"),
        _case(8192, 4096, half, residual=half, name="residual"),
        _case(8192, 4096, half, residual=full, name="fp32 residual"),
        _case(8192, 4096, half, strided=True, name="strided"),
        _case(8192, 4096, torch.float16),
        _case(8192, 1024, full),
        _case(8192, 4096, full),
    ]


def _case(
    rows: int,
    features: int,
    dtype: torch.dtype,
    *,
    weight: torch.dtype | None = None,
    affine: bool = True,
    residual: torch.dtype | None = None,
    offset: float = 0.0,
    strided: bool = False,
    name: str = "",
) -> Case:
    x = TensorMeta.dense((rows, features), dtype, grad=True)
    if strided:
        x = TensorMeta(x.shape, dtype, (2 * features, 1), True)
    args: dict[str, Any] = {
        "x": x,
        "weight": TensorMeta.dense((features,), weight or dtype, grad=True) if affine else None,
        "eps": 1e-6,
        "residual": TensorMeta.dense((rows, features), residual, grad=True) if residual else None,
        "offset": offset,
    }
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return Case(args, "cuda", f"{rows}x{features} {short} {name}".strip())


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    for name, meta in case.tensors.items():
        if meta.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"computes in float32: takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return None


def heuristic(case: Case, regime: str) -> str:
    """Triton on a GPU; plain PyTorch on the CPU, inside torch.compile, which fuses it, and where the host's
    time decides: PyTorch's own backward is C++, and up to 64 MiB the GPU waits for Python (measured on an
    H100: 8192x1024 bf16 takes 202 us against 283, 4096x8192 takes 259 against 218)."""
    if regime == "compiled" or not case.device.startswith("cuda") or triton_supports(case) is not None:
        return "eager"
    native = case.residual is None and not case.offset
    native = native and (case.weight is None or case.weight.dtype == case.x.dtype)
    host_bound = regime == "eager" and case.needs_grad and native and case.x.nbytes < _HOST_BOUND
    return "eager" if host_bound else "triton"


def _triton() -> Implementation:
    from bakeoff.ops.rms_norm.triton import rms_norm

    return rms_norm


OP = Op(
    name="rms_norm",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate(
            "compiled",
            plain.compiled,
            supports=compiler_missing,
        ),
        Candidate(
            "triton",
            load=_triton,
            supports=triton_supports,
            requires=("triton",),
            launches=launches,
        ),
        Candidate(
            "native",
            native.native,
            supports=native.native_supports,
            requires=native.REQUIRES,
            traceable=False,
        ),
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
            min_capability=(8, 0),
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
    heuristic=heuristic,
    features={"x": 1, "weight": 1, "residual": 1},
    batched=frozenset({"x", "residual"}),
)

register(OP)
