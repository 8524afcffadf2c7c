"""Muon over ranks: shared work and shards give what one process gives, the same on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bakeoff.optim import Muon, muon_groups
from bakeoff.optim.sharing import owners

Ranks = Callable[..., None]


class Model(nn.Module):
    """Odd sizes: rows that don't divide by the ranks, fewer rows than ranks, a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(16, 10)
        self.qkv = nn.Linear(10, 21)
        self.gate = nn.Linear(21, 1)
        self.inner = nn.ModuleList([nn.Linear(21, 7), nn.Linear(7, 10)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.qkv(self.embed(ids))
        x = x * self.gate(x).sigmoid()
        return nn.functional.linear(self.inner[1](self.inner[0](x)), self.embed.weight)


def stepper(model: nn.Module, **how: Any) -> Muon:
    return Muon(muon_groups(model, splits={"qkv.weight": (5, 9, 7)}), 0.05, weight_decay=0.1, **how)


def train(model: nn.Module, optimizer: Muon, steps: int = 4) -> None:
    for step in range(steps):
        ids = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids), (ids + 1) % 16).backward()
        optimizer.found_inf = torch.tensor(float(step == 2))  # what GradScaler does; nothing may change
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def compare(model: nn.Module, optimizer: Muon) -> None:
    alone = Model()
    peer = stepper(alone)
    train(alone, peer)
    for mine, one in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), one.detach(), rtol=1e-4, atol=1e-5)
        for key, value in peer.state[one].items():
            torch.testing.assert_close(whole(optimizer.state[mine][key]), value, rtol=1e-4, atol=1e-5)
    for mine in model.parameters():
        for tensor in (whole(mine), *map(whole, optimizer.state[mine].values())):
            all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(all_of_them, tensor.contiguous())
            assert all(torch.equal(tensor, other) for other in all_of_them)


def shared(rank: int) -> None:
    model = Model()
    optimizer = stepper(model, process_group=dist.group.WORLD)
    train(model, optimizer)
    compare(model, optimizer)


def sharded(rank: int) -> None:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.inner:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = stepper(model)
    train(model, optimizer)
    compare(model, optimizer)
    kept = optimizer.state_dict()
    optimizer.load_state_dict(kept)
    assert isinstance(optimizer.state[model.qkv.weight]["momentum"], DTensor)
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]))
    columns.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="rows are sharded over one dimension"):
        Muon([columns]).step()


@pytest.mark.parametrize(("world", "body"), [(2, shared), (2, sharded), (3, sharded)])
def test_ranks_together_are_one(ranks: Ranks, world: int, body: Callable[..., None]) -> None:
    ranks(world, body)


def test_work_is_shared_evenly() -> None:
    shapes = [(2304, 768), (768, 768), (4096, 768), (768, 2048)] * 12
    own = owners(shapes, 8)
    work = [
        sum(3 * min(s) ** 2 * max(s) + min(s) ** 3 for s, o in zip(shapes, own, strict=True) if o == r)
        for r in range(8)
    ]
    assert max(work) <= 1.1 * sum(work) / 8
    assert owners(shapes[:2], 8) == [0, 1]
