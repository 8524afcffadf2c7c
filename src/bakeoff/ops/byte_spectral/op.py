"""The declaration of byte_spectral: its candidates, checks, buckets, cost and cases."""

import math
import os
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.kernels import cuda
from bakeoff.kernels.counter import launches
from bakeoff.ops.byte_spectral import plain
from bakeoff.ops.byte_spectral.reference import byte_spectral as reference
from bakeoff.select import Candidate, Case, Cost, Implementation, Op, TensorMeta, register
from bakeoff.select.declare.abilities import kernel_candidate
from bakeoff.select.declare.arguments import BYTES, Arguments, Choice, Flag, Tensor
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import round_rows, with_layout

__all__ = ["OP"]

_FEATURES = ("magnitude", "log", "complex")
_NATIVE = (torch.float16, torch.bfloat16, torch.float32)
_MOST = 64  # of the window and of the frequencies: a strip and its phases must fit one program
_MOST_LOOP = 1024
_LEAST_SHARED = 48 << 10  # bytes that every GPU gives a block


def relations(case: Case) -> None:
    """Raises ValueError for arguments that don't go together."""
    _check_form(case)
    _check_projection(case)


check = Arguments(
    "byte_spectral",
    {
        "ids": Tensor(
            "B T",
            BYTES,
            hint="one row is ids[None]",
            hint_kind="bytes become one by torch.tensor([list(b'text')], dtype=torch.uint8)",
        ),
        "table": Tensor("256 C+", hint="one row a byte"),
        "window": Tensor("W+", optional=True),
        "omega": Tensor("K+", optional=True),
        "features": Choice(_FEATURES),
        "weight": Tensor("F D+", optional=True, hint="weight.t() if it is a Linear's"),
        "bias": Tensor("D", optional=True),
        "causal": Flag(),
    },
    relations,
)


def _check_form(case: Case) -> None:
    if case.causal and case.window is None:
        raise ValueError(
            "byte_spectral: window is None; the causal form needs one, torch.ones(64) for example"
        )
    if case.causal:
        return
    if case.window is not None:
        raise ValueError("byte_spectral: causal=False sums over the whole row and takes no window: pass None")
    if case.features != "complex":
        raise ValueError(
            f"byte_spectral: causal=False gives every position of a row the same magnitudes, so "
            f"features={case.features!r} says nothing there: pass features='complex'"
        )


def _check_projection(case: Case) -> None:
    weight, bias = case.weight, case.bias
    if weight is None:
        if bias is not None:
            raise ValueError("byte_spectral: bias is added to a projection, and weight is None; pass one")
        return
    F = _feature_count(case)
    if weight.shape[0] != F:
        raise ValueError(
            f"byte_spectral: weight has shape {weight.shape}, expected [{F}, D]: "
            f"{case.table.shape[1]} columns of the table, {_bins(case)} frequencies"
            f"{', 2 parts' if case.features == 'complex' else ''} (weight.t() if it is a Linear's)"
        )


def _bins(case: Case) -> int:
    if case.omega is not None:
        return int(case.omega.shape[0])
    length = case.ids.shape[1] if case.window is None else case.window.shape[0]
    return int(length) // 2 + 1


def _feature_count(case: Case) -> int:
    return int(case.table.shape[1]) * _bins(case) * (2 if case.features == "complex" else 1)


def bucket(case: Case) -> Case:
    """B and T rounded up, every tensor in its layout class's plainest form.

    T stays exact where the frequencies are the row's own grid, because F depends on it.
    """
    B, T = case.ids.shape
    exact = case.omega is None and case.window is None
    plain = {"ids": with_layout(case.ids, (round_rows(B), T if exact else round_rows(T)))}
    for name, meta in case.tensors.items():
        if name != "ids":
            plain[name] = TensorMeta.dense(meta.shape, meta.dtype, grad=meta.requires_grad)
    return case.replace(**plain)


def cost(case: Case) -> Cost:
    """Every argument and the output once, in backward the output's gradient too, and the gradients written.

    FLOPs are those of the products, with the spectra made again in backward.
    """
    positions, F = case.ids.numel, _feature_count(case)
    C, bins = case.table.shape[1], _bins(case)
    if case.window is None:  # the row's transform, and its rotation
        spectra = 4 * positions * C * bins
        project = 4 * positions * bins * (case.weight.shape[1] if case.weight is not None else C)
    else:
        spectra = 4 * positions * C * case.window.shape[0] * bins
        project = 2 * positions * F * case.weight.shape[1] if case.weight is not None else 4 * positions * F
    width, dtype = (F, case.table.dtype) if case.weight is None else (case.weight.shape[1], case.weight.dtype)
    output = positions * width * dtype.itemsize
    read = sum(meta.nbytes for meta in case.tensors.values())
    if not case.needs_grad:
        return Cost(read + output, spectra + project)
    gradients = sum(meta.nbytes for meta in case.tensors.values() if meta.requires_grad)
    return Cost(2 * (read + output) + gradients, 4 * spectra + 3 * project)


def cases() -> list[Case]:
    """The model's own form in several sizes, then every option once."""
    half, full = torch.bfloat16, torch.float32
    return [
        _case("16x1024", 16, 1024),
        _case("64x256", 64, 256),
        _case("64x512", 64, 512),
        _case("16x4096", 16, 4096),
        _case("4x8192 D512", 4, 8192, D=512),
        _case("1x65536", 1, 65536),
        _case("8x2048 C4", 8, 2048, C=4, K=16, W=32),
        _case("16x1024 grid", 16, 1024, K=None),
        _case("16x1024 complex", 16, 1024, features="complex"),
        _case("16x1024 log", 16, 1024, features="log"),
        _case("16x1024 features alone", 16, 1024, D=None),
        _case("16x1024 complex alone", 16, 1024, C=2, W=32, K=None, D=None, features="complex"),
        _case("16x1024 fp32", 16, 1024, weight=full),
        _case("16x1024 fp16", 16, 1024, weight=torch.float16),
        _case("16x1024 bf16 table", 16, 1024, table=half),
        _case("odd", 3, 1001, C=3, W=45, K=21, D=77),
        _case("strided ids", 16, 1024, stride=2),
        _case("whole row", 16, 1024, features="complex", causal=False),
        _case("1x1", 1, 1),
    ]


def _case(
    name: str,
    B: int,
    T: int,
    *,
    C: int = 1,
    W: int = 64,
    K: int | None = 32,
    D: int | None = 256,
    features: str = "magnitude",
    table: torch.dtype = torch.float32,
    weight: torch.dtype = torch.bfloat16,
    causal: bool = True,
    stride: int = 1,
) -> Case:
    bins = W // 2 + 1 if K is None else K
    F = C * bins * (2 if features == "complex" else 1)
    args: dict[str, Any] = {
        "ids": TensorMeta((B, T), torch.uint8, (stride * T, 1)),
        "table": TensorMeta.dense((256, C), table, grad=True),
        "window": TensorMeta.dense((W,), torch.float32, grad=True) if causal else None,
        "omega": None if K is None else TensorMeta.dense((K,), torch.float32, grad=True),
        "features": features,
        "weight": None if D is None else TensorMeta.dense((F, D), weight, grad=True),
        "bias": None if D is None else TensorMeta.dense((D,), weight, grad=True),
        "causal": causal,
    }
    return Case(args, "cuda", name)


def draw(name: str, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor | None:
    """Any byte, and frequencies up to half a turn a byte; the rest is drawn as usual."""
    device = generator.device
    if name == "ids":
        return torch.randint(256, meta.shape, generator=generator, device=device, dtype=torch.uint8)
    if name == "omega":
        drawn = torch.rand(meta.shape, generator=generator, device=device) * math.pi
        return drawn.to(meta.dtype)
    return None


def triton_cannot(case: Case) -> str | None:
    """Why the Triton kernels can't take `case`, or None."""
    if not case.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on CUDA, not on {case.device}"
    return _kernels_cannot(case)


def _kernels_cannot(case: Case) -> str | None:
    """Why neither the Triton kernels nor those in CUDA C++ can take `case`, or None."""
    if not case.causal:
        return "sums over windows: a whole row is two matrix products, which PyTorch has"
    for name, meta in case.tensors.items():
        if name != "ids" and meta.dtype not in _NATIVE:
            return f"computes in float32: takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    W, K = case.window.shape[0], _bins(case)
    if max(W, K) > _MOST:
        return f"takes windows and frequencies up to {_MOST}, not {W} and {K}"
    return None


def cuda_cannot(case: Case) -> str | None:
    """Why the CUDA C++ kernels can't take `case`, or None."""
    if reason := cuda.missing() or _kernels_cannot(case):
        return reason
    from bakeoff.ops.byte_spectral.cuda.launch import shared_bytes

    needed = shared_bytes(case.table.shape[1], case.window.shape[0], _bins(case), case.features)
    if needed > _LEAST_SHARED:
        return f"keeps spectra in 48 KiB of shared memory, these need {needed >> 10}: narrow the table"
    if max(meta.numel for meta in case.tensors.values()) >= 1 << 31:
        return "takes up to 2^31 elements"
    older = hardware.index(case.device) >= 0 and not hardware.native_bf16(case.device)
    if older and (case.weight or case.table).dtype == torch.bfloat16:
        return "rounds to bfloat16 by an instruction that this GPU lacks (compute capability 8.0 has it)"
    return None


def rfft_cannot(case: Case) -> str | None:
    """Why `torch.fft.rfft` can't take `case`, or None."""
    if case.omega is not None:
        return "has the transform's own frequencies alone, and omega is given"
    if case.ids.numel == 0:
        return "torch.fft takes no empty tensors"
    return None


def loop_cannot(case: Case) -> str | None:
    """Why the loop can't take `case`, or None."""
    if not case.causal:
        return "sums over windows, not over the whole row"
    if not 1 <= case.ids.shape[1] <= _MOST_LOOP:
        return f"a position at a time is a baseline for 1 to {_MOST_LOOP} positions, not {case.ids.shape[1]}"
    return None


def heuristic(case: Case, regime: str) -> str:
    """The fused kernels wherever they can run: those in Triton are 3 to 13 times as fast as plain PyTorch on
    an H100. Those in CUDA C++ where there is no Triton."""
    del regime
    if hardware.without_triton(case.device):
        return "eager" if cuda_cannot(case) else "cuda"
    return "eager" if triton_cannot(case) else "triton"


def _cuda() -> Implementation:
    from bakeoff.ops.byte_spectral.cuda.launch import cuda

    return cuda


def _triton() -> Implementation:
    from bakeoff.ops.byte_spectral.triton import byte_spectral

    return byte_spectral


OP = Op(
    name="byte_spectral",
    reference=reference,
    candidates=(
        Candidate(
            "eager",
            plain.eager,
        ),
        Candidate(
            "loop",
            plain.loop,
            supports=loop_cannot,
            baseline=True,
            traceable=False,
        ),
        Candidate(
            "rfft",
            plain.rfft,
            supports=rfft_cannot,
            traceable=False,
        ),
        Candidate(
            "compiled",
            plain.compiled,
            supports=compiler_missing,
            deterministic=False,  # it adds the table's gradient up in any order
        ),
        kernel_candidate("triton", _triton, triton_cannot),
        Candidate("cuda", load=_cuda, supports=cuda_cannot, launches=launches),
    ),
    check=check,
    bucket=bucket,
    cost=cost,
    cases=cases,
    heuristic=heuristic,
    features={"ids": 0, "table": 2, "window": 1, "omega": 1, "weight": 2, "bias": 1},
    batched=frozenset({"ids"}),
    draw=draw,
)

register(OP)
