"""Rows of keys, values and queries on their way between ranks, and the error that names a rank lost there."""

import dataclasses
import enum
import hashlib
from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bakeoff.modes import kept_tensors
from bakeoff.parallel.exchange import Layout, handed, needs
from bakeoff.parallel.watch import RankError, lost_text

__all__ = ["Arrival", "Kind", "Peers", "local_places", "places_of"]


class Kind(enum.IntEnum):
    """What travels: messages of one kind between two ranks arrive in their order."""

    KEYS = 0
    KEY_GRADIENTS = 1
    QUERIES = 2
    STATISTICS = 3
    RESULTS = 4
    ARGUMENTS = 5
    HEADS = 6


_agreed: dict[dist.ProcessGroup, set[int]] = {}
"""What ranks have called with. Never forgotten: a rank that remembers less than another would wait for it."""


@dataclasses.dataclass
class Arrival:
    """Rows from one peer, once `wait` has returned: of keys and values [rows, 2, B, D]."""

    step: int
    source: int
    rows: Tensor
    works: list[tuple[int, dist.Work]]
    sent: Tensor | None
    """What goes the other way, kept until it is gone."""
    asked: list["Arrival"] = dataclasses.field(default_factory=list)
    """Queries that the rank behind hands over in this step."""

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

    def agree(self, device: torch.device, **arguments: Hashable) -> None:
        """Compares what all ranks call with, once for each set of arguments.

        Raises:
            ValueError: another rank passed something else; the message names the rank and the argument.
        """
        seen = _agreed.setdefault(self.group, set())
        digests = _digests(tuple(arguments.values()))
        if digests[-1] in seen:
            return
        mine = torch.tensor(digests, device=device)
        steps = range(1, self.size)
        pairs = [(self.behind(step), mine, self.before(step)) for step in steps]
        arrivals = self._post(pairs, [torch.empty_like(mine) for _ in steps], steps, Kind.ARGUMENTS)
        for source, theirs in [(arrival.source, arrival.wait().tolist()) for arrival in arrivals]:
            for (name, value), one, two in zip(arguments.items(), digests, theirs, strict=False):
                if one != two:
                    raise ValueError(
                        f"rank {source} of the mesh passed another {name} than rank {self.rank}, which "
                        f"passed {value}; all ranks call this with the same arguments"
                    )
        seen.add(digests[-1])

    def trade(self, sent: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """All-to-all: `sent` has a part for each rank, `out` takes one of each; all are contiguous."""
        out[self.rank].copy_(sent[self.rank])
        steps = range(1, self.size)
        pairs = [(self.behind(step), sent[self.behind(step)], self.before(step)) for step in steps]
        for arrival in self._post(pairs, [out[self.before(step)] for step in steps], steps, Kind.HEADS):
            arrival.wait()

    def send_rows(self, layout: Layout, k: Tensor, v: Tensor, steps: Sequence[int]) -> list[Arrival]:
        """Posts the exchange of `steps`: rows of k and v [B, L, heads, D] that others need, in one buffer."""
        offers = [self._rows(layout, self.behind(step), self.rank, k.device) for step in steps]
        t, h = (torch.cat(part) for part in zip(*offers, strict=True))
        packed = torch.stack((k[:, t, h], v[:, t, h]), 1).permute(2, 1, 0, 3).contiguous()
        wanted = [len(needs(layout, self.rank, self.before(step)).rows) for step in steps]
        out = packed.new_empty((sum(wanted), *packed.shape[1:]))
        sent = packed.split([len(offer[0]) for offer in offers])
        pairs = [(self.behind(step), part, self.before(step)) for step, part in zip(steps, sent, strict=True)]
        return self._post(pairs, out.split(wanted), steps, Kind.KEYS)

    def give_back(self, layout: Layout, step: int, gradients: Tensor) -> Arrival:
        """Posts the gradients of the rows that came in `step` to their owner; own rows' arrive."""
        user = self.behind(step)
        out = gradients.new_empty((len(needs(layout, user, self.rank).rows), *gradients.shape[1:]))
        return self._one((self.before(step), gradients, user), out, step, Kind.KEY_GRADIENTS)

    def add_returned(self, layout: Layout, arrival: Arrival, dk: Tensor, dv: Tensor) -> None:
        """Adds returned gradients to those of own rows."""
        rows = arrival.wait()
        t, h = self._rows(layout, arrival.source, self.rank, dk.device)
        dk[:, t, h] += rows[:, 0].transpose(0, 1)
        dv[:, t, h] += rows[:, 1].transpose(0, 1)

    def hand_over(self, layout: Layout, step: int, tensors: Sequence[Tensor], kind: Kind) -> Arrival:
        """Posts the rows of `tensors`, each [B, L, heads, ...], that the rank before works on; those that
        this rank works on arrive, [rows, tensors, B, ...]."""
        user, source = self.behind(step), self.before(step)
        t, h = local_places(layout, self.rank, source, tensors[0].device)
        sent = torch.stack([x[:, t, h] for x in tensors], 1).transpose(0, 2).contiguous()
        out = sent.new_empty((len(handed(layout, user, self.rank).rows), *sent.shape[1:]))
        return self._one((source, sent, user), out, step, kind)

    def answer(self, layout: Layout, step: int, results: Tensor) -> Arrival:
        """Posts what this rank made, [rows, ...], of the rows that `hand_over` brought in `step`; what the
        rank before made of own rows arrives."""
        source = self.before(step)
        out = results.new_empty((len(handed(layout, self.rank, source).rows), *results.shape[1:]))
        return self._one((self.behind(step), results, source), out, step, Kind.RESULTS)

    def behind(self, step: int) -> int:
        return (self.rank + step) % self.size

    def before(self, step: int) -> int:
        return (self.rank - step) % self.size

    def _rows(self, layout: Layout, user: int, owner: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(local token, head) of the rows that `user` needs of `owner`."""
        return _places(layout, user, owner, device)

    def _one(self, pair: tuple[int, Tensor, int], out: Tensor, step: int, kind: Kind) -> Arrival:
        (arrival,) = self._post([pair], (out,), (step,), kind)
        return arrival

    def _post(
        self, pairs: Sequence[tuple[int, Tensor, int]], out: Sequence[Tensor], steps: Sequence[int],
        kind: Kind,
    ) -> list[Arrival]:  # fmt: skip
        """Sends each pair's tensor to its first rank and receives into `out` from its second; empty ones are
        left out."""
        ops, mine = [], []
        for number, ((to, sent, source), got, step) in enumerate(zip(pairs, out, steps, strict=True)):
            tag = len(Kind) * step + kind
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
        # On the CPU one by one: to post can fail there, and then it is known whose peer is lost.
        alone = ops[0].tensor.device.type == "cpu"
        works: list[dist.Work] = []
        for posted in [[op] for op in ops] if alone else [ops]:
            try:
                works += dist.batch_isend_irecv(posted)
            except RuntimeError as error:
                raise lost(f"rank {mine[len(works)][1]} of the mesh", error) from error
        # NCCL has one work for all of them.
        shared = len(works) != len(ops)
        for at, (number, peer) in enumerate(mine):
            arrivals[number].works.append((peer, works[0 if shared else at]))
        return arrivals


@kept_tensors(maxsize=256)
def _places(layout: Layout, user: int, owner: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(needs(layout, user, owner).rows).to(device)
    return rows // layout.heads, rows % layout.heads


@lru_cache(maxsize=256)
def _digests(values: tuple[Hashable, ...]) -> tuple[int, ...]:
    """Of each value, and of all."""
    texts = [*map(repr, values), repr(values)]
    return tuple(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) for text in texts)


@lru_cache(maxsize=64)
def _joined(group: dist.ProcessGroup) -> None:
    """NCCL connects all ranks of a group at its first call, which must therefore be one of all ranks."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


@kept_tensors(maxsize=256)
def places_of(layout: Layout, user: int, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token, counted from the first that is handed over, head) of the rows that `user` hands to `source`."""
    rows = torch.from_numpy(handed(layout, user, source).rows).to(device)
    return rows // layout.heads, rows % layout.heads


@kept_tensors(maxsize=256)
def local_places(layout: Layout, user: int, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same with tokens counted from the first of `user`."""
    t, h = places_of(layout, user, source, device)
    return t + (layout.handed_part(user, source)[0] - layout.part(user)[0]), h


def lost(who: str, error: RuntimeError) -> RankError:
    """The error in place of one that an exchange ended with."""
    first = str(error).partition("\n")[0]
    return RankError(f"{who} was lost in the exchange of keys and values: {lost_text(first)}")
