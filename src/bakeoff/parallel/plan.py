"""How many bytes context parallelism moves, and by which method, before anything runs."""

import dataclasses
from functools import lru_cache

from bakeoff.parallel.exchange import Layout, number_needed

__all__ = ["METHODS", "ContextPlan", "Volume", "planned"]

METHODS = ("exchange", "ring", "ulysses")


@dataclasses.dataclass(frozen=True)
class Volume:
    """Bytes that the busiest rank receives, forward and backward."""

    forward: int
    backward: int

    def __str__(self) -> str:
        return f"{_megabytes(self.forward)} forward, {_megabytes(self.backward)} backward"


@dataclasses.dataclass(frozen=True, eq=False)
class ContextPlan:
    """A method, and what each would move.

    Attributes:
        method: exchange, the selected rows of all peers at once; ring, the same rows of one peer at a time,
            asked for again in backward; ulysses, all tokens of some heads.
        volumes: bytes received by the busiest rank; without "ulysses" where the ranks don't divide the heads.
        dense: what ring attention over all keys would move.
        local: whether no rank needs anything of another.
    """

    method: str
    volumes: dict[str, Volume]
    dense: Volume
    local: bool

    def __str__(self) -> str:
        lines = [
            f"{'>' if name == self.method else ' '} {name}: {volume}" for name, volume in self.volumes.items()
        ]
        lines.append(f"  dense ring attention: {self.dense}")
        return "received by the busiest rank\n" + "\n".join(lines)


@lru_cache(maxsize=1024)
def planned(layout: Layout, batch: int, heads: int, head_dim: int, itemsize: int, method: str) -> ContextPlan:
    """The plan of a call; equal on all ranks.

    Raises:
        ValueError: an unknown method, or "ulysses" with heads that the ranks don't divide.
    """
    ranks, kv_heads = len(layout.borders) - 1, layout.heads
    asked = [[number_needed(layout, rank, source) if rank != source else 0 for source in range(ranks)]
             for rank in range(ranks)]  # fmt: skip
    most, lent = max(map(sum, asked)), max(map(sum, zip(*asked, strict=True)))
    row, slope = 2 * batch * head_dim * itemsize, 2 * batch * head_dim * max(4, itemsize)
    volumes = {
        "exchange": Volume(most * row, lent * slope),
        "ring": Volume(most * row, most * row + lent * slope),
    }
    lengths = [b - a for a, b in zip(layout.borders, layout.borders[1:], strict=False)]
    if not heads % ranks and not kv_heads % ranks:
        share = batch * head_dim * itemsize
        there = (layout.tokens - min(lengths)) * (heads + 2 * kv_heads) // ranks
        back = max(lengths) * heads * (ranks - 1) // ranks
        volumes["ulysses"] = Volume((there + back) * share, (there + back) * share)
    others = (layout.tokens - min(lengths)) * kv_heads if ranks > 1 else 0
    dense = Volume(others * row, others * (row + slope))
    chosen = _chosen(volumes, fits=most <= max(lengths) * kv_heads) if method == "auto" else method
    if chosen not in METHODS:
        raise ValueError(f"method is {method!r}; it is auto, {', '.join(METHODS)}")
    if chosen not in volumes:
        raise ValueError(
            f"ulysses gives each of {ranks} ranks as many heads, and {heads} heads with {kv_heads} kv heads "
            "don't divide; take method='exchange'"
        )
    return ContextPlan(chosen, volumes, dense, most == 0)


def _chosen(volumes: dict[str, Volume], *, fits: bool) -> str:
    """What moves least; rows that exceed a rank's own part come from one peer at a time."""
    name = "exchange" if fits else "ring"
    totals = {method: volume.forward + volume.backward for method, volume in volumes.items()}
    return "ulysses" if totals.get("ulysses", totals[name]) < totals[name] else name


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
