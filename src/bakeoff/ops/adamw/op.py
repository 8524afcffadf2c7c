"""The declarations of adamw_ and global_norm: their candidates, cost, cases and checks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.counter import launches
from bakeoff.ops.adamw import plain
from bakeoff.ops.adamw.reference import adamw as reference
from bakeoff.ops.adamw.reference import global_norm as norm_reference
from bakeoff.ops.adamw.reference import weights_of
from bakeoff.select import Candidate, Case, Cost, Implementation, ListMeta, Op, TensorMeta, register
from bakeoff.select.declare.abilities import NATIVE, needs_native
from bakeoff.select.declare.arguments import Arguments, Dtypes, Tensors, refuse_flag
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_list

__all__ = ["NORM", "OP", "REAL", "check_hyper", "check_lists", "norm_case", "update_case"]

_MOST_COMPILED = 512
_SCALAR = TensorMeta.dense((), torch.float32)
_SUMS = TensorMeta.dense((4,), torch.float32)
_DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}
_NO_LIMITS = {
    "max_norm": None, "skip_nonfinite": False, "found_inf": None, "grad_scale": None, "skipped": None,
}  # fmt: skip
REAL = Dtypes(
    lambda dtype: dtype in (*NATIVE, torch.float64),
    "it takes real floating point tensors of float16, bfloat16, float32 or float64",
)
"""What parameters, gradients and moments may be."""
_WIDER = Dtypes(
    lambda dtype: dtype in (torch.int16, torch.float32), "it must be float32, or int16 remainders"
)


def update_case(
    tensors: int,
    numel: int,
    device: Any,
    dtype: torch.dtype,
    grad: torch.dtype | None = None,
    state: torch.dtype | None = None,
    master: torch.dtype | None = None,
    scaled: bool = False,
    guarded: bool = False,
    name: str = "",
    *,
    summed: bool = False,
) -> Case:
    """The case of a group: its number of tensors and elements, its dtypes, whether a device scalar scales
    gradients, whether one may skip the step, and whether sums are wanted."""

    def listed(kind: torch.dtype | None) -> ListMeta:
        return ListMeta(tensors, numel, kind or dtype)

    args: dict[str, Any] = {
        "params": listed(dtype), "grads": listed(grad), "exp_avg": listed(state), "exp_avg_sq": listed(state),
        "step": ListMeta(tensors, tensors, torch.float32),
        "master": None if master is None else listed(master),
        **_DEFAULTS,
        "clip_coef": _SCALAR if scaled else None, "found_inf": _SCALAR if guarded else None,
        "grad_scale": None, "lr_mult": None, "sums": _SUMS if summed else None,
    }  # fmt: skip
    return Case(args, str(device), name)


def norm_case(tensors: int, numel: int, device: Any, dtype: torch.dtype, name: str = "") -> Case:
    """The case of a list of gradients."""
    return Case({"grads": ListMeta(tensors, numel, dtype), **_NO_LIMITS}, str(device), name)


def check(case: Case) -> None:
    """Raises ValueError or TypeError, with the fix, when the arguments don't make sense."""
    check_lists(case)
    check_hyper(case.lr, case.beta1, case.beta2, case.eps, case.weight_decay)


def _fit(case: Case) -> None:
    """What concerns several lists."""
    if case.exp_avg.dtype != case.exp_avg_sq.dtype:
        raise TypeError(
            f"adamw_: exp_avg is {case.exp_avg.dtype} and exp_avg_sq {case.exp_avg_sq.dtype}; use one dtype "
            f"for both"
        )
    if not isinstance(case.step, ListMeta) or case.step.dtype != torch.float32:
        raise TypeError(f"adamw_: step must be a list of float32 scalar tensors, got {case.said('step')}")
    if case.step.count not in (1, case.params.count) or case.step.numel != case.step.count:
        raise ValueError(
            f"adamw_: {case.step.count} steps; pass one for all parameters, or {case.params.count}"
        )
    if case.master is not None and case.master.dtype == torch.int16 and case.params.dtype != torch.bfloat16:
        raise TypeError(f"adamw_: int16 remainders extend bfloat16 parameters, not {case.params.dtype}")


check_lists = Arguments(
    "adamw_",
    {
        "params": Tensors(REAL),
        "grads": Tensors(REAL, like="params"),
        "exp_avg": Tensors(REAL, like="params"),
        "exp_avg_sq": Tensors(REAL, like="params"),
        "master": Tensors(_WIDER, like="params", optional=True),
    },
    _fit,
)


def check_hyper(lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Raises ValueError for a setting outside its range, TypeError for a flag; a tensor `lr` is not read."""
    lr = 0.0 if isinstance(lr, Tensor | TensorMeta) else lr
    for name, value, top in (
        ("lr", lr, math.inf), ("beta1", beta1, 1.0), ("beta2", beta2, 1.0),
        ("eps", eps, math.inf), ("weight_decay", weight_decay, math.inf),
    ):  # fmt: skip
        refuse_flag("adamw_", name, value)
        if not isinstance(value, int | float) or not 0.0 <= value < top:
            raise ValueError(
                f"adamw_: {name} must be in [0, {'inf' if top == math.inf else 1}), got {value!r}"
            )


def bucket(case: Case) -> Case:
    """Tensors and elements rounded up, a counter each, settings at their defaults."""
    lists = {name: round_list(meta) for name, meta in case.lists.items()}
    count = lists["params"].count
    lists["step"] = ListMeta(count, count, torch.float32)
    scaled = case.clip_coef is not None or case.grad_scale is not None
    return case.replace(
        **lists,
        **_DEFAULTS,
        clip_coef=_SCALAR if scaled else None,
        found_inf=None if case.found_inf is None else _SCALAR,
        grad_scale=None,
        lr_mult=None,
    )


def cost(case: Case) -> Cost:
    """Gradients read once, all else read and written: 28 bytes a float32 parameter."""
    written = [case.params, case.exp_avg, case.exp_avg_sq, *([] if case.master is None else [case.master])]
    moved = case.grads.nbytes + sum(2 * meta.nbytes for meta in written)
    if case.master is not None and case.master.dtype == torch.float32:
        moved -= case.params.nbytes  # a parameter with a float32 master is only written
    return Cost(moved, 15 * case.params.numel)


def cases() -> list[Case]:
    """The benchmark grid: model sizes in float32, then every other form once."""
    single, half = torch.float32, torch.bfloat16
    return [
        update_case(84, 45_000_000, "cuda", single, name="45M fp32"),
        update_case(148, 124_000_000, "cuda", single, name="124M fp32"),
        update_case(148, 124_000_000, "cuda", single, scaled=True, name="124M fp32 clip"),
        update_case(
            148, 124_000_000, "cuda", single, scaled=True, guarded=True, name="124M fp32 clip + skip"
        ),
        update_case(292, 354_000_000, "cuda", single, name="354M fp32"),
        update_case(10_000, 640_000, "cuda", single, name="10,000 tiny fp32"),
        update_case(148, 124_000_000, "cuda", single, name="124M fp32 sums", summed=True),
        update_case(148, 124_000_000, "cuda", half, name="124M bf16"),
        update_case(148, 124_000_000, "cuda", half, None, single, single, name="124M bf16 fp32 master"),
        update_case(148, 124_000_000, "cuda", half, None, single, torch.int16, name="124M bf16 remainder"),
    ]


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> Any:
    """Squares for exp_avg_sq, counts, a coefficient that clips, no reason to skip, any remainder."""
    device = generator.device
    values = {
        "clip_coef": 0.37,
        "found_inf": 0.0,
        "grad_scale": 4.0,
        "lr_mult": 0.5,
        "lr": 1e-3,
        "skipped": 5,
    }
    if name in values:
        return torch.full(meta.shape, values[name], dtype=meta.dtype, device=device)
    if name == "exp_avg_sq":
        return torch.randn(meta.shape, generator=generator, device=device, dtype=torch.float32).square()
    if name == "step":
        return torch.randint(0, 50, meta.shape, generator=generator, device=device).float()
    if meta.dtype == torch.int16:
        return torch.randint(
            -(2**15), 2**15, meta.shape, generator=generator, device=device, dtype=torch.int16
        )
    return None


def foreach_supports(case: Case) -> str | None:
    """Why foreach can't take `case`, or None."""
    if case.found_inf is not None:
        return "PyTorch's foreach functions have no select, so they can't skip a step without the host"
    return None


def fused_supports(case: Case) -> str | None:
    """Why torch._fused_adamw_ can't take `case`, or None."""
    kinds = {case.exp_avg.dtype, case.grads.dtype, case.params.dtype}
    if case.master is not None:
        kinds = {case.exp_avg.dtype, torch.float32}
    if len(kinds) > 1:
        return "PyTorch's fused kernel wants one dtype for weights, gradients and moments"
    return None


def compiled_supports(case: Case) -> str | None:
    """Why torch.compile can't take `case`, or None."""
    if case.params.count > _MOST_COMPILED:
        return f"compiles for minutes beyond {_MOST_COMPILED} tensors"
    if case.sums is not None:
        return "sums are not part of what is compiled, and would take passes of their own"
    return foreach_supports(case) or compiler_missing(case)


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    scalars = ("lr", "clip_coef", "found_inf", "grad_scale", "lr_mult", "skipped", "sums")
    return needs_native(case, besides=("master", *scalars))


def heuristic(case: Case, regime: str) -> str:
    """Ours on CUDA; else PyTorch's fused kernel where it can, else the loop."""
    del regime
    if case.device.startswith("cuda") and triton_supports(case) is None:
        return "triton"
    return "loop" if fused_supports(case) else "fused"


def norm_heuristic(case: Case, regime: str) -> str:
    """Ours on CUDA, else PyTorch's foreach functions."""
    del regime
    return "triton" if case.device.startswith("cuda") and triton_supports(case) is None else "eager"


def _weights(args: Any) -> list[Tensor]:
    return weights_of(args["params"], args["master"])


def _triton() -> Implementation:
    from bakeoff.ops.adamw.triton import update

    return update


def _norm_triton() -> Implementation:
    from bakeoff.ops.adamw.triton import norm

    return norm


def _kernels(load: Callable[[], Implementation]) -> Candidate:
    return Candidate(
        "triton",
        load=load,
        supports=triton_supports,
        requires=("triton",),
        has_backward=False,
        traceable=False,
        needs_warmup=True,  # addresses are written to memory that must be there before a capture
        launches=launches,
    )


def _torch(
    name: str, call: Implementation, supports: Callable[[Case], str | None] = lambda case: None
) -> Candidate:
    return Candidate(name, call, supports=supports, has_backward=False, traceable=False)


OP = Op(
    name="adamw_",
    reference=reference,
    candidates=(
        _torch("loop", plain.loop),
        _torch("foreach", plain.foreach, foreach_supports),
        _torch("fused", plain.fused, fused_supports),
        _torch("compiled", plain.compiled, compiled_supports),
        _kernels(_triton),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={},
    batched=frozenset({"params", "grads", "exp_avg", "exp_avg_sq", "step", "master"}),
    settings=frozenset(_DEFAULTS),
    mutates=("params", "exp_avg", "exp_avg_sq", "step", "master", "sums"),
    stands_for={"master": _weights},
    draw=draw,
    home="bakeoff.ops.adamw.op:OP",
)

NORM = Op(
    name="global_norm",
    reference=norm_reference,
    candidates=(_torch("eager", plain.norm), _kernels(_norm_triton)),
    check=Arguments(
        "global_norm",
        {"grads": Tensors(REAL)},
        lambda case: refuse_flag("global_norm", "max_norm", case.max_norm),
    ),
    bucket=lambda case: case.replace(grads=round_list(case.grads), **_NO_LIMITS),
    cost=lambda case: Cost(case.grads.nbytes, 2 * case.grads.numel),
    cases=lambda: [
        norm_case(148, 124_000_000, "cuda", torch.float32, "124M fp32"),
        norm_case(148, 124_000_000, "cuda", torch.bfloat16, "124M bf16"),
        norm_case(10_000, 640_000, "cuda", torch.float32, "10,000 tiny fp32"),
    ],
    heuristic=norm_heuristic,
    features={},
    batched=frozenset(),
    settings=frozenset({"max_norm", "skip_nonfinite"}),
    mutates=("skipped",),
    draw=draw,
    home="bakeoff.ops.adamw.op:NORM",
)

register(OP)
register(NORM)
