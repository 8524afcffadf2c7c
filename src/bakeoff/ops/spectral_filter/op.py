"""The declaration of spectral_filter: its candidates, cost, cases and checks."""

import os

import torch

from bakeoff import hardware
from bakeoff.fft_conv import plans
from bakeoff.kernels import cuda
from bakeoff.kernels.counter import launches
from bakeoff.ops.spectral_filter import plain
from bakeoff.ops.spectral_filter.reference import spectral_filter as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.arguments import COMPLEX, Arguments, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]


def relations(case: Case) -> None:
    """Raises ValueError for more bins than there are frequencies."""
    T, bins = case.x.shape[1], case.weight.shape[0]
    if bins > T // 2 + 1:
        raise ValueError(
            f"spectral_filter: weight has {bins} bins, but T = {T} positions have {T // 2 + 1} frequencies: "
            f"use weight[:{T // 2 + 1}], or pad x to {2 * (bins - 1)} positions"
        )


check = Arguments(
    "spectral_filter",
    {"x": Tensor("B T C", hint="one sequence is x[None]"), "weight": Tensor("K C", COMPLEX)},
    relations,
)


def bucket(case: Case) -> Case:
    """B rounded up; T exact, because an FFT's time depends on its factors; K cut to the frequencies of T.

    Calls have no more (see `check`); cases whose T stands for another, or was cut, may.
    """
    B, T, C = case.x.shape
    K = min(case.weight.shape[0], T // 2 + 1)
    weight = TensorMeta.dense((K, C), case.weight.dtype, grad=case.weight.requires_grad)
    return case.replace(x=with_layout(case.x, (round_rows(B), T, C)), weight=weight)


def cost(case: Case) -> Cost:
    """x in, y out; backward dy and, for the weight, x in, gradients out. FLOPs of two FFTs each way."""
    x, weight = case.x, case.weight
    fft = 5 * x.numel * max(1, x.shape[1].bit_length())  # two real ones
    total, flops = 2 * x.nbytes + weight.nbytes, fft
    if not case.needs_grad:
        return Cost(total, flops)
    total += x.nbytes + weight.nbytes
    flops += fft
    if x.requires_grad:
        total += x.nbytes
    if weight.requires_grad:
        total += x.nbytes + weight.nbytes
    return Cost(total, flops)


def cases() -> list[Case]:
    """Encoders from short to long, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("64x256x512", 64, 256, 512, 129, bf16),
        _case("16x1024x768", 16, 1024, 768, 513, bf16),
        _case("4x8192x768", 4, 8192, 768, 4097, bf16),
        _case("1x65536x768", 1, 65536, 768, 32769, bf16),
        _case("low frequencies", 16, 1024, 768, 128, bf16),
        _case("fp16", 16, 1024, 768, 513, fp16),
        _case("fp32", 16, 1024, 768, 513, fp32),
        _case("odd", 3, 1001, 45, 501, bf16),
    ]


def _case(name: str, B: int, T: int, C: int, K: int, dtype: torch.dtype) -> Case:
    return Case(
        {
            "x": TensorMeta.dense((B, T, C), dtype, grad=True),
            "weight": TensorMeta.dense((K, C), torch.complex64, grad=True),
        },
        "cuda",
        name,
    )


def fft_cannot(case: Case) -> str | None:
    """Why FFTs on the chip can't take `case`, or None."""
    if not case.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on CUDA, not on {case.device}"
    if reason := cuda.missing():
        return reason
    if case.x.dtype == torch.float64 or case.weight.dtype == torch.complex128:
        return "no float64"
    if case.x.numel == 0:
        return "empty x"
    T = case.x.shape[1]
    shared = hardware.shared_memory(hardware.index(case.device))
    if plans.choose(T, T, shared, circular=True) is None:
        return f"takes lengths that are powers of 2, from 256 to some 500,000, not {T}"
    return None


def heuristic(case: Case, regime: str) -> str:
    """FFTs on the chip wherever they can; Inductor generates no code for complex numbers."""
    return "eager" if regime == "compiled" or fft_cannot(case) else "fft"


def _fft() -> Implementation:
    from bakeoff.ops.spectral_filter.fft import fft

    return fft


OP = Op(
    name="spectral_filter",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate(
            "fft",
            load=_fft,
            requires=("triton",),
            supports=fft_cannot,
            traceable=False,  # a compiled region leaves the length open, and this can't take any
            launches=launches,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"x": 1, "weight": 1},
    batched=frozenset({"x"}),
)

register(OP)
