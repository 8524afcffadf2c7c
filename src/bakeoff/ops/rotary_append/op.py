"""The declaration of `rotary_append_`."""

from typing import Any

import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.rotary.reference import rotary_tables
from bakeoff.ops.rotary_append import plain
from bakeoff.ops.rotary_append.reference import reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import needs_native
from bakeoff.select.declare.arguments import INTEGER, Arguments, Tensor
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_OP = "rotary_append_"
_MOST_HEAD = 1024


def relations(case: Case) -> None:
    """Raises ValueError where the tables don't fit, or the caches have no room."""
    (_, T, _, D), half = case.q.shape, case.cos.shape[1]
    if half > D // 2:
        raise ValueError(
            f"{_OP}: cos has {half} columns, expected R/2 with 2 <= R <= D = {D}: one column a rotated pair"
        )
    if case.cos.shape[0] < T:
        raise ValueError(
            f"{_OP}: cos has {case.cos.shape[0]} rows for {T} tokens: pass the rows of these positions, "
            f"cos[at : at + {T}]"
        )
    if case.k_cache.shape[2] < T:
        raise ValueError(
            f"{_OP}: k_cache has {case.k_cache.shape[2]} places, {T} tokens come: make the caches longer"
        )


check = Arguments(
    _OP,
    {
        "q": Tensor("B T H D+"),
        "k": Tensor("B T K D", dtype_of="q"),
        "v": Tensor("as k", dtype_of="q"),
        "k_cache": Tensor("B K S D", dtype_of="q", hint="heads stand before places"),
        "v_cache": Tensor("as k_cache", dtype_of="q"),
        "cos": Tensor("P R/2+", hint="P positions, one column a rotated pair"),
        "sin": Tensor("as cos", dtype_of="cos"),
        "at": Tensor("1", INTEGER, hint="where the first token goes"),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """B, T and the length of the caches rounded up; caches dense."""
    (B, T, _, _), S = case.q.shape, case.k_cache.shape[2]
    B, T = round_rows(B), round_rows(T)
    S = max(T, round_rows(S))
    args: dict[str, Any] = {
        name: with_layout(case.tensors[name], (B, T, *case.tensors[name].shape[2:]), 2) for name in "qkv"
    }
    for name in ("k_cache", "v_cache"):
        K, D = case.k_cache.shape[1], case.k_cache.shape[3]
        args[name] = TensorMeta.dense((B, K, S, D), case.k_cache.dtype)
    for name in ("cos", "sin"):
        args[name] = with_layout(case.tensors[name], (T, case.cos.shape[1]))
    return case.replace(**args)


def cost(case: Case) -> Cost:
    """Read q, k and v, write as much; 3 FLOPs a rotated element."""
    B, T, H, _ = case.q.shape
    moved = 2 * (case.q.nbytes + case.k.nbytes + case.v.nbytes) + case.at.nbytes
    tables = 2 * T * case.cos.shape[1] * case.cos.dtype.itemsize
    return Cost(moved + tables, max(1, 6 * case.cos.shape[1] * B * T * (H + case.k.shape[2])))


def cases() -> list[Case]:
    """A token of this package's models and of a Llama, some tokens, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("llm-med small", 1, 1, 8, 8, 48, 336, fp32),
        _case("llm-med small, 64 rows", 64, 1, 8, 8, 48, 336, bf16),
        _case("llm-med base, 16 rows", 16, 1, 12, 12, 64, 1024, fp32),
        _case("8B Llama, 64 rows", 64, 1, 32, 8, 128, 8192, bf16),
        _case("8 tokens", 4, 8, 8, 2, 96, 2048, fp16),
        _case("partial", 3, 2, 6, 3, 40, 77, fp32, rotated=20),
        _case("odd", 5, 3, 5, 5, 34, 9, bf16),
    ]


def _case(
    name: str, B: int, T: int, H: int, K: int, D: int, S: int, dtype: torch.dtype, rotated: int = 0
) -> Case:
    step = (H + 2 * K) * D  # [q | k | v] of one projection
    q, k = (TensorMeta((B, T, n, D), dtype, (T * step, step, D, 1)) for n in (H, K))
    cache = TensorMeta.dense((B, K, S, D), dtype)
    table = TensorMeta.dense((T, (rotated or D) // 2), torch.float32)
    args: dict[str, Any] = {"q": q, "k": k, "v": k, "k_cache": cache, "v_cache": cache}
    args |= {"cos": table, "sin": table, "at": TensorMeta.dense((1,), torch.int64)}
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Tables of real angles, starting at position 1 so that no row is the identity."""
    if name not in ("cos", "sin"):
        return None
    length, half = meta.shape
    positions = torch.arange(1, length + 1, device=generator.device)
    return rotary_tables(positions, 2 * half, dtype=meta.dtype)[name == "sin"]


def draw_among(name: str, case: Case, generator: torch.Generator) -> torch.Tensor | None:
    """A place from which on all tokens have room."""
    if name != "at":
        return None
    most = case.k_cache.shape[2] - case.q.shape[1] + 1
    return torch.randint(max(most, 1), (1,), generator=generator, dtype=case.at.dtype, device=case.device)


def triton_supports(case: Case) -> str | None:
    """Why the kernel can't take `case`, or None."""
    if reason := needs_native(case, besides=("at",)):
        return reason
    if case.q.shape[-1] > _MOST_HEAD:
        return f"head dimension over {_MOST_HEAD}"
    if any(case.tensors[name].stride[-1] != 1 for name in ("k_cache", "v_cache")):
        return "takes caches whose last dimension is dense"
    return None


def heuristic(case: Case, regime: str) -> str:
    """One kernel in place of three where there is one."""
    del regime
    return "eager" if triton_supports(case) else "triton"


def _triton() -> Implementation:
    from bakeoff.ops.rotary_append.triton import rotary_append

    return rotary_append


OP = Op(
    name=_OP,
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager, has_backward=False, traceable=False),
        Candidate(
            "triton",
            load=_triton,
            supports=triton_supports,
            requires=("triton",),
            has_backward=False,
            traceable=False,
            launches=launches,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"q": 2, "k": 2, "v": 2, "k_cache": 1, "v_cache": 1, "cos": 1, "sin": 1, "at": 1},
    batched=frozenset({"q", "k", "v", "k_cache", "v_cache"}),
    mutates=("k_cache", "v_cache"),
    draw=draw,
    draw_among=draw_among,
    home="bakeoff.ops.rotary_append.op:OP",
)

register(OP)
