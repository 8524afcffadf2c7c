"""A model over several ranks: whole on each (DDP), or in shards (FSDP2). Set up here, done by PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bakeoff.graphs import capture_stream

__all__ = ["full", "groups_of", "replicas", "sharded", "total_norm"]

_UNIT = 1 << 25
"""Parameters that shards are gathered of at a time, unless one block has more."""


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
    follow on each other, at a time."""
    from torch.distributed.fsdp import fully_shard  # takes half a second to import

    mesh = init_device_mesh(device.type, (size,))
    for unit in _units(blocks):
        fully_shard(unit, mesh=mesh)
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


def groups_of(count: int, device: torch.device, size: int) -> DeviceMesh:
    """The group of `count` consecutive ranks, of `size`, that this one is in (all ranks must ask)."""
    return init_device_mesh(device.type, (size // count, count), mesh_dim_names=("groups", "own"))["own"]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded (all ranks must ask)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients of the whole model, sharded or not, equal on all ranks."""
    return full(nn.utils.get_total_norm(gradients))
