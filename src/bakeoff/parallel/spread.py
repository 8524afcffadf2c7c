"""A model over several ranks: whole on each (DDP), or in shards (FSDP2). Set up here, done by PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bakeoff.graphs import capture_stream

__all__ = ["full", "groups_of", "let_go", "replicas", "sharded"]

_UNIT = 1 << 27
"""Parameters that shards are gathered of at a time, unless one block has more: half a GB of float32, that the
links of H200s bring in about 1 ms (two add up 85M gradients in 1.1 ms). That is what a gathering costs the
host, too, which many small ones keep from running ahead of the device."""


def replicas(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model on every rank, whose gradients are averaged while backward runs; ready to be captured."""
    if device.type != "cuda":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    with torch.cuda.stream(capture_stream(device)):
        made = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
    torch.cuda.current_stream(device).wait_stream(capture_stream(device))
    return made


def sharded(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, size: int) -> nn.Module:
    """`model`, changed in place: a rank keeps 1/size of each parameter, and gathers some `blocks`, which
    follow on each other, at a time, or the whole model where that is no more. The last of them stay whole
    until backward, which begins with them."""
    from torch.distributed.fsdp import fully_shard  # takes half a second to import

    mesh, units = init_device_mesh(device.type, (size,)), _units(blocks)
    if len(units) > 1:
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not units[-1])
    fully_shard(model, mesh=mesh)
    return model


def _units(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Neighbours together, until they are worth the host's time for a gathering."""
    units: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        size = sum(p.numel() for p in block.parameters())
        if size > room:
            units.append([])
            room = _UNIT
        units[-1].append(block)
        room -= size
    return units


def let_go(model: nn.Module) -> None:
    """Gives back what a pass without gradients has gathered of a `sharded` model's weights."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # those that `fully_shard` made have it
        if callable(reshard):
            reshard()


def groups_of(count: int, device: torch.device, size: int) -> DeviceMesh:
    """The group of `count` consecutive ranks, of `size`, that this one is in (all ranks must ask)."""
    return init_device_mesh(device.type, (size // count, count), mesh_dim_names=("groups", "own"))["own"]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded (all ranks must ask)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
