"""The declaration of pole_scan: its candidates, cost, cases and checks."""

import math
import os
from typing import Any

import torch

from bakeoff.ops.pole_scan import plain
from bakeoff.ops.pole_scan.reference import pole_scan as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate
from bakeoff.select.declare.arguments import COMPLEX, REAL, Arguments, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_REAL = (torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_MAX_POLES = 16


check = Arguments(
    "pole_scan",
    {
        "u": Tensor("B T C", hint="one sequence is u[None]"),
        "coef": Tensor("C K+", COMPLEX),
        "log_radius": Tensor("as coef", REAL),
        "theta": Tensor("as coef", REAL),
        "state": Tensor(
            "B C K", COMPLEX, optional=True, hint_kind="the state is the second of the two results"
        ),
    },
)


def bucket(case: Case) -> Case:
    """B and T rounded up, channels and poles exact, u in its layout class's plainest form, the rest dense."""
    B, T, C = case.u.shape
    B, T = round_rows(B), round_rows(T)
    plain: dict[str, Any] = {"u": with_layout(case.u, (B, T, C))}
    for name in ("log_radius", "theta", "coef"):
        meta = getattr(case, name)
        plain[name] = TensorMeta.dense(meta.shape, meta.dtype, grad=meta.requires_grad)
    if case.state is not None:
        shape = (B, *case.coef.shape)
        plain["state"] = TensorMeta.dense(shape, case.state.dtype, grad=case.state.requires_grad)
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """u in, y out; backward u and dy in, du out; poles and states once each way. FLOPs of the recurrence."""
    u, coef = case.u, case.coef
    poles = sum(getattr(case, name).nbytes for name in ("log_radius", "theta", "coef"))
    states = (1 + (case.state is not None)) * u.shape[0] * coef.numel * coef.dtype.itemsize
    work = u.numel * coef.shape[1]
    total, flops = 2 * u.nbytes + poles + states, 12 * work
    if not case.needs_grad:
        return Cost(total, flops)
    total += u.nbytes + poles + states
    if u.requires_grad or (case.state is not None and case.state.requires_grad):
        total += u.nbytes
        flops += 14 * work
    if any(getattr(case, name).requires_grad for name in ("log_radius", "theta", "coef")):
        total += u.nbytes + poles
        flops += 26 * work
    return Cost(total, flops)


def cases() -> list[Case]:
    """Language models from short to long, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("16x1024x768 K8", 16, 1024, 768, 8, bf16),
        _case("4x8192x768 K16", 4, 8192, 768, 16, bf16),
        _case("1x32768x768 K8", 1, 32768, 768, 8, bf16),
        _case("1x65536x768 K8", 1, 65536, 768, 8, bf16),
        _case("64x256x384 K4", 64, 256, 384, 4, bf16),
        _case("8x2048x512 K32", 8, 2048, 512, 32, bf16),
        _case("fp16", 8, 1024, 768, 8, fp16),
        _case("fp32", 8, 1024, 768, 8, fp32),
        _case("with state", 16, 1024, 768, 8, bf16, state=True),
        _case("decode", 64, 1, 768, 8, bf16, state=True, grad=False),
        _case("odd", 3, 1001, 45, 5, bf16, state=True),
        _case("strided", 8, 1024, 768, 8, bf16, strided=True),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    C: int,
    K: int,
    dtype: torch.dtype,
    *,
    state: bool = False,
    grad: bool = True,
    strided: bool = False,
) -> Case:
    u = TensorMeta.dense((B, T, C), dtype, grad=grad)
    if strided:
        u = TensorMeta(u.shape, dtype, (2 * T * C, 2 * C, 1), grad)
    dense = TensorMeta.dense
    args: dict[str, Any] = {
        "u": u,
        "log_radius": dense((C, K), torch.float32, grad=grad),
        "theta": dense((C, K), torch.float32, grad=grad),
        "coef": dense((C, K), torch.complex64, grad=grad),
        "state": dense((B, C, K), torch.complex64, grad=grad) if state else None,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Poles that forget within 3 to 10,000 positions, at all frequencies."""
    if name not in ("log_radius", "theta"):
        return None
    even = torch.rand(meta.shape, generator=generator, dtype=meta.dtype, device=generator.device)
    return even * math.pi if name == "theta" else -(10 ** (3.5 * even - 4))


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    if not case.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on CUDA, not on {case.device}"
    if any(meta.dtype in (torch.float64, torch.complex128) for meta in case.tensors.values()):
        return "computes in float32, not in float64"
    if case.u.numel == 0:
        return "empty u"
    poles = case.coef.shape[1]
    return f"takes up to {_MAX_POLES} poles a channel, not {poles}" if poles > _MAX_POLES else None


def heuristic(case: Case, regime: str) -> str:
    """The kernels wherever they can run: 5 to 14 times as fast as plain PyTorch on an H100."""
    del regime
    return "eager" if triton_supports(case) else "triton"


def _triton() -> Implementation:
    from bakeoff.ops.pole_scan.triton import pole_scan

    return pole_scan


OP = Op(
    name="pole_scan",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("scan", plain.scan),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        kernel_candidate("triton", _triton, triton_supports),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"u": 1, "log_radius": 2, "theta": 2, "coef": 2, "state": 2},
    batched=frozenset({"u", "state"}),
    draw=draw,
)

register(OP)
