"""The declaration of dilated_attention: its candidates, cost, cases and checks."""

import itertools
import math
import reprlib
import warnings
from functools import partial
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.attention_backends.scale import check_scale
from bakeoff.kernels import cuda
from bakeoff.kernels.counter import launches
from bakeoff.ops.dilated_attention import branches, plain
from bakeoff.ops.dilated_attention.reference import Pattern, numbers, pattern_of
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import INTEGER, Arguments, Choice, Flag, Tensor
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP", "checked_pattern", "warn_of_unreachable"]

_OP = "dilated_attention"
_MOST = 2**31 - 1  # kernels count tokens in int32
_warned: set[Pattern] = set()


def relations(case: Case) -> None:
    """Raises ValueError for branches, phases, heads, documents or scales that make no sense."""
    H, heads = case.q.shape[2], case.k.shape[2]
    if H % heads:
        raise ValueError(
            f"{_OP}: {H} heads of q and {heads} of k: every kv head serves equally many heads, so repeat or "
            f"drop heads of k until their number divides {H}"
        )
    check_scale(_OP, case.scale, case.said("scale"))
    if case.cu_seqlens is not None and case.q.shape[0] != 1:
        raise ValueError(
            f"{_OP}: packed documents come as one row, q has {case.q.shape[0]}; pass q.flatten(0, 1)[None] "
            f"and cu_seqlens over the whole"
        )
    pattern = checked_pattern(case.segments, case.rates, case.phase, heads)
    if case.phase in ("mod", "block"):  # a table is the caller's own choice
        warn_of_unreachable(pattern, heads)


def checked_pattern(segments: str, rates: str, phase: str, heads: int) -> Pattern:
    """The branches of a call for `heads` kv heads, from its sizes and phases as text.

    Raises ValueError or TypeError for branches and phases that make no sense.
    """
    try:
        branches = numbers(segments), numbers(rates)
    except (TypeError, ValueError):
        given = f"segments {reprlib.repr(segments)} and rates {reprlib.repr(rates)}"
        raise TypeError(
            f"{_OP}: {given}; pass tuples of whole numbers, such as (2048, 8192), (1, 4)"
        ) from None
    _check_branches(*branches)
    try:
        pattern = pattern_of(segments, rates, phase, heads)
    except (TypeError, ValueError):
        raise ValueError(
            f"{_OP}: phase is {reprlib.repr(phase)}, expected 'mod', 'block' or a table of whole numbers, a "
            f"row for each branch with a phase for each kv head"
        ) from None
    _check_phases(pattern, heads)
    return pattern


def _check_branches(segments: tuple[int, ...], rates: tuple[int, ...]) -> None:
    if not segments or len(segments) != len(rates):
        raise ValueError(
            f"{_OP}: {len(segments)} segments and {len(rates)} rates; each branch has one of both, and there "
            f"is at least one branch"
        )
    for name, sizes in (("segments", segments), ("rates", rates)):
        if min(sizes) < 1:
            raise ValueError(f"{_OP}: {name} are {sizes}; each must be at least 1")
    if max(segments) > _MOST:
        raise ValueError(
            f"{_OP}: segments are {segments}, at most {_MOST} is possible; one as long as the row is the row"
        )
    if any(a >= b for a, b in itertools.pairwise(segments)):
        raise ValueError(f"{_OP}: segments are {segments}; order the branches so that segments increase")
    if any(a > b for a, b in itertools.pairwise(rates)):
        raise ValueError(
            f"{_OP}: rates are {rates}; they must not decrease while segments increase: order both"
        )
    for w, r in zip(segments, rates, strict=True):
        if r > w:
            raise ValueError(
                f"{_OP}: rate {r} is above its segment {w}, so some phases select nothing; pass a rate up "
                f"to {w} or a longer segment"
            )


def _check_phases(pattern: Pattern, heads: int) -> None:
    shape = [len(row) for row in pattern.phases]
    if shape != [heads] * len(pattern.rates):
        raise ValueError(
            f"{_OP}: the table of phases has rows of {shape}, expected {len(pattern.rates)} rows (one for "
            f"each branch) of {heads} (one for each kv head)"
        )
    for rate, row in zip(pattern.rates, pattern.phases, strict=True):
        if not all(0 <= phase < rate for phase in row):
            raise ValueError(f"{_OP}: phases {row} of the branch with rate {rate} must lie in 0..{rate - 1}")


def warn_of_unreachable(pattern: Pattern, heads: int) -> None:
    """Warns once of a pattern: tokens that no head of a branch selects are out of that branch's reach in
    every layer alike."""
    if pattern in _warned:
        return
    _warned.add(pattern)
    for w, r, row in zip(*pattern, strict=True):
        missing = 1 - len(set(row)) / r
        if missing:
            warnings.warn(
                f"{_OP}: {missing:.1%} of all tokens are selected by no head in the branch with segment {w} "
                f"and rate {r} ({heads} kv heads: phases {sorted(set(row))}). Give layers their own phases: "
                f"phase=phase_table(rates, {heads}, layer=layer)",
                stacklevel=2,
            )


check = Arguments(
    _OP,
    {
        "q": Tensor("B T H D+", hint="one sequence is q[None]"),
        "k": Tensor("B T Hk+ D", dtype_of="q", hint="repeat k over the batch, or pad it to q's length"),
        "v": Tensor("as k", dtype_of="q"),
        "causal": Flag(),
        "combine_grad": Choice(("exact", "detached")),
        "cu_seqlens": Tensor("N+", INTEGER, optional=True),
        "return_lse": Flag(),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """B, T and the number of documents rounded up, heads exact, each tensor in its layout's plainest form."""
    (B, T), args = case.q.shape[:2], {}
    B, T = (B if case.cu_seqlens is not None else round_rows(B)), round_rows(T)
    for name in ("q", "k", "v"):
        meta = getattr(case, name)
        args[name] = with_layout(meta, (B, T, *meta.shape[2:]), features=2)
    if case.cu_seqlens is not None:
        args["cu_seqlens"] = TensorMeta.dense((round_rows(case.cu_seqlens.shape[0]),), case.cu_seqlens.dtype)
    return case.replace(**args)


def pairs(case: Case) -> int:
    """How many (query, key) pairs of one kv head's queries there are in all branches and sequences."""
    B, T, H, _ = case.q.shape
    heads: int = case.k.shape[2]
    pattern = pattern_of(case.segments, case.rates, case.phase, heads)
    total = 0
    for w, r, row in zip(*pattern, strict=True):
        for phase in row:
            for length, count in ((min(w, T), T // min(w, T) if T else 0), (T % min(w, T) if T else 0, 1)):
                rows = max(0, -(-(length - phase) // r))
                total += count * (rows * (rows + 1) // 2 if case.causal else rows * rows)
    return int(B * (H // heads) * total)


def cost(case: Case) -> Cost:
    """Each tensor once: forward q, k, v in, y and lse out; backward also dy in, gradients out. FLOPs of the
    products over the pairs that count: 2 of them forward, 5 backward."""
    q, k = case.q, case.k
    flops, lse = 4 * q.shape[-1] * pairs(case), 4 * math.prod(q.shape[:3])
    documents = case.cu_seqlens.nbytes if case.cu_seqlens is not None else 0
    total = 2 * q.nbytes + 2 * k.nbytes + lse + documents
    if case.needs_grad:
        total += 4 * q.nbytes + 4 * k.nbytes + lse
        flops += flops * 5 // 2
    return Cost(total, flops)


def cases() -> list[Case]:
    """Language models from short to long, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    short, long = "2048,4096,8192", "2048,4096,8192,16384,32768"
    return [
        _case("1x8192x16x64", 1, 8192, 16, 64, bf16, short, "1,2,4"),
        _case("1x8192x16x64 causal", 1, 8192, 16, 64, bf16, short, "1,2,4", causal=True),
        _case("1x131072x16x128", 1, 131072, 16, 128, bf16, long, "1,2,4,8,16"),
        _case("1x131072x16x128 causal", 1, 131072, 16, 128, bf16, long, "1,2,4,8,16", causal=True),
        _case("4x2048x8x64 causal", 4, 2048, 8, 64, bf16, "256,1024", "1,4", causal=True),
        _case("slide encoder d48", 1, 10000, 16, 48, fp16, "1024,5792,32768", "1,2,4"),
        _case("grouped queries", 2, 4096, 16, 128, bf16, "1024,4096", "1,2", kv=4, causal=True),
        _case("lse", 2, 4096, 8, 64, bf16, "1024,4096", "1,2", lse=True),
        _case("detached", 2, 4096, 8, 64, bf16, "1024,4096", "1,2", combine_grad="detached"),
        _case("blocks of heads", 2, 4096, 8, 96, bf16, "1024,4096", "1,4", phase="block"),
        _case("documents", 1, 8192, 8, 64, bf16, "1024,4096", "1,2", documents=17, causal=True),
        _case("fp32", 2, 2048, 8, 64, fp32, "512,2048", "1,2"),
        _case("odd", 3, 1001, 5, 40, bf16, "100,333", "1,3", causal=True),
        _case("rows unselected", 2, 1024, 4, 64, bf16, "512,1024", "2,4", causal=True),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    H: int,
    D: int,
    dtype: torch.dtype,
    segments: str,
    rates: str,
    *,
    kv: int = 0,
    causal: bool = False,
    phase: str = "mod",
    combine_grad: str = "exact",
    documents: int = 0,
    lse: bool = False,
) -> Case:
    shared = TensorMeta.dense((B, T, kv or H, D), dtype, grad=True)
    args: dict[str, Any] = {
        "q": TensorMeta.dense((B, T, H, D), dtype, grad=True),
        "k": shared,
        "v": shared,
        "segments": segments,
        "rates": rates,
        "causal": causal,
        "phase": phase,
        "combine_grad": combine_grad,
        "cu_seqlens": TensorMeta.dense((documents,), torch.int32) if documents else None,
        "scale": None,
        "return_lse": lse,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Documents of 0 to 1,000 tokens; what lies behind the last belongs to none."""
    if name != "cu_seqlens":
        return None
    lengths = torch.randint(1000, meta.shape, generator=generator, dtype=meta.dtype, device=generator.device)
    return (lengths.cumsum(0) - lengths[0]).to(meta.dtype)


def fused_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    reason = needs_native(case, besides=("cu_seqlens",))
    if reason is None and case.q.shape[-1] > 256:
        return f"takes heads up to 256 wide, not {case.q.shape[-1]}"
    return reason


def cuda_supports(case: Case) -> str | None:
    """Why the CUDA C++ kernels can't take `case`, or None."""
    if reason := cuda.missing() or fused_supports(case):
        return reason
    if case.combine_grad != "exact" and case.needs_grad:
        return "has exact gradients alone"
    if max(meta.numel for meta in case.tensors.values()) >= 1 << 31:
        return "takes up to 2^31 elements"
    older = hardware.index(case.device) >= 0 and not hardware.native_bf16(case.device)
    if older and case.q.dtype == torch.bfloat16:
        return "rounds to bfloat16 by an instruction that this GPU lacks (compute capability 8.0 has it)"
    return None


def hopper_supports(case: Case) -> str | None:
    """Why the kernels for NVIDIA's Hopper can't take `case`, or None."""
    device = hardware.index(case.device)
    if device < 0 or torch.version.hip or hardware.capability(device)[0] != 9:
        return "runs on NVIDIA GPUs of compute capability 9.0 alone"
    if case.cu_seqlens is not None:
        return "takes no packed documents"
    if reason := needs_native(case):
        return reason
    D, T = case.q.shape[-1], case.q.shape[1]
    if case.q.dtype == torch.float32 or D > 128 or D % 8:
        return f"takes float16 and bfloat16, heads of 8 to 128 in steps of 8; not {case.q.dtype}, {D}"
    pattern = pattern_of(case.segments, case.rates, case.phase, case.k.shape[2])
    if pattern.rates[0] > 1:
        return f"takes a first branch of rate 1, which selects every row, not {pattern.rates[0]}"
    if not branches.even(pattern, T):
        return "takes segments that divide the length, and rates that divide segments"
    return None


def mixed_supports(case: Case, backend: str = "cudnn") -> str | None:
    """Why those kernels' forward and the backward of `backend` can't take `case`, or None."""
    if not case.needs_grad:
        return "is the candidate hopper where no gradient is needed"
    if case.combine_grad != "exact":
        return "has exact gradients alone"
    return hopper_supports(case) or branches.supports(case, backend)


def heuristic(case: Case, regime: str) -> str:
    """Of many keys, forward alone, the kernels for Hopper: at 131,072 tokens they take 0.7 to 0.8 of cuDNN's
    time on an H100, and at 8,192 a sixth of what cuDNN's calls take the host. With gradients cuDNN's backward
    where every branch is one call and the host doesn't count, as rows are long or calls captured: behind
    Hopper's forward 0.67 to 0.9 of the fused kernels' time on an H100, 0.89 to 0.92 of what cuDNN takes for
    both. The fused kernels elsewhere: uneven lengths, documents, few keys, inside
    torch.compile, where code around the branches isn't compiled once more. Where Triton can't compile, CUDA
    C++. Plain PyTorch where no branch is dense: there verification on an H200 rejected the fused kernels
    once."""
    if fused_supports(case):
        return "eager"
    if hardware.without_triton(case.device):
        return "eager" if cuda_supports(case) else "cuda"
    pattern = pattern_of(case.segments, case.rates, case.phase, case.k.shape[2])
    if pattern.rates[0] > 1:
        return "eager"
    T = case.q.shape[1]
    keys = min(min(w, T) // r for w, r in zip(pattern.segments, pattern.rates, strict=True))
    if keys < 1024 or regime == "compiled":
        return "fused"
    if not case.needs_grad and hopper_supports(case) is None:
        return "hopper"
    if (T < 32768 and regime != "graph") or not branches.even(pattern, T) or branches.supports(case, "cudnn"):
        return "fused"
    return "cudnn" if mixed_supports(case) else "hopper_cudnn"


def _fused() -> Implementation:
    from bakeoff.ops.dilated_attention.triton import fused

    return fused


def _hopper() -> Implementation:
    from bakeoff.ops.dilated_attention.hopper import hopper

    return hopper


def _hopper_cudnn() -> Implementation:
    from bakeoff.ops.dilated_attention.mixed import hopper_cudnn

    return hopper_cudnn


def _hopper_flash_attn_4() -> Implementation:
    from bakeoff.ops.dilated_attention.mixed import hopper_flash_attn_4

    return hopper_flash_attn_4


def _cuda() -> Implementation:
    from bakeoff.ops.dilated_attention.cuda.launch import cuda

    return cuda


def _flash_attn(name: str, call: Implementation, *packages: str) -> Candidate:
    """Branches by one of the flash-attn packages, whose gradient of q is added up in any order, as that of
    PyTorch's own kernels is."""
    return Candidate(
        name,
        call,
        supports=partial(branches.supports, name=name),
        requires=packages,
        deterministic=False,
        min_capability=(8, 0) if name.endswith("2") else (9, 0),
    )


OP = Op(
    name=_OP,
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager, deterministic=False, heeds_determinism=True),
        Candidate(
            "flash",
            branches.flash,
            supports=partial(branches.supports, name="flash"),
            deterministic=False,
            heeds_determinism=True,
            min_capability=(8, 0),
        ),
        Candidate(
            "cudnn",
            branches.cudnn,
            supports=partial(branches.supports, name="cudnn"),
            deterministic=False,
            min_capability=(8, 0),
        ),
        Candidate(
            "efficient",
            branches.efficient,
            supports=partial(branches.supports, name="efficient"),
            deterministic=False,
        ),
        _flash_attn("flash_attn_2", branches.flash_attn_2, "flash_attn", "flash_attn_2_cuda"),
        _flash_attn("flash_attn_3", branches.flash_attn_3, "flash_attn_interface"),
        _flash_attn("flash_attn_4", branches.flash_attn_4, "flash_attn", "cutlass"),
        Candidate(
            "flex",
            branches.flex,
            supports=branches.flex_supports,
            requires=("triton",),
            traceable=False,
            all_compiled=True,
            deterministic=False,  # heads that are shared add up their gradients in any order
        ),
        Candidate(
            "flex_flash",
            branches.flex_flash,
            supports=partial(branches.flex_supports, backend="FLASH"),
            requires=("triton", "flash_attn", "cutlass"),
            traceable=False,
            all_compiled=True,
            deterministic=False,
            min_capability=(9, 0),
        ),
        kernel_candidate("fused", _fused, fused_supports),
        kernel_candidate("hopper", _hopper, hopper_supports),
        kernel_candidate("hopper_cudnn", _hopper_cudnn, mixed_supports, deterministic=False),
        kernel_candidate(
            "hopper_flash_attn_4",
            _hopper_flash_attn_4,
            partial(mixed_supports, backend="flash_attn_4"),
            deterministic=False,
            requires=("triton", "flash_attn", "cutlass"),
        ),
        Candidate("cuda", load=_cuda, supports=cuda_supports, launches=launches),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"q": 2, "k": 2, "v": 2},
    batched=frozenset({"q", "k", "v"}),
    draw=draw,
    settings=frozenset({"scale"}),
    averages=True,
)

register(OP)
