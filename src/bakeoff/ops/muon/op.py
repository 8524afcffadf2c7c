"""The declaration of muon_: its candidates, cost, cases and checks. One call takes matrices of one shape."""

import math
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.counter import launches
from bakeoff.ops.muon import peers, plain
from bakeoff.ops.muon.reference import muon as reference
from bakeoff.ops.muon.settings import SCALES
from bakeoff.select import Candidate, Case, Cost, Implementation, ListMeta, Op, TensorMeta, register
from bakeoff.select.declare.abilities import NATIVE, needs_native
from bakeoff.select.declare.arguments import Arguments, Choice, Dtypes, Flag, Tensors, refuse_flag
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows

__all__ = ["OP", "REAL", "check_settings", "muon_case"]

_SCALAR = TensorMeta.dense((), torch.float32)
_SETTINGS = {"lr": 1.0, "momentum_decay": 0.95, "weight_decay": 0.1, "maximize": False}
"""Of contests: at a rate of 1 an error of the update shows in the parameter, whatever that is rounded to."""
_SCALARS = ("lr", "clip_coef", "found_inf", "grad_scale", "lr_mult", "sums")
REAL = Dtypes(
    lambda dtype: dtype in (*NATIVE, torch.float64),
    "it takes real floating point tensors of float16, bfloat16, float32 or float64",
)


def muon_case(
    count: int,
    rows: int,
    columns: int,
    device: Any = "cuda",
    dtype: torch.dtype = torch.float32,
    grad: torch.dtype | None = None,
    name: str = "",
    *,
    nesterov: bool = True,
    scale: str = "match_rms",
    guarded: bool = False,
    summed: bool = False,
) -> Case:
    """The case of `count` matrices [rows, columns]: dtypes of parameters and gradients, whether a device
    scalar may skip the step, and whether directions are kept and sums wanted. Momentum is float32 at
    least."""

    def listed(kind: torch.dtype) -> ListMeta:
        return ListMeta(count, count * rows * columns, kind, shape=(rows, columns))

    args: dict[str, Any] = {
        "params": listed(dtype), "grads": listed(grad or dtype),
        "momentum": listed(torch.promote_types(dtype, torch.float32)),
        "direction": listed(torch.bfloat16) if summed else None,
        **_SETTINGS, "nesterov": nesterov, "steps": 5, "scale": scale,
        "clip_coef": None, "found_inf": _SCALAR if guarded else None, "grad_scale": None, "lr_mult": None,
        "sums": TensorMeta.dense((4,), torch.float32) if summed else None,
    }  # fmt: skip
    return Case({name: args[name] for name in OP.params}, str(device), name)


def check_settings(lr: Any, momentum_decay: float, weight_decay: float, steps: int, scale: str) -> None:
    """Raises ValueError for a setting outside its range, TypeError for a flag; a tensor `lr` is not read."""
    lr = 0.0 if isinstance(lr, Tensor | TensorMeta) else lr
    for name, value, top in (
        ("lr", lr, math.inf), ("momentum_decay", momentum_decay, 1.0),
        ("weight_decay", weight_decay, math.inf),
    ):  # fmt: skip
        refuse_flag("muon_", name, value)
        if not isinstance(value, int | float) or not 0.0 <= value < top:
            raise ValueError(f"muon_: {name} must be in [0, {'inf' if top > 1 else 1}), got {value!r}")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= 100:
        raise ValueError(f"muon_: steps must be a whole number from 1 to 100, got {steps!r}; 5 is usual")
    if scale not in SCALES:
        raise ValueError(f"muon_: scale must be one of {', '.join(SCALES)}, got {scale!r}")


def check(case: Case) -> None:
    """Raises ValueError or TypeError, with the fix, when the arguments don't make sense."""
    _check_lists(case)
    check_settings(case.lr, case.momentum_decay, case.weight_decay, case.steps, case.scale)


def _fit(case: Case) -> None:
    """What concerns shapes."""
    for name, meta in case.lists.items():
        if meta.shape is None or len(meta.shape) != 2:
            of = "of several shapes" if meta.shape is None else f"of shape {meta.shape}"
            raise ValueError(f"muon_: {name} are {of}; one call takes matrices of one shape")
        if meta.shape != case.params.shape:
            raise ValueError(f"muon_: {name} have shape {meta.shape}, the parameters {case.params.shape}")


_check_lists = Arguments(
    "muon_",
    {
        "params": Tensors(REAL),
        "grads": Tensors(REAL, like="params"),
        "momentum": Tensors(REAL, like="params"),
        "direction": Tensors(REAL, like="params", optional=True),
        "nesterov": Flag(),
        "scale": Choice(SCALES),
    },
    _fit,
)


def bucket(case: Case) -> Case:
    """The number of matrices rounded up, contiguous, settings at those of contests."""
    lists = {}
    for name, meta in case.lists.items():
        count = round_rows(meta.count)
        lists[name] = ListMeta(count, count * math.prod(meta.shape or ()), meta.dtype, shape=meta.shape)
    return case.replace(
        **lists,
        **_SETTINGS,
        clip_coef=None,
        found_inf=None if case.found_inf is None else _SCALAR,
        grad_scale=None,
        lr_mult=None,
    )


def cost(case: Case) -> Cost:
    """Gradients read once, parameters and momentum read and written. Of a symmetric product [m, m] only one
    half has to be computed: each iteration takes m m n for X X', m m m for A A and 2 m m n for B X."""
    written = [case.params, case.momentum, *([] if case.direction is None else [case.direction])]
    moved = case.grads.nbytes + sum(2 * meta.nbytes for meta in written)
    m, n = sorted(case.params.shape)
    return Cost(moved, case.params.count * case.steps * (3 * m * m * n + m * m * m))


def cases() -> list[Case]:
    """The matrices of a model of 124M parameters, a large one, odd ones, then every other form once."""
    half = torch.bfloat16
    return [
        muon_case(12, 2304, 768, name="124M qkv"),
        muon_case(12, 768, 768, name="124M out"),
        muon_case(24, 2048, 768, name="124M gate, up"),
        muon_case(12, 768, 2048, name="124M down"),
        muon_case(1, 4096, 4096, name="4096"),
        muon_case(3, 77, 1000, name="odd"),
        muon_case(3, 1000, 77, name="odd, tall"),
        muon_case(12, 768, 768, guarded=True, name="124M out, skip"),
        muon_case(12, 768, 2048, nesterov=False, scale="spectral", name="plain momentum, spectral"),
        muon_case(12, 768, 768, summed=True, name="124M out, sums"),
        muon_case(12, 768, 2048, dtype=half, name="124M down bf16"),
    ]


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> Any:
    """A coefficient that clips, no reason to skip, ordinary rates."""
    values = {"clip_coef": 0.37, "found_inf": 0.0, "grad_scale": 4.0, "lr_mult": 0.5, "lr": 1.0, "sums": 0.0}
    if name in values:
        return torch.full(meta.shape, values[name], dtype=meta.dtype, device=generator.device)
    return None


def compiled_supports(case: Case) -> str | None:
    """Why torch.compile can't take `case`, or None."""
    if case.sums is not None:
        return "sums are not part of what is compiled, and would take passes of their own"
    if case.params.numel == 0:
        return "there is nothing to compile for empty matrices"
    return compiler_missing(case)


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    if case.sums is not None or case.direction is not None:
        return "keeps no directions and sums, which would take passes of their own"
    if not all(meta.contiguous for meta in case.lists.values()):
        return "reads matrices row by row: they must be contiguous"
    return needs_native(case, besides=_SCALARS)


def heuristic(case: Case, regime: str) -> str:
    """Ours on CUDA where it can, on an H100 1.3 to 1.7 times as fast as what torch.compile makes; else
    PyTorch's products."""
    del regime
    return "triton" if case.device.startswith("cuda") and triton_supports(case) is None else "eager"


def _triton() -> Implementation:
    from bakeoff.ops.muon.triton import update

    return update


OP = Op(
    name="muon_",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager, has_backward=False, traceable=False),
        Candidate(
            "compiled", plain.compiled, supports=compiled_supports, has_backward=False, traceable=False
        ),
        Candidate(
            "torch",
            peers.torch_muon,
            supports=peers.torch_supports,
            has_backward=False,
            traceable=False,
            baseline=True,
        ),
        Candidate(
            "triton",
            load=_triton,
            supports=triton_supports,
            requires=("triton",),
            has_backward=False,
            traceable=False,
            needs_warmup=True,  # addresses are written to memory that must be there before a capture
            launches=launches,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={},
    batched=frozenset({"params", "grads", "momentum", "direction"}),
    settings=frozenset(_SETTINGS),
    mutates=("params", "momentum", "direction", "sums"),
    draw=draw,
    rounded=frozenset({"grads", "momentum"}),
    home="bakeoff.ops.muon.op:OP",
)

register(OP)
