"""The interpreter lane: Triton kernels run on the CPU, one operation at a time, in NumPy.

Triton reads TRITON_INTERPRET when it is imported, so this lane is a process of its own. bf16 is wrong in
the interpreter (additions give NaN), so tests here use float32 and float16.
"""

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "triton is imported already, compiled: run the interpreter lane alone, `make interp`"
    )
os.environ["TRITON_INTERPRET"] = "1"
