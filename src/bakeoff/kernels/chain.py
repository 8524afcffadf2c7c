"""Launches that overlap: the programs of a kernel are placed while those of the one before it finish.

A kernel takes part by a constexpr CHAIN and `follow(CHAIN)` as its first line. It waits for the one before it
alone, so that all kernels of a chain have to.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["chained", "follow"]


@triton.jit
def follow(CHAIN: tl.constexpr):
    """Programs of the next launch may be placed from here on; what was launched before is done after it."""
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()


@cache
def chained(device: int) -> dict[str, Any]:
    """The constant and option of a launch on the GPU of this index: Hopper and newer overlap launches."""
    if device < 0 or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return {"CHAIN": False}
    return {"CHAIN": True, "launch_pdl": True}
