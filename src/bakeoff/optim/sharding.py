"""Parameters in shards over ranks (DTensors, as `fully_shard` makes them); the norm of their gradients."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from bakeoff.ops.adamw.update import guard
from bakeoff.select import TensorList

__all__ = ["Sharding", "local", "norms_over", "rows_over", "sharding_of", "shards_over"]


class Sharding(NamedTuple):
    """Where the shards of a DTensor lie."""

    mesh: Any
    placements: tuple[Any, ...]

    def cuts(self) -> list[tuple[int, Any]]:
        """The dimensions of the mesh along which ranks hold different parts, and how these are cut."""
        return [(i, p) for i, p in enumerate(self.placements) if not p.is_replicate()]


def sharding_of(param: Any) -> Sharding | None:
    """How a parameter is sharded; None for a plain tensor."""
    return Sharding(param.device_mesh, param.placements) if hasattr(param, "device_mesh") else None


def local(tensors: Sequence[Any]) -> list[Any]:
    """This rank's shards of DTensors; other tensors as they are. The same objects each time, where `to_local`
    makes a new one of a parameter."""
    return [getattr(t, "_local_tensor", t) for t in tensors]


def rows_over(sharding: Sharding, name: str) -> Any:
    """The process group over which rows are sharded, each rank holding one chunk.

    Raises:
        ValueError: the sharding is another one.
    """
    cuts = sharding.cuts()
    if len(cuts) != 1 or not cuts[0][1].is_shard(0):
        raise ValueError(
            f"{name}: muon takes parameters whose rows are sharded over one dimension of a mesh, as "
            f"fully_shard does it, and one has placements {sharding.placements}; leave it to AdamW"
        )
    return sharding.mesh.get_group(cuts[0][0])


def shards_over(shardings: Iterable[Sharding | None], name: str) -> Any:
    """The process group whose ranks hold each element of all parameters once; None for plain tensors.

    Raises:
        ValueError: parameters are not all sharded alike, or over several dimensions of a mesh.
    """
    kinds = set(shardings)
    if not any(kinds):
        return None
    sharding = kinds.pop()
    cuts = [] if sharding is None else sharding.cuts()
    if kinds or sharding is None or len(cuts) != 1 or not cuts[0][1].is_shard():
        raise ValueError(
            f"{name}: max_grad_norm and skip_nonfinite take parameters that are all sharded alike, over one "
            f"dimension of a mesh, as fully_shard does it; leave both off, and clip with "
            f"torch.nn.utils.clip_grad_norm_"
        )
    return sharding.mesh.get_group(cuts[0][0])


def norms_over(group: Any, grads: Sequence[TensorList]) -> TensorList:
    """Each rank's norm of its shards of the gradients: the norm of these is the norm of all. One exchange."""
    own = guard(grads).norm
    norms = own.new_zeros(dist.get_world_size(group))
    norms[dist.get_rank(group)] = own
    dist.all_reduce(norms, group=group)
    return TensorList.of([norms])
