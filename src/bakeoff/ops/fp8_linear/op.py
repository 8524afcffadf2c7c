"""The declaration of fp8_linear: its candidates, checks, buckets, cost and cases."""

from typing import Any

import torch

from bakeoff import hardware
from bakeoff.ops.fp8_linear import plain, scaled
from bakeoff.ops.fp8_linear.reference import fp8_linear as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_gpu
from bakeoff.select.declare.arguments import Arguments, Choice, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP", "lacks_fp8"]

_CAPABILITY = (8, 9)  # of GPUs that multiply FP8: Ada, Hopper, Blackwell

check = Arguments(
    "fp8_linear",
    {
        "x": Tensor("... K+", hint="a row is x[None]"),
        "weight": Tensor("M K", dtype_of="x", hint="one row for each result, as in torch.nn.Linear"),
        "bias": Tensor("M", optional=True, dtype_of="x"),
        "grad": Choice(("bf16", "e5m2")),
    },
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up; the rest dense."""
    K = case.x.shape[-1]
    found: dict[str, Any] = {"x": with_layout(case.x, (round_rows(case.x.numel // K), K))}
    for name in ("weight", "bias"):
        meta = case.args[name]
        if isinstance(meta, TensorMeta):
            found[name] = TensorMeta.dense(meta.shape, meta.dtype, grad=meta.requires_grad)
    return case.replace(**found)


def cost(case: Case) -> Cost:
    """Every argument and y once; backward the arguments and dy again, and the gradients. FLOPs: the product,
    and in backward one for x and one for the weight. What is quantised stays on the chip at best."""
    x, (M, K) = case.x, case.weight.shape
    rows = x.numel // K
    read = sum(meta.nbytes for meta in case.tensors.values())
    y = rows * M * x.dtype.itemsize
    product = 2 * rows * M * K
    if not case.needs_grad:
        return Cost(read + y, product)
    gradients = sum(meta.nbytes for meta in case.tensors.values() if meta.requires_grad)
    return Cost(2 * (read + y) + gradients, product * (1 + x.requires_grad + case.weight.requires_grad))


def cases() -> list[Case]:
    """Projections and MLPs from small to large in bfloat16, then every other form once."""
    return [
        _case(4096, 1024, 4096),
        _case(8192, 2048, 8192),
        _case(8192, 4096, 4096),
        _case(16384, 4096, 14336),
        _case(16384, 14336, 4096),
        _case(8192, 4096, 4096, grads="e5m2"),
        _case(8192, 4096, 4096, wants=False, name="forward"),
        _case(1, 4096, 4096, wants=False, name="forward"),
        _case(8192, 1024, 4096, bias=True, name="bias"),
        _case(2048, 1024, 1024, dtype=torch.float16),
        _case(1001, 333, 77, bias=True, name="odd"),
        _case(1001, 333, 77, grads="e5m2", name="odd"),
    ]


def _case(
    rows: int,
    K: int,
    M: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    wants: bool = True,
    grads: str = "bf16",
    name: str = "",
) -> Case:
    args: dict[str, Any] = {
        "x": TensorMeta.dense((rows, K), dtype, grad=wants),
        "weight": TensorMeta.dense((M, K), dtype, grad=wants),
        "bias": TensorMeta.dense((M,), dtype, grad=wants) if bias else None,
        "grad": grads,
    }
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    form = f"dy {grads} {name}" if grads != "bf16" else name
    return Case(args, "cuda", f"{rows}x{K}->{M} {short} {form}".strip())


def lacks_fp8(device: torch.device | str) -> str | None:
    """Why `device` multiplies no FP8 matrices, or None. Plain PyTorch computes the same there, but slowly."""
    if torch.device(device).type != "cuda":
        return f"{device} multiplies no FP8 matrices"
    if torch.version.hip is not None:
        return "row-wise FP8 products are not tried on AMD's GPUs"
    major, minor = hardware.capability(hardware.index(str(device)))
    if (major, minor) >= _CAPABILITY:
        return None
    return f"FP8 products need compute capability 8.9 or newer, this GPU has {major}.{minor}"


def scaled_supports(case: Case) -> str | None:
    """Why torch._scaled_mm can't take `case`, or None."""
    if reason := needs_gpu(case):
        return reason
    if case.x.numel == 0 or case.weight.numel == 0:
        return "does not take empty tensors"
    if not case.device.startswith("cuda"):  # Triton's interpreter, beside PyTorch's product on the CPU
        return None if case.x.dtype == torch.float32 else f"gives float32 on the CPU, not {case.x.dtype}"
    if case.x.dtype != torch.bfloat16:
        return f"torch._scaled_mm with a scale for each row gives bfloat16, not {case.x.dtype}"
    return lacks_fp8(case.device)


def compiled_supports(case: Case) -> str | None:
    """Why what torch.compile makes of torch._scaled_mm can't take `case`, or None."""
    return scaled_supports(case) or compiler_missing(case)


def heuristic(case: Case, regime: str) -> str:
    """One kernel that quantises, and PyTorch's product, where FP8 matrices are multiplied."""
    del regime
    fits = case.device.startswith("cuda") and scaled_supports(case) is None
    return "triton" if fits else "eager"


def _triton() -> Implementation:
    from bakeoff.ops.fp8_linear.triton import fp8_linear

    return fp8_linear


OP = Op(
    name="fp8_linear",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", scaled.compiled, supports=compiled_supports),
        Candidate("scaled_mm", scaled.scaled_mm, supports=scaled_supports),
        kernel_candidate("triton", _triton, scaled_supports),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"x": 1, "weight": 2, "bias": 1},
    batched=frozenset({"x"}),
)

register(OP)
