"""The declaration of memory_scan: its candidates, cost, cases and checks."""

from typing import Any

import torch

from bakeoff.ops.memory_scan import plain
from bakeoff.ops.memory_scan.chunked import chunked
from bakeoff.ops.memory_scan.reference import memory_scan as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import FLOATING, REAL, Arguments, Choice, Number, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_LONGEST = 64
READS = ("after", "before", "chunk")
_TOKENS = ("q", "k", "v", "lr", "decay", "forget")
_SHAPES = {"w1": "G H D", "b1": "G H", "w2": "G V H", "b2": "G V"}


def relations(case: Case) -> None:
    """Raises TypeError for numbers that are not whole, ValueError for orthogonalize with another read."""
    if type(case.chunk) is not int:
        raise TypeError(f"memory_scan: chunk is {case.chunk!r}, expected a whole number of tokens")
    if type(case.orthogonalize) is not int:
        raise TypeError(
            f"memory_scan: orthogonalize is {case.orthogonalize!r}, expected a whole number of Newton-Schulz "
            f"steps: 5 is usual, 0 means none"
        )
    if case.orthogonalize and case.read != "chunk":
        raise ValueError(
            f"memory_scan: orthogonalize is {case.orthogonalize} with read {case.read!r}: an orthogonalised "
            f"update is no sum over tokens, so no memory within a chunk can be read; pass read='chunk'"
        )


check = Arguments(
    "memory_scan",
    {
        "q": Tensor("G T D+", hint="G counts memories: fold batch and heads into it"),
        "k": Tensor("as q", dtype_of="q"),
        "v": Tensor("G T V+", dtype_of="q"),
        "memory_w1": Tensor("G H+ D", REAL),
        **{
            f"{whole}_{part}": Tensor(shape, REAL, dtype_of="memory_w1")
            for whole in ("memory", "momentum")
            for part, shape in _SHAPES.items()
            if (whole, part) != ("memory", "w1")
        },
        "lr": Tensor("G T", FLOATING, hint="one rate a token; expand a constant one"),
        "decay": Tensor("G T", FLOATING, hint="one rate a token; expand a constant one"),
        "forget": Tensor("G T", FLOATING, hint="one rate a token; expand a constant one"),
        "chunk": Number(least=1),
        "read": Choice(READS),
        "orthogonalize": Number(least=0),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """G and T rounded up, T only where it is more than a chunk; layouts made canonical."""
    G, T = case.q.shape[:2]
    G = round_rows(G)
    T = round_rows(T) if case.chunk >= T else case.chunk * round_rows(-(-T // case.chunk))
    plain: dict[str, Any] = {}
    for name, meta in case.tensors.items():
        if name in _TOKENS:
            plain[name] = with_layout(meta, (G, T, *meta.shape[2:]))
        else:
            plain[name] = TensorMeta.dense((G, *meta.shape[1:]), meta.dtype, grad=meta.requires_grad)
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """Tokens and state once each way. FLOPs: two per weight and token for each product with a weight matrix
    or a sum of outer products, and the masked products inside chunks; backward twice as many, and the
    forward's products with keys again. Each Newton-Schulz step is three products of the smaller side."""
    G, T, D = case.q.shape
    V, H = case.memory_w2.shape[1:]
    inside = min(case.chunk, T)
    asked = 2 if case.read != "chunk" else 1
    keys = (
        (D + V) + V + 2 * (D + V)
    )  # answers to keys, the error carried back, updates of memory and momentum
    flops = 2 * G * T * H * (keys + asked * (D + V))
    if case.read != "chunk":
        flops += 4 * G * T * inside * (D + V + 2 * H) // 2
    for rows, columns in ((H, D), (V, H)):
        least, most = min(rows, columns), max(rows, columns)
        chunks = -(-T // case.chunk)
        flops += G * chunks * case.orthogonalize * 2 * least**2 * (least + 2 * most)
    states = sum(meta.nbytes for name, meta in case.tensors.items() if name not in _TOKENS)
    tokens = sum(case.tensors[name].nbytes for name in _TOKENS) + case.v.nbytes
    if not case.needs_grad:
        return Cost(tokens + 2 * states, flops)
    return Cost(3 * tokens + 4 * states, 3 * flops)


def cases() -> list[Case]:
    """Heads of 64 and 128 at small chunks, one large memory, large chunks, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("12x1024 64-256 chunk 64", 12, 1024, 64, 256, 64, bf16),
        _case("12x1024 64-256 chunk 16", 12, 1024, 64, 256, 16, bf16),
        _case("64x1024 64-64 chunk 64", 64, 1024, 64, 64, 64, bf16),
        _case("16x1024 128-128 chunk 64", 16, 1024, 128, 128, 64, bf16),
        _case("2x1024 384-1536 chunk 64 fp32", 2, 1024, 384, 1536, 64, fp32),
        _case("12x1024 64-256 chunk 64 fp32", 12, 1024, 64, 256, 64, fp32),
        _case("4x2048 512-512 chunk 2048", 4, 2048, 512, 512, 2048, bf16, read="chunk"),
        _case(
            "4x2048 512-512 chunk 2048 orthogonal",
            4,
            2048,
            512,
            512,
            2048,
            bf16,
            read="chunk",
            orthogonalize=5,
        ),
        _case("3x1000 96-160 chunk 128", 3, 1000, 96, 160, 128, bf16, read="chunk"),
        _case("8x512 64-128 chunk 32 before", 8, 512, 64, 128, 32, bf16, read="before"),
        _case("fp16", 8, 256, 64, 64, 32, fp16),
        _case("forward", 16, 1024, 64, 128, 64, bf16, grad=False),
        _case("odd", 3, 201, 45, 70, 24, bf16),
        _case("strided", 8, 256, 64, 64, 32, bf16, strided=True),
    ]


def _case(
    name: str,
    G: int,
    T: int,
    D: int,
    H: int,
    chunk: int,
    dtype: torch.dtype,
    *,
    read: str = "after",
    grad: bool = True,
    strided: bool = False,
    orthogonalize: int = 0,
) -> Case:
    tokens = TensorMeta.dense((G, T, D), dtype, grad=grad)
    if strided:
        tokens = TensorMeta(tokens.shape, dtype, (2 * T * D, 2 * D, 1), grad)
    sizes = {"w1": (G, H, D), "b1": (G, H), "w2": (G, D, H), "b2": (G, D)}
    state = {
        f"{whole}_{part}": TensorMeta.dense(shape, torch.float32, grad=grad)
        for whole in ("memory", "momentum")
        for part, shape in sizes.items()
    }
    gate = TensorMeta.dense((G, T), torch.float32, grad=grad)
    gates = {"lr": gate, "decay": gate, "forget": gate}
    args: dict[str, Any] = {
        "q": tokens,
        "k": tokens,
        "v": tokens,
        **state,
        **gates,
        "chunk": chunk,
        "read": read,
        "orthogonalize": orthogonalize,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Tokens of length 1, memories that keep sizes, and rates so small that descent converges with chunks of
    64, or the recurrence would grow without bound; zeros among the rates, and decays of 1."""
    drawn = torch.randn(meta.shape, generator=generator, dtype=meta.dtype, device=generator.device)
    if name in ("q", "k", "v"):
        length = drawn.double().norm(dim=-1, keepdim=True) if name == "k" else max(meta.shape[-1], 1) ** 0.5
        rows: torch.Tensor = drawn / length
        return rows.to(meta.dtype)
    if name in ("lr", "decay", "forget"):
        rates = torch.sigmoid(drawn.float() + {"lr": -7.0, "decay": 1.0, "forget": -6.0}[name])
        rates[:, 6::7] = 0
        if name == "decay":
            rates[:, 10::29] = 1
        return rates.to(meta.dtype)
    scale = 0.1 if name.startswith("momentum") else 1.0
    return drawn.mul(scale / max(meta.shape[-1], 1) ** 0.5)


def heuristic(case: Case, regime: str) -> str:
    """The kernels wherever they can run: verified in all cases of the grid and faster in those timed, on an
    H200. For longer chunks those made for them, 4.7 times as fast as plain PyTorch forward on an H100 and
    5.8 times with the backward on an H200, before they were made faster. Not where updates are
    orthogonalised, in which torch.compile is faster."""
    del regime
    if triton_supports(case) is None:
        return "triton"
    return "eager" if case.orthogonalize or large_supports(case) else "large"


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    reason = needs_native(case)
    if reason is None and case.q.numel * case.v.numel == 0:
        reason = "empty q or v"
    if reason is None and case.orthogonalize:
        reason = "takes no orthogonalised updates"
    if reason is None and min(case.chunk, case.q.shape[1]) > _LONGEST:
        reason = f"takes chunks of up to {_LONGEST} tokens, not {case.chunk}"
    return reason


def large_supports(case: Case) -> str | None:
    """Why the products and kernels for large chunks can't take `case`, or None."""
    reason = needs_native(case)
    if reason is None and case.q.numel * case.v.numel == 0:
        reason = "empty q or v"
    if reason is None and case.read != "chunk":
        reason = f"takes read 'chunk', not {case.read!r}"
    if reason is None and min(case.chunk, case.q.shape[1]) <= _LONGEST:
        reason = f"takes chunks of more than {_LONGEST} tokens, not {min(case.chunk, case.q.shape[1])}"
    return reason


def _large() -> Implementation:
    from bakeoff.ops.memory_scan.large.scan import memory_scan

    return memory_scan


def _triton() -> Implementation:
    from bakeoff.ops.memory_scan.triton import memory_scan

    return memory_scan


OP = Op(
    name="memory_scan",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate("chunked", chunked),
        kernel_candidate("triton", _triton, triton_supports),
        kernel_candidate("large", _large, large_supports),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={
        **dict.fromkeys(("q", "k", "v"), 1),
        **dict.fromkeys(("lr", "decay", "forget"), 0),
        **{
            f"{whole}_{part}": shape.count(" ")
            for whole in ("memory", "momentum")
            for part, shape in _SHAPES.items()
        },
    },
    batched=frozenset(name for name in check.rules if name not in ("chunk", "read", "orthogonalize")),
    draw=draw,
    rounded=frozenset(f"{whole}_{part}" for whole in ("memory", "momentum") for part in ("w1", "w2")),
)

register(OP)
