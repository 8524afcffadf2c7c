"""The declaration of short_conv: its candidates, checks, buckets, cost and cases."""

from typing import Any

import torch

from bakeoff.ops.short_conv import peers, plain
from bakeoff.ops.short_conv.reference import short_conv as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate, needs_native
from bakeoff.select.declare.arguments import INTEGER, Arguments, Choice, Tensor
from bakeoff.select.declare.compiled import compiled_candidate
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["MOST_TAPS", "OP"]

MOST_TAPS = 8


def relations(case: Case) -> None:
    """Raises ValueError where the filter is too long, or state and packed sequences don't fit x."""
    (B, _, C), W = case.x.shape, case.weight.shape[1]
    if W > MOST_TAPS:
        raise ValueError(
            f"short_conv: weight has {W} taps a channel, at most {MOST_TAPS} are taken; longer filters are "
            f"for bakeoff.ops.long_conv(x, weight.flip(1))"
        )
    packed = case.cu_seqlens
    if packed is not None and B != 1:
        raise ValueError(
            f"short_conv: x has {B} rows; packed sequences lie in one: pass x.flatten(0, 1)[None], and "
            f"cu_seqlens to match"
        )
    if packed is not None and packed.shape[0] < 2:
        raise ValueError(f"short_conv: cu_seqlens has shape {packed.shape}, expected [N+1] with N >= 1")
    expected = (B if packed is None else packed.shape[0] - 1, W - 1, C)
    if case.state is not None and case.state.shape != expected:
        raise ValueError(
            f"short_conv: state has shape {case.state.shape}, expected {expected}: the last W-1 inputs of "
            f"each sequence, the second of the two results"
        )


check = Arguments(
    "short_conv",
    {
        "x": Tensor("B T C", hint="one sequence is x[None]"),
        "weight": Tensor("C W+", hint="one filter a channel; that of a torch.nn.Conv1d is weight[:, 0]"),
        "bias": Tensor("C", optional=True, dtype_of="weight"),
        "activation": Choice(("silu",), optional=True),
        "state": Tensor(
            "N V C", optional=True, dtype_of="x", hint_kind="the state is the second of the two results"
        ),
        "cu_seqlens": Tensor("M", INTEGER, optional=True),
    },
    relations,
)


def bucket(case: Case) -> Case:
    """B, T and the number of packed sequences rounded up, x in its layout class's plainest form."""
    B, T, C = case.x.shape
    B, T = round_rows(B), round_rows(T)
    plain: dict[str, Any] = {"x": with_layout(case.x, (B, T, C))}
    items = B
    if case.cu_seqlens is not None:
        items = round_rows(case.cu_seqlens.shape[0] - 1)
        plain["cu_seqlens"] = TensorMeta.dense((items + 1,), case.cu_seqlens.dtype)
    for name in ("weight", "bias"):
        meta = case.args[name]
        if isinstance(meta, TensorMeta):
            plain[name] = TensorMeta.dense(meta.shape, meta.dtype, grad=meta.requires_grad)
    if case.state is not None:
        shape = (items, *case.state.shape[1:])
        plain["state"] = TensorMeta.dense(shape, case.state.dtype, grad=case.state.requires_grad)
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """Forward reads x and writes y; backward reads x and dy and writes dx; the rest is small. FLOPs: the sum
    and 4 for SiLU; backward both again for SiLU's slope, and a sum for each of dx and dweight."""
    x, taps = case.x, case.weight.shape[1]
    small = sum(meta.nbytes for name, meta in case.tensors.items() if name != "x")
    silu = 4 if case.activation else 0
    total, flops = 2 * x.nbytes + small, x.numel * (2 * taps + silu)
    if not case.needs_grad:
        return Cost(total, flops)
    wants_filter = case.weight.requires_grad or (case.bias is not None and case.bias.requires_grad)
    reads_x = wants_filter or case.activation
    total += x.nbytes * (1 + bool(reads_x) + x.requires_grad) + small
    back = (2 * taps + 2 * silu if silu else 0) + 2 * taps * (x.requires_grad + wants_filter)
    return Cost(total, flops + x.numel * back)


def cases() -> list[Case]:
    """In front of mixers from small to large models, then every other form once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case("16x2048x2048 W4", 16, 2048, 2048),
        _case("8x4096x1024 W4", 8, 4096, 1024),
        _case("2x1024x384 W4", 2, 1024, 384),
        _case("48x512x384 W4", 48, 512, 384),
        _case("1x65536x1024 W4", 1, 65536, 1024),
        _case("no activation", 8, 4096, 1024, silu=False),
        _case("no bias", 8, 4096, 1024, bias=False),
        _case("2 taps", 8, 4096, 1024, W=2),
        _case("3 taps", 8, 4096, 1024, W=3),
        _case("8 taps", 8, 4096, 1024, W=8),
        _case("fp16", 8, 4096, 1024, dtype=fp16),
        _case("fp32", 8, 4096, 1024, dtype=fp32),
        _case("fp32 weight", 8, 4096, 1024, weight=fp32),
        _case("strided", 8, 4096, 1024, strided=True),
        _case("with state", 8, 4096, 1024, state=True),
        _case("packed", 1, 32768, 1024, items=64),
        _case("packed, with state", 1, 16384, 1024, items=8, state=True),
        _case("decode", 64, 1, 2048, state=True, grad=False),
        _case("decode one row", 1, 1, 2048, state=True, grad=False),
        _case("odd", 3, 1001, 45, W=5, state=True, dtype=bf16),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    C: int,
    *,
    W: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype | None = None,
    bias: bool = True,
    silu: bool = True,
    state: bool = False,
    items: int = 0,
    strided: bool = False,
    grad: bool = True,
) -> Case:
    dense = TensorMeta.dense
    x = dense((B, T, C), dtype, grad=grad)
    if strided:  # the middle third of a projection
        x = TensorMeta(x.shape, dtype, (3 * T * C, 3 * C, 1), grad)
    args: dict[str, Any] = {
        "x": x,
        "weight": dense((C, W), weight or dtype, grad=grad),
        "bias": dense((C,), weight or dtype, grad=grad) if bias else None,
        "activation": "silu" if silu else None,
        "state": dense((items or B, W - 1, C), dtype, grad=grad) if state else None,
        "cu_seqlens": dense((items + 1,), torch.int32) if items else None,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Sequences of 0 to 512 positions, some of 1. What lies beyond the last input, is cut or empty."""
    if name != "cu_seqlens":
        return None
    device = generator.device
    lengths = torch.randint(513, meta.shape, generator=generator, device=device)
    lengths = torch.where(torch.rand(meta.shape, generator=generator, device=device) < 0.2, 1, lengths)
    lengths[0] = 0
    return lengths.cumsum(0).to(meta.dtype)


def triton_supports(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    return needs_native(case, besides=("cu_seqlens",)) or (
        "a sequence is too long" if case.x.shape[1] >= 1 << 30 else None
    )


def heuristic(case: Case, regime: str) -> str:
    """The kernels wherever they can run: PyTorch's depthwise convolution turns channels and time around, and
    torch.compile leaves it as it is."""
    del regime
    return "eager" if not case.device.startswith("cuda") or triton_supports(case) else "triton"


def _triton() -> Implementation:
    from bakeoff.ops.short_conv.triton import short_conv

    return short_conv


OP = Op(
    name="short_conv",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        compiled_candidate(reference),
        kernel_candidate("triton", _triton, triton_supports),
        Candidate(
            "fla",
            peers.fla,
            supports=peers.fla_supports,
            requires=("fla", "triton"),
            traceable=False,
        ),
        Candidate(
            "causal_conv1d",
            peers.causal_conv1d,
            supports=peers.causal_conv1d_supports,
            requires=("causal_conv1d",),
            traceable=False,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"x": 1, "weight": 2, "bias": 1, "state": 2},
    batched=frozenset({"x", "state"}),
    draw=draw,
)

register(OP)
