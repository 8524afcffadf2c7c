"""Optimizers on DTensors of all kinds, by the same steps of PyTorch's AdamW on whole tensors in float64."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from bakeoff.optim import AdamW, DeepNestedOptimizer, Muon

Ranks = Callable[..., None]
Placements = list[Placement]

SHAPES = [(5, 4), (1, 6), (6,), (1,)]
"""Rows that don't divide by the ranks, fewer rows than ranks."""
HOW = {"lr": 0.05, "weight_decay": 0.1}


class Pair:
    """The same parameters twice: placed over ranks, for an optimizer of ours, and whole, for PyTorch's."""

    def __init__(self, mesh: DeviceMesh, placements: list[Placements | None], **how: Any) -> None:
        self.mesh, self.draw = mesh, torch.Generator().manual_seed(1)
        self.whole = [nn.Parameter(self.random(shape)) for shape in SHAPES]
        pairs = zip(self.whole, placements, strict=True)
        self.placed = [nn.Parameter(self.place(p, where)) for p, where in pairs]
        self.optimizer = AdamW(self.placed, **HOW, **{"max_grad_norm": 0.5, **how})
        self.oracle = torch.optim.AdamW(self.whole, **HOW)

    def random(self, shape: Any) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.draw)

    def place(self, tensor: Tensor, where: Placements | None) -> Tensor:
        if where is None:
            return tensor.detach().clone()
        return distribute_tensor(tensor.detach().clone(), self.mesh, where)

    def gradients(self) -> None:
        for p, whole in zip(self.placed, self.whole, strict=True):
            whole.grad = self.random(whole.shape)
            p.grad = self.place(whole.grad, list(p.placements) if isinstance(p, DTensor) else None)

    def compare(self) -> None:
        for p, whole in zip(self.placed, self.whole, strict=True):
            torch.testing.assert_close(gathered(p), whole.detach(), rtol=1e-9, atol=1e-9)

    def step(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.whole, 0.5)
        self.oracle.step()
        self.optimizer.step()
        torch.testing.assert_close(self.optimizer.grad_norm, norm)
        self.compare()


def gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placements_mixed(rank: int) -> None:
    """Some in shards of rows or columns, some whole on every rank; parameters that are whole count once."""
    kinds: list[Placements | None] = [[Shard(0)], [Shard(1)], [Replicate()], None]
    for order in (kinds, [[Replicate()]] * 4):
        pair = Pair(line(), order)
        for _ in range(3):
            pair.gradients()
            pair.step()


def two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    pair = Pair(mesh, [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()], None])
    for _ in range(3):
        pair.gradients()
        pair.step()
    replicated = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]))]
    optimizer = DeepNestedOptimizer(replicated)
    replicated[0].grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
    optimizer.step()


def gradients_elsewhere(rank: int) -> None:
    """A gradient that is no such shard as its parameter, from the first step on or later, is brought there."""
    world = dist.get_world_size()
    pair = Pair(line(), [[Replicate()], [Shard(0)], [Shard(0)], [Replicate()]])
    for step in range(4):
        pair.gradients()
        for p, whole in zip(pair.placed[:3], pair.whole, strict=False):
            assert whole.grad is not None
            if step % 2:
                part = whole.grad * (2.0 * (rank + 1) / world / (world + 1))
                p.grad = DTensor.from_local(part, pair.mesh, [Partial()], run_check=False)
        pair.step()
    pair.placed[0].grad = torch.ones_like(pair.whole[0])
    with pytest.raises(ValueError, match=r"assign distribute_tensor\(grad"):
        pair.optimizer.step()


def none_on_one_rank(rank: int) -> None:
    """Where one rank has no gradients at all, it takes part in the others' step."""
    pair = Pair(line(), [[Shard(0)]] * 4)
    for optimizer in (
        pair.optimizer,
        DeepNestedOptimizer(pair.placed),
        AdamW(pair.placed, skip_nonfinite=True),
    ):
        for step in range(2):
            pair.gradients()
            if rank == step:
                optimizer.zero_grad()
            optimizer.step()


def dtypes_by_rank(rank: int) -> None:
    params = [
        nn.Parameter(distribute_tensor(torch.ones(4, dtype=dtype), line(), [Shard(0)]))
        for dtype in (torch.float32, torch.float64)
    ]
    optimizer = AdamW(params, max_grad_norm=1.0)
    for p in params[: 1 if rank == 0 else 2]:
        p.grad = torch.ones_like(p.detach())
    optimizer.step()
    assert optimizer.grad_norm is not None
    first = params[1].to_local().numel() if rank == 0 else 0
    total = torch.tensor(4.0 + 4.0 - first)
    dist.broadcast(total, 0)
    torch.testing.assert_close(optimizer.grad_norm.float(), total.sqrt())


def skipped_by_one_rank(rank: int) -> None:
    """A NaN, or found_inf, on one rank makes all skip; the next step is taken."""
    pair = Pair(line(), [[Shard(0)]] * 4, skip_nonfinite=True)
    pair.gradients()
    pair.step()
    pair.gradients()
    if rank == 1:
        pair.placed[0].grad._local_tensor[0] = float("nan")  # type: ignore[union-attr]
    pair.optimizer.step()
    pair.compare()
    pair.gradients()
    pair.optimizer.found_inf = torch.tensor(float(rank == 1))
    pair.optimizer.step()
    pair.compare()
    pair.optimizer.found_inf = None
    pair.gradients()
    pair.step()
    assert pair.optimizer.skipped is not None and pair.optimizer.skipped.item() == 2


def placed_anew(rank: int) -> None:
    """Parameters resharded between two steps take their state along, with as many elements or not."""
    pair = Pair(line(), [[Shard(0)]] * 4)
    pair.gradients()
    pair.step()
    for p, where in ((pair.placed[0], [Shard(1)]), (pair.placed[2], [Replicate()])):
        p.grad = None
        other = p.detach().redistribute(pair.mesh, where)  # type: ignore[attr-defined]
        p._local_tensor, p._spec = other._local_tensor, other._spec  # type: ignore[attr-defined]
    for _ in range(2):
        pair.gradients()
        pair.step()


def state_of_whole_tensors(rank: int) -> None:
    """State of PyTorch's AdamW on whole tensors is cut; the way back has an error that says how."""
    pair = Pair(line(), [[Shard(0)]] * 4)
    pair.gradients()
    pair.step()
    pair.optimizer.load_state_dict(deepcopy(pair.oracle.state_dict()))
    pair.gradients()
    pair.step()
    back = AdamW([nn.Parameter(p.detach().clone()) for p in pair.whole])
    back.load_state_dict(pair.optimizer.state_dict())
    for p in back.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"exp_avg.full_tensor\(\)"):
        back.step()
    momentum = {0: {"momentum": pair.random(SHAPES[0])}}
    muon = Muon(pair.placed[:1])
    muon.load_state_dict({**muon.state_dict(), "state": momentum})
    pair.gradients()
    muon.step()
    assert isinstance(muon.state[pair.placed[0]]["momentum"], DTensor)


def several_meshes(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer, name in zip(model, ("u", "v"), strict=True):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,)))
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="pass the same mesh= to every fully_shard"):
        optimizer.step()


def controller_mixed(rank: int) -> None:
    """The controller sees what it would see of whole parameters."""
    draw = torch.Generator().manual_seed(1)
    whole = [nn.Parameter(torch.randn(5, 3, generator=draw)) for _ in range(2)]
    own = [nn.Parameter(whole[0].detach().clone())]
    own.append(nn.Parameter(distribute_tensor(whole[1].detach().clone(), line(), [Shard(0)])))
    optimizers = [DeepNestedOptimizer([{"params": [p]} for p in each], 0.05) for each in (own, whole)]
    for _ in range(6):
        for p, one in zip(own, whole, strict=True):
            one.grad = torch.randn(5, 3, generator=draw)
            p.grad = distribute_tensor(one.grad, line(), [Shard(0)]) if isinstance(p, DTensor) else one.grad
        for optimizer in optimizers:
            optimizer.loss = torch.tensor(1.0)
            optimizer.step()
    mine, alone = (tensors(optimizer) for optimizer in optimizers)
    torch.testing.assert_close(list(mine), list(alone))


def tensors(optimizer: DeepNestedOptimizer) -> Iterator[Tensor]:
    assert optimizer.controller is not None
    yield from optimizer.controller.state_dict().values()


@pytest.mark.parametrize(
    ("world", "body"),
    [
        (3, placements_mixed),
        (4, two_dimensions),
        (2, gradients_elsewhere),
        (2, none_on_one_rank),
        (2, dtypes_by_rank),
        (3, skipped_by_one_rank),
        (2, placed_anew),
        (2, state_of_whole_tensors),
        (2, several_meshes),
        (2, controller_mixed),
    ],
)
def test_shards(ranks: Ranks, world: int, body: Callable[..., None]) -> None:
    ranks(world, body)
