"""The declaration of memory_update and of its in-place form: candidates, cost, cases and checks."""

import math
from typing import Any

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.memory_update import plain
from bakeoff.ops.memory_update.reference import memory_update as reference
from bakeoff.ops.memory_update.reference import memory_update_ as in_place_reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import INTEGER, REAL, Arguments, Choice, Number, Tensor
from bakeoff.select.declare.compiled import compiled_candidate
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["IN_PLACE", "MEMORY", "MOMENTUM", "OP"]

MEMORY = ("memory_w1", "memory_b1", "memory_w2", "memory_b2")
MOMENTUM = ("momentum_w1", "momentum_b1", "momentum_w2", "momentum_b2")
GATES = ("lr", "decay", "forget")
_MOST = 1 << 20
_GATE = "pass a tensor of one number for each group, on the device"


_RULES = {
    "k": Tensor("G N D+", hint="one group is k[None]"),
    "v": Tensor("G N V+", dtype_of="k"),
    "memory_w1": Tensor("G H+ D", REAL),
    "memory_b1": Tensor("G H", REAL, dtype_of="memory_w1"),
    "memory_w2": Tensor("G V H", REAL, dtype_of="memory_w1"),
    "memory_b2": Tensor("G V", REAL, dtype_of="memory_w1"),
    **{
        name: Tensor(
            f"as {name.replace('momentum', 'memory')}", REAL, dtype_of="memory_w1", hint="start with zeros"
        )
        for name in MOMENTUM
    },
    **{name: Tensor("G", hint=_GATE, hint_kind=_GATE) for name in GATES},
    "max_norm": Number(least=0.0, optional=True),
    "reduction": Choice(("mean", "token_sum", "sum")),
    "row_weight": Tensor("G N", optional=True, hint="one number for each row"),
}
check = Arguments("memory_update", _RULES)
check_in_place = Arguments(
    "memory_update_", {**_RULES, "skipped": Tensor("G", INTEGER, optional=True, hint=_GATE)}
)


def bucket(case: Case) -> Case:
    """G and N rounded up, features exact; k and v in their layout class's plainest form, the rest dense."""
    G, N, _ = case.k.shape
    rows = {"k": 2, "v": 2, "row_weight": 2}
    plain_form = {}
    for name, meta in case.tensors.items():
        shape = (round_rows(G), round_rows(N)) if name in rows else (round_rows(G),)
        shape = (*shape, *meta.shape[len(shape) :])
        dense = TensorMeta.dense(shape, meta.dtype, grad=meta.requires_grad)
        plain_form[name] = with_layout(meta, shape) if name in ("k", "v") else dense
    return case.replace(**plain_form)


def cost(case: Case) -> Cost:
    """Rows in; memory and momentum in and out; backward as much again, and what arrives for both.

    Five matrix products forward, ten backward.
    """
    G, N, D = case.k.shape
    H, V = case.memory_w1.shape[1], case.v.shape[2]
    state = sum(getattr(case, name).nbytes for name in (*MEMORY, *MOMENTUM))
    rows = case.k.nbytes + case.v.nbytes
    moved, macs = rows + 2 * state, G * N * H * (2 * D + 3 * V)
    if case.needs_grad:
        moved += 2 * rows + 3 * state
        macs += G * N * H * (4 * D + 6 * V)
    return Cost(moved, 2 * macs)


def cases() -> list[Case]:
    """Large chunks of one memory and of several, in each dtype, then every other form once."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        _case("1x2048x512 bf16", 1, 2048, 512, 512, 512, bf16, max_norm=1.0),
        _case("8x2048x512 bf16", 8, 2048, 512, 512, 512, bf16, max_norm=1.0),
        _case("1x2048x512 fp32", 1, 2048, 512, 512, 512, fp32, max_norm=1.0),
        _case("8x2048x512 fp32", 8, 2048, 512, 512, 512, fp32, max_norm=1.0),
        _case("32x512x128 bf16 sum", 32, 512, 128, 256, 128, bf16, reduction="sum", max_norm=1.0),
        _case("64x256x64 bf16 weighted", 64, 256, 64, 64, 64, bf16, reduction="token_sum", weighted=True),
        _case("4x1000x320 fp16", 4, 1000, 320, 320, 192, torch.float16),
        _case("3x333x45 fp32 odd", 3, 333, 45, 77, 33, fp32, reduction="sum", max_norm=2.0, weighted=True),
        _case("1x2048x512 bf16 strided", 1, 2048, 512, 512, 512, bf16, strided=True),
    ]  # fmt: skip


def _case(
    name: str,
    G: int,
    N: int,
    D: int,
    H: int,
    V: int,
    dtype: torch.dtype,
    *,
    max_norm: float | None = None,
    reduction: str = "mean",
    weighted: bool = False,
    strided: bool = False,
) -> Case:
    def dense(*shape: int, of: torch.dtype = torch.float32) -> TensorMeta:
        return TensorMeta.dense(shape, of, grad=True)

    k, v = dense(G, N, D, of=dtype), dense(G, N, V, of=dtype)
    if strided:
        k = TensorMeta(k.shape, dtype, (2 * N * D, 2 * D, 1), True)
        v = TensorMeta(v.shape, dtype, (2 * N * V, 2 * V, 1), True)
    shapes = ((G, H, D), (G, H), (G, V, H), (G, V))
    args: dict[str, Any] = {"k": k, "v": v}
    args |= {n: dense(*shape) for n, shape in zip(MEMORY, shapes, strict=True)}
    args |= {n: dense(*shape) for n, shape in zip(MOMENTUM, shapes, strict=True)}
    args |= {gate: dense(G) for gate in GATES}
    args |= {"max_norm": max_norm, "reduction": reduction}
    return Case(args | {"row_weight": dense(G, N) if weighted else None}, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """A memory that keeps the size of what it reads, a small momentum, so that the gradient shows in its new
    value, and gates within their ranges."""
    shape, device = meta.shape, generator.device
    if name in ("k", "v"):
        return None
    if name == "skipped":
        return torch.zeros(shape, dtype=meta.dtype, device=device)
    if name in (*GATES, "row_weight"):
        low = {"lr": 0.5, "decay": 0.5, "forget": 0.0, "row_weight": 0.0}[name]
        even = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
        return (low + 0.5 * even).to(meta.dtype)
    normal = torch.randn(shape, generator=generator, dtype=meta.dtype, device=device)
    if name in MOMENTUM:
        return 1e-4 * normal
    return normal / math.sqrt(shape[-1]) if len(shape) == 3 else 0.1 * normal


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    reason = needs_native(case, besides=("skipped",))
    if reason is None and 0 in (case.k.numel, case.v.numel):
        return "nothing to learn from"
    if reason is None and max(*case.k.shape[1:], *case.memory_w2.shape[1:]) >= _MOST:
        return f"takes up to {_MOST} rows and features"
    return reason


def in_place_supports(case: Case) -> str | None:
    """Why the Triton kernels can't write over the memory of `case`, or None."""
    strided = [name for name in (*MEMORY, *MOMENTUM) if not getattr(case, name).is_contiguous]
    if case.skipped is not None and not case.skipped.is_contiguous:
        strided.append("skipped")
    return triton_supports(case) or (f"writes contiguous tensors only, not {strided[0]}" if strided else None)


def heuristic(case: Case, regime: str) -> str:
    """The kernels wherever they can run."""
    del regime
    return "triton" if case.device.startswith("cuda") and triton_supports(case) is None else "eager"


def in_place_heuristic(case: Case, regime: str) -> str:
    """The kernels wherever they can run."""
    del regime
    return "triton" if case.device.startswith("cuda") and in_place_supports(case) is None else "eager"


def _triton() -> Implementation:
    from bakeoff.ops.memory_update.triton import memory_update

    return memory_update


def _triton_in_place() -> Implementation:
    from bakeoff.ops.memory_update.triton import in_place

    return in_place


_FEATURES = {
    **dict.fromkeys(("k", "v"), 1),
    **dict(zip((*MEMORY, *MOMENTUM), (2, 1, 2, 1) * 2, strict=True)),
    **dict.fromkeys((*GATES, "row_weight", "skipped"), 0),
}
_GROUPED = frozenset(_FEATURES)

OP = Op(
    name="memory_update",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("manual", plain.manual),
        compiled_candidate(plain.manual),
        kernel_candidate("triton", _triton, triton_supports),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={name: count for name, count in _FEATURES.items() if name != "skipped"},
    batched=_GROUPED - {"skipped"},
    settings=frozenset({"max_norm"}),
    rounded=frozenset(MEMORY),
    draw=draw,
)

IN_PLACE = Op(
    name="memory_update_",
    reference=in_place_reference,
    candidates=(
        Candidate("eager", plain.in_place, has_backward=False, traceable=False),
        Candidate(
            "triton",
            load=_triton_in_place,
            supports=in_place_supports,
            requires=("triton",),
            has_backward=False,
            traceable=False,
            launches=launches,
        ),
    ),
    check=check_in_place,
    bucket=bucket,
    cost=cost,
    cases=lambda: [_forward_only(case) for case in cases()[:4]],
    heuristic=in_place_heuristic,
    features=_FEATURES,
    batched=_GROUPED,
    settings=frozenset({"max_norm"}),
    mutates=(*MEMORY, *MOMENTUM, "skipped"),
    rounded=frozenset(MEMORY),
    draw=draw,
    home="bakeoff.ops.memory_update.op:IN_PLACE",
)


def _forward_only(case: Case) -> Case:
    return case.without_grad().replace(skipped=None)


register(OP)
register(IN_PLACE)
