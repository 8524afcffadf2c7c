"""What kernels can take, and which candidate to guess: the parts that ops share."""

import os
from collections.abc import Callable, Collection

import torch

from bakeoff.kernels.counter import launches
from bakeoff.select.declare.candidate import Candidate, Implementation
from bakeoff.select.declare.case import Case

__all__ = ["NATIVE", "kernel_candidate", "kernels_on_gpu", "needs_gpu", "needs_native"]

NATIVE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that kernels read and write; they compute in float32."""


def needs_gpu(case: Case) -> str | None:
    """Why a kernel can't run on the case's device, or None; Triton's interpreter runs them on the CPU."""
    if case.device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"runs on CUDA, not on {case.device}"


def needs_native(case: Case, besides: Collection[str] = ()) -> str | None:
    """Why kernels that compute in float32 can't take the case, or None: its device or a tensor's dtype. Those
    named in `besides` may have any."""
    reason = needs_gpu(case)
    for name, meta in case.data.items():
        if reason is None and name not in besides and meta.dtype not in NATIVE:
            return f"computes in float32: takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return reason


def kernel_candidate(
    name: str,
    load: Callable[[], Implementation],
    supports: Callable[[Case], str | None] = needs_native,
    *,
    deterministic: bool = True,
    requires: tuple[str, ...] = ("triton",),
) -> Candidate:
    """A candidate of Triton kernels of this package: it must be seen to launch them."""
    return Candidate(
        name, load=load, supports=supports, requires=requires, launches=launches, deterministic=deterministic
    )


def kernels_on_gpu(case: Case, regime: str) -> str:
    """The guess for an op whose one candidate with kernels is ``triton``: that on a GPU, if it takes the
    dtypes; plain PyTorch on the CPU and inside torch.compile, which fuses it with its neighbours."""
    fits = case.device.startswith("cuda") and needs_native(case) is None
    return "triton" if fits and regime != "compiled" else "eager"
