"""The gpu lane: the ops' grid on a CUDA device in bf16, fp16 and fp32, graphs, torch.compile, memory."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError(
        "TRITON_INTERPRET is set, so kernels would not run on the GPU: unset it, `make gpu`"
    )


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Each test starts with an empty allocator, so that peak memory is its own, and leaves one to the other
    processes on the GPU."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    gc.collect()  # what a failed test's traceback or a cycle still holds
    torch.cuda.empty_cache()


@pytest.fixture
def much_memory() -> Iterator[None]:
    """For a test that needs tens of gigabytes: of such tests one at a time runs on the machine."""
    import torch

    with (Path(tempfile.gettempdir()) / "bakeoff-gpu-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
