"""The declaration of attention: its candidates, cost, cases and checks."""

from functools import partial
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.attention_backends.scale import check_scale
from bakeoff.kernels.counter import launches
from bakeoff.ops.attention import peers, plain, pytorch
from bakeoff.ops.attention.plain import FEW
from bakeoff.ops.attention.reference import attention as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import needs_native
from bakeoff.select.declare.arguments import INTEGER, Arguments, Flag, Tensor
from bakeoff.select.declare.compiled import compiled, compiler_missing
from bakeoff.select.declare.key import layout, round_rows, with_layout

__all__ = ["OP"]

_OP = "attention"


def relations(case: Case) -> None:
    """Raises ValueError or TypeError for heads, windows, scales, documents or lengths that make no sense."""
    (B, T, H, _), (S, K), window = case.q.shape, case.k.shape[1:3], case.window
    if H % K:
        raise ValueError(
            f"{_OP}: {H} heads of q and {K} of k: every kv head serves equally many heads, so repeat or drop "
            f"heads of k until their number divides {H}"
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"{_OP}: window is {case.said('window')}, expected a whole number or None")
    if window is not None and (window < 1 or not case.causal):
        raise ValueError(
            f"{_OP}: window={window} with causal={case.causal}; a window is how many keys a query sees, "
            f"itself the last of them: at least 1, with causal=True"
        )
    check_scale(_OP, case.scale, case.said("scale"))
    if case.cu_seqlens is None:
        return
    if case.lengths is not None:
        raise ValueError(f"{_OP}: cu_seqlens and lengths exclude each other: packed rows have no cache")
    if B != 1 or T != S:
        raise ValueError(
            f"{_OP}: packed documents come as one row, queries and keys of one length; q has {B} rows of {T} "
            f"and k has {S} positions: pass q.flatten(0, 1)[None], k and v alike, and cu_seqlens over the "
            f"whole"
        )


check = Arguments(
    _OP,
    {
        "q": Tensor("B T H D+", hint="one sequence is q[None]"),
        "k": Tensor("B S Hk+ D", dtype_of="q", hint="one sequence is k[None]; expand k over the batch"),
        "v": Tensor("as k", dtype_of="q", hint="pad v, or k and q, to one width of heads"),
        "causal": Flag(),
        "cu_seqlens": Tensor("N+", INTEGER, optional=True),
        "lengths": Tensor("B", INTEGER, optional=True, hint="one number for each row of q"),
    },
    relations,
)


def _laid_out(meta: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    """`meta` at another shape in its layout's plainest form; what isn't [B, T, H, D] or a part of wider rows
    counts as [B, H, T, D] in memory, as caches lie."""
    if layout(meta, 2) != "other":
        return with_layout(meta, shape, features=2)
    B, T, H, D = shape
    b, h, t, d = TensorMeta.dense((B, H, T, D), meta.dtype).stride
    return TensorMeta(shape, meta.dtype, (b, t, h, d), meta.requires_grad)


def bucket(case: Case) -> Case:
    """B, T, S and the number of documents rounded up, heads exact, each tensor in its layout's plainest form.

    Whether T is below, at or above S stays: what is made for whole rows isn't for those that grow."""
    (B, T), S, args = case.q.shape[:2], case.k.shape[1], {}
    rows, queries, keys = round_rows(B), round_rows(T), round_rows(S)
    if T < S and queries >= keys:
        keys = round_rows(queries + 1)
    if T > S and keys >= queries:
        queries = round_rows(keys + 1)
    if case.cu_seqlens is not None:
        rows = B
        args["cu_seqlens"] = TensorMeta.dense((round_rows(case.cu_seqlens.shape[0]),), case.cu_seqlens.dtype)
    if case.lengths is not None:
        args["lengths"] = TensorMeta.dense((rows,), case.lengths.dtype)
    for name, length in (("q", queries), ("k", keys), ("v", keys)):
        meta = getattr(case, name)
        args[name] = _laid_out(meta, (rows, length, *meta.shape[2:]))
    return case.replace(**args)


def pairs(case: Case) -> int:
    """How many (query, key) pairs of one head there are: of rows that are full, and of documents that are
    equally long, as nobody knows what lengths and borders hold."""
    (B, T), S = case.q.shape[:2], case.k.shape[1]
    if case.cu_seqlens is not None:
        B = max(1, case.cu_seqlens.shape[0] - 1)
        T = S = -(-T // B)
    if not case.causal:
        return int(B * T * S)
    window = S if case.window is None else min(S, case.window)
    low, high = max(0, S - T + 1), S  # keys up to its own place that the first and the last query have
    full = max(0, high - max(low, window) + 1)  # queries whose whole window there is
    short = range(low, max(low, min(high + 1, window)))
    return int(B * (full * window + sum(short)))


def cost(case: Case) -> Cost:
    """Each tensor once: forward q, k, v in, y out; backward these, y and dy in, gradients out. FLOPs of the
    products over the pairs that count: 2 of them forward, 5 backward."""
    q, k = case.q, case.k
    flops = 4 * q.shape[-1] * q.shape[2] * pairs(case)
    extra = sum(case.tensors[name].nbytes for name in ("cu_seqlens", "lengths") if name in case.tensors)
    total = 2 * q.nbytes + 2 * k.nbytes + extra
    if case.needs_grad:
        total += 4 * q.nbytes + 4 * k.nbytes
        flops += flops * 5 // 2
    return Cost(total, max(1, flops))


def cases() -> list[Case]:
    """Training of language models, then decoding, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cached = {"grad": False, "cached": True}
    return [
        _case("llm-med small", 48, 512, 8, 48, bf16),
        _case("llm-med base", 32, 1024, 12, 64, bf16),
        _case("8x1024x8x64 causal", 8, 1024, 8, 64, bf16),
        _case("4x4096x16x128 causal", 4, 4096, 16, 128, bf16),
        _case("4x4096x16x128 forward", 4, 4096, 16, 128, bf16, grad=False),
        _case("8x1024x8x64 full", 8, 1024, 8, 64, bf16, causal=False),
        _case("grouped queries", 2, 4096, 32, 128, bf16, kv=8),
        _case("window", 2, 8192, 16, 128, bf16, window=1024),
        _case("documents", 1, 16384, 16, 128, bf16, documents=17),
        _case("decode 1x1024x8x48", 1, 1, 8, 48, bf16, S=1024, **cached),
        _case("decode 64x1024x8x48", 64, 1, 8, 48, bf16, S=1024, **cached),
        _case("decode 1x8192x32/8x128", 1, 1, 32, 128, bf16, S=8192, kv=8, **cached),
        _case("decode 64x8192x32/8x128", 64, 1, 32, 128, bf16, S=8192, kv=8, **cached),
        _case("decode fp32", 4, 1, 8, 48, fp32, S=1024, **cached),
        _case("decode 8 queries, window", 4, 8, 8, 96, fp16, S=2048, kv=2, window=500, **cached),
        _case("behind a prefix", 2, 300, 8, 64, bf16, S=812, grad=False),
        _case("fp32", 4, 1024, 8, 64, fp32),
        _case("odd", 3, 333, 5, 40, bf16),
        _case("odd widths", 2, 100, 6, 36, fp16, kv=2, causal=False),
        _case("more queries than keys", 2, 100, 4, 64, fp32, S=70),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    H: int,
    D: int,
    dtype: torch.dtype,
    *,
    S: int = 0,
    kv: int = 0,
    causal: bool = True,
    window: int | None = None,
    documents: int = 0,
    grad: bool = True,
    cached: bool = False,
) -> Case:
    K = kv or H
    held = TensorMeta.dense((B, S or T, K, D), dtype, grad=grad)
    if cached:  # [B, K, S, D] in memory
        held = TensorMeta(held.shape, dtype, (K * S * D, D, S * D, 1))
    args: dict[str, Any] = {
        "q": TensorMeta.dense((B, T, H, D), dtype, grad=grad),
        "k": held,
        "v": held,
        "causal": causal,
        "window": window,
        "scale": None,
        "cu_seqlens": TensorMeta.dense((documents,), torch.int32) if documents else None,
        "lengths": TensorMeta.dense((B,), torch.int64) if cached else None,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Documents of 0 to 2,000 tokens, what lies behind the last belonging to none. Lengths: a number above S
    stands for S; of every 16 rows one is empty, one holds a position, one up to some thousands."""
    if name == "cu_seqlens":
        lengths = torch.randint(
            2000, meta.shape, generator=generator, dtype=meta.dtype, device=generator.device
        )
        return (lengths.cumsum(0) - lengths[0]).to(meta.dtype)
    if name != "lengths":
        return None
    lengths = torch.full(meta.shape, 1 << 30, dtype=meta.dtype, device=generator.device)
    lengths[1::16], lengths[2::16] = 1, 0
    some = lengths[3::16]
    some.copy_(torch.randint(4096, some.shape, generator=generator, device=generator.device))
    return lengths


def decode_supports(case: Case) -> str | None:
    """Why the kernels for decoding can't take `case`, or None."""
    if reason := needs_native(case, besides=("cu_seqlens", "lengths")):
        return reason
    if case.needs_grad:
        return "has no gradients"
    if case.cu_seqlens is not None:
        return "takes no packed documents"
    if case.q.shape[1] > FEW:
        return f"takes up to {FEW} queries a row, not {case.q.shape[1]}"
    if case.q.shape[-1] > 256:
        return f"takes heads up to 256 wide, not {case.q.shape[-1]}"
    return None


def compiled_supports(case: Case) -> str | None:
    """Why torch.compile isn't asked for a program of two products, or None."""
    if case.q.shape[1] > FEW:
        return f"would hold the scores of {case.q.shape[1]} queries a row; up to {FEW} are few"
    return compiler_missing(case)


def heuristic(case: Case, regime: str) -> str:
    """Kernels of their own for a few queries of a longer row, on an H100 1.1 to 1.7 times as fast as what
    torch.compile makes; PyTorch's FlashAttention for windows, documents and pieces behind a prefix, where its
    default would read a mask: verified there, not timed. PyTorch's default elsewhere, which on an H100 is
    cuDNN and the fastest."""
    del regime
    if not case.device.startswith("cuda"):
        return "eager"
    T, S = case.q.shape[1], case.k.shape[1]
    if (case.lengths is not None or T < S) and not decode_supports(case):
        return "decode"
    some = case.window is not None or case.cu_seqlens is not None or (case.causal and T not in (1, S))
    capable = hardware.capability(hardware.index(case.device)) >= (8, 0)
    return "flash" if some and capable and not pytorch.supports(case, "flash") else "eager"


def _decode() -> Implementation:
    from bakeoff.ops.attention.triton import decode

    return decode


def _pytorch(name: str, call: Implementation, **more: Any) -> Candidate:
    """One of PyTorch's kernels by name."""
    return Candidate(name, call, supports=partial(pytorch.supports, name=name), deterministic=False, **more)


def _flash_attn(name: str, call: Implementation, *packages: str) -> Candidate:
    return Candidate(
        name,
        call,
        supports=partial(peers.supports, name=name),
        requires=packages,
        deterministic=False,
        traceable=False,
        min_capability=(8, 0) if name.endswith("2") else (9, 0),
    )


OP = Op(
    name=_OP,
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager, deterministic=False, heeds_determinism=True),
        Candidate("compiled", compiled(plain.products), supports=compiled_supports),
        _pytorch("flash", pytorch.flash, heeds_determinism=True, min_capability=(8, 0)),
        _pytorch("cudnn", pytorch.cudnn, traceable=False, min_capability=(8, 0)),
        _pytorch("efficient", pytorch.efficient, heeds_determinism=True),
        Candidate("math", pytorch.math, supports=partial(pytorch.supports, name="math")),
        _flash_attn("flash_attn_2", peers.flash_attn_2, "flash_attn", "flash_attn_2_cuda"),
        _flash_attn("flash_attn_3", peers.flash_attn_3, "flash_attn_interface"),
        _flash_attn("flash_attn_4", peers.flash_attn_4, "flash_attn", "cutlass"),
        Candidate(
            "flex",
            pytorch.flex,
            supports=pytorch.flex_supports,
            requires=("triton",),
            traceable=False,
            all_compiled=True,
        ),
        Candidate(
            "flex_flash",
            pytorch.flex_flash,
            supports=partial(pytorch.flex_supports, backend="FLASH"),
            requires=("triton", "flash_attn", "cutlass"),
            traceable=False,
            deterministic=False,
            all_compiled=True,
            min_capability=(9, 0),
        ),
        Candidate(
            "decode",
            load=_decode,
            supports=decode_supports,
            requires=("triton",),
            has_backward=False,
            launches=launches,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"q": 2, "k": 2, "v": 2},
    batched=frozenset({"q", "k", "v", "lengths"}),
    draw=draw,
    settings=frozenset({"scale"}),
    averages=True,
)

register(OP)
