"""The declaration of swiglu: its candidates, cost, cases and checks."""

from typing import Any

import torch

from bakeoff.ops.swiglu import peers, plain
from bakeoff.ops.swiglu.reference import swiglu as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import Arguments, Tensor
from bakeoff.select.declare.compiled import compiled_candidate
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_HOST_BOUND = 2**27  # bytes: a forward and its backward that the GPU ends before the host has issued them


def relations(case: Case) -> None:
    """Raises ValueError where gate can't be cut in halves."""
    if case.up is None and case.gate.shape[-1] % 2:
        raise ValueError(
            f"swiglu: gate has shape {case.gate.shape}; without up its last dimension holds both halves, so "
            f"it must be even: pass up, or pad"
        )


check = Arguments(
    "swiglu",
    {
        "gate": Tensor("... F", hint="a single number is gate[None]"),
        "up": Tensor("as gate", optional=True, dtype_of="gate", hint="expand the one that repeats"),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """Rows as one dimension, their number rounded up, every tensor in its layout class's plainest form."""
    width = case.gate.shape[-1]
    shape = (round_rows(case.gate.numel // max(width, 1)), width)
    plain = {name: with_layout(meta, shape) for name, meta in case.tensors.items()}
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """Every tensor once: forward gate, up in, y out; backward dy, gate, up (for dgate) in, gradients out."""
    gate, up = case.gate, case.up
    if up is None:
        half, wants_gate, wants_up = gate.nbytes // 2, gate.requires_grad, gate.requires_grad
    else:
        half, wants_gate, wants_up = gate.nbytes, gate.requires_grad, up.requires_grad
    size = half // gate.dtype.itemsize
    total, flops = 3 * half, 6 * size
    if wants_gate or wants_up:
        total += half * (2 + 2 * wants_gate + wants_up)  # dgate is the one that needs up
        flops += size * (6 + 6 * wants_gate)
    return Cost(total, flops)


def cases() -> list[Case]:
    """MLPs of language models from one token to large batches, packed and separate, then every form once."""
    bf16 = torch.bfloat16
    return [
        _case(24576, 1008, bf16, "packed"),
        _case(24576, 1024, bf16, "packed"),
        _case(49152, 1008, bf16, "packed"),
        _case(8192, 4096, bf16, "packed"),
        _case(16384, 2752, bf16, "packed"),
        _case(256, 1008, bf16, "packed"),
        _case(8192, 4096, bf16),
        _case(8192, 4096, bf16, "halves"),
        _case(1, 4096, bf16),
        _case(8192, 4096, torch.float16, "packed"),
        _case(8192, 4096, torch.float32, "packed"),
        _case(1001, 77, bf16, "packed"),
    ]


def _case(rows: int, features: int, dtype: torch.dtype, form: str = "") -> Case:
    """`form`: "packed" in one tensor, "halves" of one tensor as two, or two tensors."""
    args: dict[str, Any]
    if form == "packed":
        args = {"gate": TensorMeta.dense((rows, 2 * features), dtype, grad=True), "up": None}
    else:
        half = TensorMeta.dense((rows, features), dtype, grad=True)
        if form == "halves":
            half = TensorMeta(half.shape, dtype, (2 * features, 1), True)
        args = {"gate": half, "up": half}
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return Case(args, "cuda", f"{rows}x{features} {short} {form}".strip())


def heuristic(case: Case, regime: str) -> str:
    """The kernels on a GPU; plain PyTorch on the CPU, inside torch.compile, which fuses it with its
    neighbours, and where the host's time decides: PyTorch's own backward is C++."""
    if regime == "compiled" or not case.device.startswith("cuda") or needs_native(case):
        return "eager"
    host_bound = regime == "eager" and case.needs_grad and cost(case).bytes < _HOST_BOUND
    return "eager" if host_bound else "triton"


def _triton() -> Implementation:
    from bakeoff.ops.swiglu.triton import swiglu

    return swiglu


OP = Op(
    name="swiglu",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        compiled_candidate(reference),
        kernel_candidate("triton", _triton),
        Candidate(
            "liger",
            peers.liger,
            supports=peers.liger_supports,
            requires=("liger_kernel", "triton"),
            traceable=False,
        ),
        Candidate(
            "fla",
            peers.fla,
            supports=peers.fla_supports,
            requires=("fla", "triton"),
            traceable=False,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"gate": 1, "up": 1},
    batched=frozenset({"gate", "up"}),
)

register(OP)
