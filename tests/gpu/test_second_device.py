"""Kernels run on their tensors' device, whichever is the current one."""

import pytest
import torch

from bakeoff.ops.rms_norm.triton import rms_norm

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("offset", [0, 1])
def test_the_current_device_does_not_matter(offset: int) -> None:
    """Neither for aligned pointers nor for misaligned ones, in no call."""
    flat = torch.randn(offset + 64 * 512, dtype=torch.bfloat16)
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = flat.to(device)[offset:].view(64, 512).requires_grad_()
        weight = torch.ones(512, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            y = rms_norm(x, weight, 1e-6, None, 0.0)
            found = (y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))
            results.append([t.cpu() for t in found])
    assert torch.cuda.current_device() == 0
    for again in results[1:]:
        for first, other in zip(results[0], again, strict=True):
            assert torch.equal(first, other)
