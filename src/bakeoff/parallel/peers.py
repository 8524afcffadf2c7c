"""Rows of keys and values on their way between ranks, and the error that names a rank lost there."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bakeoff.parallel.exchange import Layout, needs
from bakeoff.parallel.watch import RankError, lost_text

__all__ = ["Arrival", "Peers", "lost"]


@dataclasses.dataclass
class Arrival:
    """Rows from one peer, once `wait` has returned: [rows, 2, B, D], keys and values."""

    step: int
    source: int
    rows: Tensor
    works: list[tuple[int, dist.Work]]
    sent: Tensor | None
    """What goes the other way, kept until it is gone."""

    def wait(self) -> Tensor:
        """The rows. On a GPU its stream waits, not the host."""
        for peer, work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(f"rank {peer} of the mesh", error) from error
        self.works, self.sent = [], None
        return self.rows


class Peers:
    """The ranks that share a sequence. In step j a rank sends to the j-th behind it and hears from the j-th
    before it, so that in every step all links carry something."""

    def __init__(self, mesh: DeviceMesh | dist.ProcessGroup) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; pass the one that "
                    "shares the sequence: mesh['cp']"
                )
            mesh = mesh.get_group()
        self.group = mesh
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)
        if self.rank < 0:
            raise ValueError("this process is no rank of the mesh; only those of it call this")
        _joined(mesh)

    def send_rows(self, layout: Layout, k: Tensor, v: Tensor, steps: Sequence[int]) -> list[Arrival]:
        """Posts the exchange of `steps`: rows of k and v [B, L, heads, D] that others need, in one buffer."""
        offers = [self._rows(layout, self.behind(step), self.rank, k.device) for step in steps]
        t, h = (torch.cat(part) for part in zip(*offers, strict=True))
        packed = torch.stack((k[:, t, h], v[:, t, h]), 1).permute(2, 1, 0, 3).contiguous()
        wanted = [len(needs(layout, self.rank, self.before(step)).rows) for step in steps]
        out = packed.new_empty((sum(wanted), *packed.shape[1:]))
        sent = packed.split([len(offer[0]) for offer in offers])
        pairs = [(self.behind(step), part, self.before(step)) for step, part in zip(steps, sent, strict=True)]
        return self._post(pairs, out.split(wanted), steps)

    def give_back(self, layout: Layout, step: int, gradients: Tensor) -> Arrival:
        """Posts the gradients of the rows that came in `step` to their owner; own rows' arrive."""
        user = self.behind(step)
        out = gradients.new_empty((len(needs(layout, user, self.rank).rows), *gradients.shape[1:]))
        (arrival,) = self._post([(self.before(step), gradients, user)], (out,), (step,), backward=True)
        return arrival

    def add_returned(self, layout: Layout, arrival: Arrival, dk: Tensor, dv: Tensor) -> None:
        """Adds returned gradients to those of own rows."""
        rows = arrival.wait()
        t, h = self._rows(layout, arrival.source, self.rank, dk.device)
        dk[:, t, h] += rows[:, 0].transpose(0, 1)
        dv[:, t, h] += rows[:, 1].transpose(0, 1)

    def behind(self, step: int) -> int:
        return (self.rank + step) % self.size

    def before(self, step: int) -> int:
        return (self.rank - step) % self.size

    def _rows(self, layout: Layout, user: int, owner: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(local token, head) of the rows that `user` needs of `owner`."""
        return _places(layout, user, owner, device)

    def _post(
        self, pairs: Sequence[tuple[int, Tensor, int]], out: Sequence[Tensor], steps: Sequence[int],
        *, backward: bool = False,
    ) -> list[Arrival]:  # fmt: skip
        """Sends each pair's tensor to its first rank and receives into `out` from its second; empty ones are
        left out."""
        ops, mine = [], []
        for number, ((to, sent, source), got, step) in enumerate(zip(pairs, out, steps, strict=True)):
            tag = 2 * step + backward
            for peer, tensor, op in ((to, sent, dist.isend), (source, got, dist.irecv)):
                if tensor.numel():
                    place = dist.get_global_rank(self.group, peer)
                    ops.append(dist.P2POp(op, tensor, place, self.group, tag))
                    mine.append((number, peer))
        arrivals = [
            Arrival(step, source, got, [], sent)
            for (_, sent, source), got, step in zip(pairs, out, steps, strict=True)
        ]
        if not ops:
            return arrivals
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise lost(f"rank {mine[0][1]} of the mesh", error) from error
        # NCCL has one work for all of them.
        shared = len(works) != len(ops)
        for at, (number, peer) in enumerate(mine):
            arrivals[number].works.append((peer, works[0 if shared else at]))
        return arrivals


@lru_cache(maxsize=256)
def _places(layout: Layout, user: int, owner: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(needs(layout, user, owner).rows).to(device)
    return rows // layout.heads, rows % layout.heads


@lru_cache(maxsize=64)
def _joined(group: dist.ProcessGroup) -> None:
    """NCCL connects all ranks of a group at its first call, which must therefore be one of all ranks."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def lost(who: str, error: RuntimeError) -> RankError:
    """The error in place of one that an exchange ended with."""
    first = str(error).partition("\n")[0]
    return RankError(f"{who} was lost in the exchange of keys and values: {lost_text(first)}")
