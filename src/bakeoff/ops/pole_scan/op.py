"""The declaration of pole_scan: its candidates, cost, cases and checks."""

import math
import os
import reprlib
from typing import Any

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.pole_scan import plain
from bakeoff.ops.pole_scan.reference import pole_scan as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_REAL = (torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_MAX_POLES = 16


def check(case: Case) -> None:
    """Raises ValueError or TypeError, with the fix, when the arguments don't make sense."""
    u = case.u
    for name, value in case.args.items():
        if not isinstance(value, TensorMeta) and not (name == "state" and value is None):
            hint = "; the state is the second of the two results" if isinstance(value, tuple) else ""
            raise TypeError(f"pole_scan: {name} must be a tensor, got {reprlib.repr(value)}{hint}")
    if not u.dtype.is_floating_point or u.dtype.itemsize < 2:
        raise TypeError(
            f"pole_scan: u is {u.dtype}; convert it to a floating point dtype of at least 16 bits"
        )
    if len(u.shape) != 3:
        raise ValueError(f"pole_scan: u has shape {u.shape}, expected [B, T, C]; one sequence is u[None]")
    for name in ("log_radius", "theta"):
        if case.args[name].dtype not in _REAL:  # type: ignore[union-attr]
            raise TypeError(
                f"pole_scan: {name} is {getattr(case, name).dtype}; poles need float32: {name}.float()"
            )
    for name in ("coef", "state"):
        value = case.args[name]
        if isinstance(value, TensorMeta) and value.dtype not in _COMPLEX:
            raise TypeError(
                f"pole_scan: {name} is {value.dtype}, expected complex64; reals [..., 2] become complex by "
                f"torch.view_as_complex({name})"
            )
    _check_shapes(case)


def _check_shapes(case: Case) -> None:
    u, coef = case.u, case.coef
    C = u.shape[2]
    if len(coef.shape) != 2 or coef.shape[0] != C or coef.shape[1] == 0:
        raise ValueError(
            f"pole_scan: coef has shape {coef.shape}, expected [{C}, K] with K >= 1, as u has {C} channels"
        )
    for name in ("log_radius", "theta"):
        if getattr(case, name).shape != coef.shape:
            raise ValueError(
                f"pole_scan: {name} has shape {getattr(case, name).shape}, expected coef's, {coef.shape}"
            )
    expected = (u.shape[0], *coef.shape)
    if case.state is not None and case.state.shape != expected:
        raise ValueError(f"pole_scan: state has shape {case.state.shape}, expected [B, C, K] = {expected}")


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
    from bakeoff.ops.pole_scan.autograd import pole_scan

    return pole_scan


OP = Op(
    name="pole_scan",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("scan", plain.scan),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate(
            "triton",
            load=_triton,
            supports=triton_supports,
            requires=("triton",),
            launches=launches,
        ),
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
