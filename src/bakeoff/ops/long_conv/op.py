"""The declaration of long_conv: its candidates, checks, buckets, cost and cases."""

import os

import torch

from bakeoff import hardware
from bakeoff.fft_conv import plans
from bakeoff.kernels import cuda
from bakeoff.kernels.counter import launches
from bakeoff.ops.long_conv import plain
from bakeoff.ops.long_conv.reference import long_conv as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.arguments import Arguments, Flag, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_SHORT = 64  # the longest filter for which products were seen to beat FFTs on rows of more positions,
_PRODUCTS = 1024  # of so many at most, on an H100
MOST_TAPS = 64  # of `direct`: as many sums and as long a window fill a thread's registers
MOST_TAPS_MAJOR = 32  # and of channel-major data, where a thread reads the whole window at once


check = Arguments(
    "long_conv",
    {
        "u": Tensor("B T C", hint="one sequence is u[None]"),
        "h": Tensor("C L+", hint="one filter a channel"),
        "skip": Tensor("C", optional=True),
        "gate_in": Tensor("as u", optional=True),
        "gate_out": Tensor("as u", optional=True),
        "causal": Flag(),
    },
)


def bucket(case: Case) -> Case:
    """B and T rounded up; a filter that spans the sequence stays so, others keep their length."""
    B, T, C = case.u.shape
    shape = (round_rows(B), round_rows(T), C)
    L = shape[1] if case.h.shape[1] >= T else case.h.shape[1]
    found = {"h": TensorMeta.dense((C, L), case.h.dtype, grad=case.h.requires_grad)}
    for name in ("u", "gate_in", "gate_out"):
        if case.args[name] is not None:
            found[name] = with_layout(case.args[name], shape)  # type: ignore[arg-type]
    if case.skip is not None:
        found["skip"] = TensorMeta.dense((C,), case.skip.dtype, grad=case.skip.requires_grad)
    return case.replace(**found)


def cost(case: Case) -> Cost:
    """Every argument and the output once; in backward the arguments and the output's gradient once more, and
    the gradients written. FLOPs are those of one real FFT and its inverse each way, and of the product."""
    u = case.u
    read = sum(meta.nbytes for meta in case.tensors.values())
    length = 2 * max(u.shape[1], 1)
    flops = u.shape[0] * u.shape[2] * length * (5 * length.bit_length() + 3)
    if not case.needs_grad:
        return Cost(read + u.nbytes, flops)
    gradients = sum(meta.nbytes for meta in case.tensors.values() if meta.requires_grad)
    return Cost(2 * (read + u.nbytes) + gradients, 3 * flops)


def cases() -> list[Case]:
    """Lengths from 128 to 65,536 as a convolution library lays them out, then every other form once."""
    half, full = torch.bfloat16, torch.float32
    return [
        _case("64x128x768", 64, 128, 768),
        _case("64x256x768", 64, 256, 768),
        _case("64x1024x768", 64, 1024, 768),
        _case("16x2048x768", 16, 2048, 768),
        _case("8x4096x768", 8, 4096, 768),
        _case("4x8192x768", 4, 8192, 768),
        _case("4x16384x768", 4, 16384, 768),
        _case("2x32768x768", 2, 32768, 768),
        _case("1x65536x768", 1, 65536, 768),
        _case("64x1024x768 channel-last", 64, 1024, 768, major=False),
        _case("4x8192x768 channel-last", 4, 8192, 768, major=False),
        _case("4 taps", 8, 4096, 1536, L=4, major=False),
        _case("4 taps, more channels", 16, 2048, 2048, L=4, major=False),
        _case("4 taps channel-major", 8, 4096, 1536, L=4),
        _case("4 taps, gates and skip", 8, 4096, 768, L=4, gated=True, major=False),
        _case("16 taps, gates and skip", 8, 4096, 768, L=16, gated=True, major=False),
        _case("32 taps, gates and skip", 8, 4096, 768, L=32, gated=True, major=False),
        _case("32 taps channel-major", 8, 4096, 768, L=32),
        _case("64 taps, gates and skip", 8, 4096, 768, L=64, gated=True, major=False),
        _case("128 taps", 8, 4096, 768, L=128, major=False),
        _case("1024 taps", 4, 8192, 768, L=1024, major=False),
        _case("128 taps channel-major", 8, 4096, 768, L=128),
        _case("1024 taps channel-major", 4, 8192, 768, L=1024),
        _case("4096 taps channel-major", 1, 65536, 768, L=4096),
        _case("gates and skip", 16, 2048, 768, gated=True, major=False),
        _case("fp16", 16, 1024, 768, dtype=torch.float16),
        _case("fp32", 16, 1024, 768, dtype=full),
        _case("bf16 filter", 16, 1024, 768, filter_dtype=half),
        _case("odd", 3, 1001, 45, L=77, gated=True, major=False),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    C: int,
    *,
    L: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    filter_dtype: torch.dtype = torch.float32,
    gated: bool = False,
    major: bool = True,
) -> Case:
    stride = (C * T, 1, T) if major else (T * C, C, 1)
    u = TensorMeta((B, T, C), dtype, stride, requires_grad=True)
    return Case(
        {
            "u": u,
            "h": TensorMeta.dense((C, L or T), filter_dtype, grad=True),
            "skip": TensorMeta.dense((C,), filter_dtype, grad=True) if gated else None,
            "gate_in": u if gated else None,
            "gate_out": u if gated else None,
            "causal": True,
        },
        "cuda",
        name,
    )


def heuristic(case: Case, regime: str) -> str:
    """Our own wherever they can: a few taps in turn, short filters and rows as products, others by FFTs."""
    del regime
    short = case.h.shape[1] <= _SHORT < case.u.shape[1] <= _PRODUCTS
    ranked = {"direct": _direct, "toeplitz": _toeplitz, "fft": _fft}
    names = ("direct", "toeplitz", "fft") if short else ("direct", "fft", "toeplitz")
    return next((name for name in names if ranked[name](case) is None), "eager")


def _kernels(case: Case) -> str | None:
    """Why no kernel can take these arguments."""
    if not case.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on CUDA, not on {case.device}"
    if not case.causal:
        return "only causal filters"
    given = [case.args[name] for name in ("h", "skip", "gate_in", "gate_out")]
    if torch.float64 in [case.u.dtype, *(meta.dtype for meta in given if isinstance(meta, TensorMeta))]:
        return "no float64"
    gates = [meta for meta in given[2:] if isinstance(meta, TensorMeta)]
    if any(meta.dtype != case.u.dtype for meta in gates):
        return "the gates must have u's dtype"
    return "nothing to compute" if case.u.numel == 0 else None


def _direct(case: Case) -> str | None:
    """Why one product after another can't take these arguments."""
    (B, T, C), (_, to_t, to_c), taps = case.u.shape, case.u.stride, case.h.shape[1]
    last = to_c == 1 and (to_t != 1 or C > 1)
    if taps > MOST_TAPS:
        return f"for filters of at most {MOST_TAPS} taps, not {taps}"
    if 1 not in (to_t, to_c):
        return "for channels or positions side by side in memory"
    if not last and taps > MOST_TAPS_MAJOR:
        return f"for filters of at most {MOST_TAPS_MAJOR} taps where positions lie side by side, not {taps}"
    if T * (C if last else max(B, C)) >= 1 << 31:
        return "the sequences are too large"
    return cuda.missing() or _kernels(case)


def _toeplitz(case: Case) -> str | None:
    """Why products with Toeplitz matrices can't take these arguments."""
    if case.u.dtype == torch.float16 != case.h.dtype:
        return "the filter could exceed float16's range: it must have u's dtype"
    return _kernels(case)


def _fft(case: Case) -> str | None:
    """Why FFTs on the chip can't take these arguments."""
    if reason := cuda.missing() or _kernels(case):
        return reason
    shared = hardware.shared_memory(hardware.index(case.device))
    if plans.choose(case.u.shape[1], case.h.shape[1], shared) is None:
        return "the sequence is too long"
    return None


def _load_direct() -> Implementation:
    from bakeoff.ops.long_conv.direct.convolution import direct

    return direct


def _load_toeplitz() -> Implementation:
    from bakeoff.ops.long_conv.toeplitz.convolution import toeplitz

    return toeplitz


def _load_fft() -> Implementation:
    from bakeoff.ops.long_conv.fft.convolution import fft

    return fft


OP = Op(
    name="long_conv",
    reference=reference,
    candidates=(
        Candidate("eager", plain.eager),
        Candidate("compiled", plain.compiled, supports=compiler_missing),
        Candidate(
            "direct",
            load=_load_direct,
            requires=("triton",),
            supports=_direct,
            launches=launches,
        ),
        Candidate(
            "toeplitz",
            load=_load_toeplitz,
            requires=("triton",),
            supports=_toeplitz,
            launches=launches,
        ),
        Candidate(
            "fft",
            load=_load_fft,
            requires=("triton",),
            supports=_fft,
            launches=launches,
        ),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"u": 1, "h": 2, "skip": 1, "gate_in": 1, "gate_out": 1},
    batched=frozenset({"u", "gate_in", "gate_out"}),
)

register(OP)
