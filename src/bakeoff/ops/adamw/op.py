"""The declarations of adamw_ and global_norm.

Both take lists of tensors, and selection knows tensors. So a group's case is its summary: N tensors of D
elements each, with the group's number of tensors and total, its dtypes and flags. Contests run on exactly
that, stacked as [N, D] and without side effects; a group then runs the winner's list form.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.counter import launches
from bakeoff.ops.adamw import plain
from bakeoff.ops.adamw.group import Group, Guard, Hyper, join
from bakeoff.ops.adamw.reference import adamw as reference
from bakeoff.ops.adamw.reference import global_norm as norm_reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows

__all__ = ["NORM", "OP", "Norm", "Stacked", "norm_case", "update_case"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_COMPILED = 512


class Stacked:
    """A list implementation (`update`) that can also be called as the contest's op, on stacked copies."""

    def __init__(self, update: Callable[[Group, Hyper], None]) -> None:
        self.update = update

    def __call__(
        self,
        param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, master: Any, clip_coef: Any, found_inf: Any,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
        shared: bool | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        del shared
        group = _group(param, grad, exp_avg, exp_avg_sq, master, step)
        self.update(group, Hyper(lr, beta1, beta2, eps, weight_decay, False, clip_coef, found_inf))
        outputs = [torch.stack(column) for column in (group.params, group.exp_avg, group.exp_avg_sq)]
        if group.master is not None:
            wide = torch.stack(group.master)
            outputs.append(join(outputs[0], wide) if wide.dtype == torch.int16 else wide)
        return tuple(outputs)


def _group(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, master: Any, step: int) -> Group:
    """Copies of the rows of stacked tensors as a group."""
    steps = [torch.full((), float(step), dtype=torch.float32, device=param.device)]
    wide = None if master is None else _rows(master)
    return Group(_rows(param), _rows(grad), _rows(exp_avg), _rows(exp_avg_sq), steps, wide)


def _rows(stacked: Tensor) -> list[Tensor]:
    """Each row in memory of its own, aligned as a model's tensors are."""
    return [row.clone() for row in stacked.unbind(0)]


def prepare(call: Any, args: Sequence[Any]) -> Callable[[], None]:
    """One step after the other on the same group, in place, as an optimizer calls it."""
    param, grad, exp_avg, exp_avg_sq, master, clip_coef, found_inf = args[:7]
    lr, beta1, beta2, eps, weight_decay, step, _ = args[7:]
    group = _group(param, grad, exp_avg, exp_avg_sq, master, step)
    how = Hyper(lr, beta1, beta2, eps, weight_decay, False, clip_coef, found_inf)
    return lambda: call.update(group, how)


class Norm:
    """A list implementation of the norm and its `guard`, callable as the contest's op."""

    def __init__(self, norm: Callable[[Sequence[Tensor]], Tensor], guard: Callable[..., Guard]) -> None:
        self.norm, self.guard = norm, guard

    def __call__(self, grad: Any) -> Tensor:
        return self.norm(list(grad.unbind(0))).reshape(1)


def prepare_norm(call: Any, args: Sequence[Any]) -> Callable[[], Tensor]:
    """The norm of a list that is there already."""
    grads = _rows(args[0])
    found: Callable[[Sequence[Tensor]], Tensor] = call.norm
    return lambda: found(grads)


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
    shared: bool = False,
    name: str = "",
) -> Case:
    """The case of a group: its number of tensors and elements, its dtypes, whether a device scalar scales
    gradients, whether one may skip the step, and whether tensors share memory."""
    shape = (max(tensors, 1), -(-numel // max(tensors, 1)))
    scalar = TensorMeta.dense((), torch.float32)
    args: dict[str, Any] = {
        "param": TensorMeta.dense(shape, dtype),
        "grad": TensorMeta.dense(shape, grad or dtype),
        "exp_avg": TensorMeta.dense(shape, state or dtype),
        "exp_avg_sq": TensorMeta.dense(shape, state or dtype),
        "master": None if master is None else TensorMeta.dense(shape, master),
        "clip_coef": scalar if scaled else None,
        "found_inf": scalar if guarded else None,
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "step": 10,
        "shared": True if shared else None,
    }  # fmt: skip
    return Case(args, str(device), name)


def norm_case(tensors: int, numel: int, device: Any, dtype: torch.dtype, name: str = "") -> Case:
    """The case of a list of gradients."""
    shape = (max(tensors, 1), -(-numel // max(tensors, 1)))
    return Case({"grad": TensorMeta.dense(shape, dtype)}, str(device), name)


def check(case: Case) -> None:
    """Raises ValueError or TypeError, with the fix, when the arguments don't make sense."""
    for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
        value = case.args[name]
        if not isinstance(value, TensorMeta) or not value.dtype.is_floating_point:
            raise TypeError(f"adamw_: {name} must be a real floating point tensor, got {value!r}")
        if value.shape != case.param.shape:
            raise ValueError(
                f"adamw_: {name} has shape {value.shape}, expected the parameter's, {case.param.shape}"
            )
    master = case.master
    if master is not None:
        if master.shape != case.param.shape:
            raise ValueError(f"adamw_: master has shape {master.shape}, expected {case.param.shape}")
        if master.dtype == torch.int16 and case.param.dtype != torch.bfloat16:
            raise TypeError(f"adamw_: int16 remainders extend bfloat16 parameters, not {case.param.dtype}")
        if master.dtype not in (torch.int16, torch.float32):
            raise TypeError(f"adamw_: master is {master.dtype}; it must be float32, or int16 remainders")
    check_hyper(case.lr, case.beta1, case.beta2, case.eps, case.weight_decay)


def check_hyper(lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Raises ValueError for a setting outside its range; a tensor `lr` is not read."""
    for name, value, top in (
        ("lr", 0.0 if isinstance(lr, Tensor) else lr, math.inf), ("beta1", beta1, 1.0), ("beta2", beta2, 1.0),
        ("eps", eps, math.inf), ("weight_decay", weight_decay, math.inf),
    ):  # fmt: skip
        if not isinstance(value, int | float) or not 0.0 <= value < top:
            raise ValueError(
                f"adamw_: {name} must be in [0, {'inf' if top == math.inf else 1}), got {value!r}"
            )


def bucket(case: Case) -> Case:
    """Tensors and elements of each rounded up, settings at their defaults."""
    shape = tuple(round_rows(n) for n in case.param.shape)
    plainest = {
        name: TensorMeta.dense(shape if meta.shape else (), meta.dtype) for name, meta in case.tensors.items()
    }
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "step": 10}
    return case.replace(**plainest, **settings)


def cost(case: Case) -> Cost:
    """Gradients read once, all else read and written: 28 bytes a float32 parameter."""
    written = [case.param, case.exp_avg, case.exp_avg_sq, *([case.master] if case.master is not None else [])]
    moved = case.grad.nbytes + sum(2 * meta.nbytes for meta in written)
    if case.master is not None and case.master.dtype == torch.float32:
        moved -= case.param.nbytes  # a parameter with a float32 master is only written
    return Cost(moved, 15 * case.param.numel)


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
        update_case(148, 124_000_000, "cuda", half, name="124M bf16"),
        update_case(148, 124_000_000, "cuda", half, None, single, single, name="124M bf16 fp32 master"),
        update_case(148, 124_000_000, "cuda", half, None, single, torch.int16, name="124M bf16 remainder"),
    ]


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> Any:
    """Squares for exp_avg_sq, a coefficient that clips, no reason to skip, any remainder."""
    device = generator.device
    if name == "exp_avg_sq":
        return torch.randn(meta.shape, generator=generator, device=device, dtype=torch.float32).square()
    if name == "clip_coef":
        return torch.full(meta.shape, 0.37, device=device)
    if name == "found_inf":
        return torch.zeros(meta.shape, device=device)
    if meta.dtype == torch.int16:
        return torch.randint(
            -(2**15), 2**15, meta.shape, generator=generator, device=device, dtype=torch.int16
        )
    return None


def _one_after_another(case: Case) -> str | None:
    return "tensors share memory, so their updates must run one after another" if case.shared else None


def foreach_supports(case: Case) -> str | None:
    """Why foreach can't take `case`, or None."""
    if case.found_inf is not None:
        return "PyTorch's foreach functions have no select, so they can't skip a step without the host"
    return _one_after_another(case)


def fused_supports(case: Case) -> str | None:
    """Why torch._fused_adamw_ can't take `case`, or None."""
    kinds = {case.exp_avg.dtype, case.grad.dtype, case.param.dtype}
    if case.master is not None:
        kinds = {case.exp_avg.dtype, torch.float32}
    if len(kinds) > 1:
        return "PyTorch's fused kernel wants one dtype for weights, gradients and moments"
    return _one_after_another(case)


def compiled_supports(case: Case) -> str | None:
    """Why torch.compile can't take `case`, or None."""
    if case.param.shape[0] > _MOST_COMPILED:
        return f"compiles for minutes beyond {_MOST_COMPILED} tensors"
    return foreach_supports(case) or compiler_missing(case)


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    for name, meta in case.tensors.items():
        if meta.dtype not in _KERNEL_DTYPES and name != "master":
            return f"computes in float32: takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return _one_after_another(case) if "shared" in case.args else None


def heuristic(case: Case, regime: str) -> str:
    """Ours on CUDA; else PyTorch's fused kernel where it can, else the loop."""
    del regime
    if triton_supports(case) is None:
        return "triton"
    return "loop" if fused_supports(case) else "fused"


def _triton() -> Implementation:
    from bakeoff.ops.adamw.kernels import update

    return Stacked(update)


def _norm_triton() -> Implementation:
    from bakeoff.ops.adamw.kernels import guard, norm

    return Norm(norm, guard)


def _kernels(load: Callable[[], Implementation]) -> Candidate:
    return Candidate(
        "triton",
        load=load,
        supports=triton_supports,
        requires=("triton",),
        has_backward=False,
        traceable=False,
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
        _torch("loop", Stacked(plain.loop)),
        _torch("foreach", Stacked(plain.foreach), foreach_supports),
        _torch("fused", Stacked(plain.fused), fused_supports),
        _torch("compiled", Stacked(plain.compiled), compiled_supports),
        _kernels(_triton),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features=dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq", "master"), 0),
    batched=frozenset({"param", "grad", "exp_avg", "exp_avg_sq", "master"}),
    draw=draw,
    prepare=prepare,
    home="bakeoff.ops.adamw.op:OP",
)

NORM = Op(
    name="global_norm",
    reference=norm_reference,
    candidates=(
        _torch("eager", Norm(plain.norm, plain.guard)),
        _kernels(_norm_triton),
    ),
    check=lambda case: None,
    bucket=lambda case: case.replace(
        grad=TensorMeta.dense([round_rows(n) for n in case.grad.shape], case.grad.dtype)
    ),
    cost=lambda case: Cost(case.grad.nbytes, 2 * case.grad.numel),
    cases=lambda: [
        norm_case(148, 124_000_000, "cuda", torch.float32, "124M fp32"),
        norm_case(148, 124_000_000, "cuda", torch.bfloat16, "124M bf16"),
        norm_case(10_000, 640_000, "cuda", torch.float32, "10,000 tiny fp32"),
    ],
    heuristic=lambda case, regime: "eager" if triton_supports(case) else "triton",
    features={"grad": 0},
    batched=frozenset(),
    prepare=prepare_norm,
    home="bakeoff.ops.adamw.op:NORM",
)

register(OP)
register(NORM)
