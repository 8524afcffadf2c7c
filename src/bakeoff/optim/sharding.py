"""Parameters in shards over ranks (DTensors, as `fully_shard` makes them); sums and norms over them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bakeoff.select import TensorList

__all__ = [
    "Exchange",
    "Sharding",
    "exchange_of",
    "local",
    "place_state",
    "placed",
    "rows_over",
    "sharding_of",
]


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


class Exchange(NamedTuple):
    """Between which ranks sums over the elements of all parameters are added up."""

    mesh: Any
    cuts: tuple[int, ...]
    """The dimensions of the mesh along which some parameter is cut."""

    def share(self, sharding: Sharding | None) -> float:
        """What a rank's sum counts: 1 over the number of these ranks that hold the same elements."""
        own = () if sharding is None else [dim for dim, _ in sharding.cuts()]
        copies: int = math.prod(self.mesh.size(dim) for dim in self.cuts if dim not in own)
        return 1.0 / copies

    def add_up(self, sums: Tensor) -> None:
        """Adds what all ranks have to `sums`, in place: one exchange for each dimension."""
        for dim in self.cuts:
            dist.all_reduce(sums, group=self.mesh.get_group(dim))

    def norms(self, own: Tensor, found_inf: Tensor | None) -> tuple[TensorList, Tensor | None]:
        """Norms whose norm is that of what all ranks hold, `own` being this one's; and whether any rank has
        set `found_inf`. One exchange for each dimension."""
        dtype, found = own.dtype, found_inf
        for dim in self.cuts:
            group = self.mesh.get_group(dim)
            # Always of one dtype: ranks may have gradients of other dtypes than their peers, or none.
            both = own.new_zeros(dist.get_world_size(group) + 1, dtype=torch.float64)
            both[dist.get_rank(group)] = own
            if found is not None:
                both[-1] = found
            dist.all_reduce(both, group=group)
            norms = both[:-1]
            found = None if found is None else both[-1]
            own = norms.norm() if len(self.cuts) > 1 else own
        return TensorList.of([norms.to(dtype)]), None if found is None else found.float()


def exchange_of(shardings: Iterable[Sharding | None], name: str) -> Exchange | None:
    """Where the parameters of an optimizer, sharded so, add up; None where every rank holds them whole.

    Raises:
        ValueError: the parameters are sharded over several meshes.
    """
    cut = {sharding for sharding in set(shardings) if sharding is not None and sharding.cuts()}
    if not cut:
        return None
    mesh, *others = {sharding.mesh for sharding in cut}
    if others:
        raise ValueError(
            f"{name}: max_grad_norm, skip_nonfinite and a controller take parameters that are sharded over "
            f"one mesh, and these are over {mesh}, {', '.join(map(str, others))}; pass the same mesh= to "
            f"every fully_shard, or use an optimizer for each mesh"
        )
    return Exchange(mesh, tuple(sorted({dim for sharding in cut for dim, _ in sharding.cuts()})))


def placed(tensor: Any, param: Any, name: str) -> Any:
    """This rank's part of a gradient, in the placements of its parameter; a plain parameter's as it is.

    Others, such as sums that ranks have yet to add up, are exchanged, by all ranks together.

    Raises:
        ValueError: a plain gradient of a DTensor.
    """
    if not hasattr(param, "device_mesh"):
        return tensor
    if not hasattr(tensor, "device_mesh"):
        raise ValueError(
            f"{name}: a parameter is a DTensor and its gradient a plain tensor; assign "
            f"distribute_tensor(grad, param.device_mesh, param.placements)"
        )
    if tensor.placements != param.placements:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    own = tensor._local_tensor
    return own.wait() if hasattr(own, "wait") else own  # of an exchange that is under way


def place_state(state: dict[str, Any], keys: Iterable[str], param: Any, name: str) -> None:
    """Has a parameter's state lie in shards as the parameter does: one loaded whole is cut, one in other
    placements is exchanged, by all ranks together.

    Raises:
        ValueError: the state of a plain parameter is in shards.
    """
    for key in keys:
        value = state.get(key)
        if getattr(value, "placements", None) == getattr(param, "placements", None) or value is None:
            continue
        if not hasattr(param, "device_mesh"):
            raise ValueError(
                f"{name}: {key} of a parameter is in shards and the parameter is not; load the state with "
                f"{key}.full_tensor() in its place"
            )
        if hasattr(value, "device_mesh"):
            state[key] = value.redistribute(param.device_mesh, param.placements)
        else:
            from torch.distributed.tensor import distribute_tensor  # takes half a second to import

            mesh, placements = param.device_mesh, param.placements
            # A copy, as a view would keep the whole alive.
            state[key] = distribute_tensor(value, mesh, placements, src_data_rank=None).clone()
