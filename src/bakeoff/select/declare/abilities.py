"""Reasons why kernels can't take a case that several ops share."""

import os
from collections.abc import Collection

import torch

from bakeoff.select.declare.case import Case

__all__ = ["NATIVE", "needs_gpu", "needs_native_dtypes"]

NATIVE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that kernels read and write; they compute in float32."""


def needs_gpu(case: Case) -> str | None:
    """Why a kernel can't run on the case's device, or None; Triton's interpreter runs them on the CPU."""
    if case.device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"runs on CUDA, not on {case.device}"


def needs_native_dtypes(case: Case, besides: Collection[str] = ()) -> str | None:
    """Why kernels that compute in float32 can't take a tensor's dtype, or None; those named in `besides` may
    have any."""
    for name, meta in case.tensors.items():
        if name not in besides and meta.dtype not in NATIVE:
            return f"computes in float32: takes float16, bfloat16 and float32, not a {meta.dtype} {name}"
    return None
