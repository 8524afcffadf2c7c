"""Context parallelism on one GPU: all of a rank's blocks and bookkeeping on the device, over NCCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.parallel import dilated_attention


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=device
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("tokens", [1030, 1024])
def test_one_rank_is_equal_to_the_definition(alone: dist.ProcessGroup, tokens: int) -> None:
    """By blocks, and by the op's kernels, which run where nothing is exchanged. Of 1,024 tokens no head has
    more rows than another, so that all blocks of 16 bits go through attention kernels."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        shapes = [(1, tokens, heads, 64) for heads in (4, 2, 2)]
        inputs = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
        branches = ((128, 500, 1030), (1, 2, 5)) if tokens == 1030 else ((128, 512, 1024), (1, 2, 4))
        exact = [x.detach().double().requires_grad_() for x in inputs]
        z = reference(*exact, *branches, True)
        assert isinstance(z, torch.Tensor)
        dy = torch.randn(z.shape, device="cuda", dtype=dtype)
        wanted = z, *torch.autograd.grad(z, exact, dy.double())
        for method in ("exchange", "ring", "auto"):
            y = dilated_attention(*inputs, *branches, mesh=alone, causal=True, method=method)
            assert isinstance(y, torch.Tensor)
            for one, two in zip((y, *torch.autograd.grad(y, inputs, dy)), wanted, strict=True):
                assert (one.double() - two).norm() <= limit * two.norm(), (dtype, method)
