"""The gpu lane: the ops' grid on a CUDA device in bf16, fp16 and fp32, graphs, torch.compile, memory."""

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError(
        "TRITON_INTERPRET is set, so kernels would not run on the GPU: unset it, `make gpu`"
    )


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Each test starts with an empty allocator, so that peak memory is its own."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
