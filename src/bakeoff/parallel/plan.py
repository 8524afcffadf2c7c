"""How many bytes context parallelism moves, how evenly ranks work, and by which method, before it runs."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bakeoff.parallel.balance import balanced, loads, work
from bakeoff.parallel.exchange import Layout, number_handed, number_needed

__all__ = ["METHODS", "ContextPlan", "Volume", "planned"]

METHODS = ("exchange", "ring", "balanced", "ulysses")

_FLOPS_A_BYTE = 2000
"""That a rank does in the time in which a byte arrives: on two and four H200s, with gradients, 380 to 490
TFLOP/s and 180 to 290 GB/s over NVLink, what is laid out before and after included."""
_MERGED = 1.5
"""How much longer a pair of a query and a key takes where peers' blocks are merged than in the op's own
kernel: 1.1 to 1.6 there."""


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
            asked for again in backward; balanced, a ring in which ranks with more work hand over queries;
            ulysses, all tokens of some heads.
        volumes: bytes received by the busiest rank; without "ulysses" where the ranks don't divide the heads,
            without "balanced" where nothing is to be handed over.
        shares: of the same methods, each rank's work by the mean: pairs of a query and a key.
        dense: what ring attention over all keys would move.
        local: whether no rank needs anything of another.
    """

    method: str
    volumes: dict[str, Volume]
    shares: dict[str, tuple[float, ...]]
    dense: Volume
    local: bool

    def __str__(self) -> str:
        lines = [
            f"{'>' if name == self.method else ' '} {name}: {volume}; {max(self.shares[name]):.2f}"
            for name, volume in self.volumes.items()
        ]
        lines.append(f"  dense ring attention: {self.dense}")
        return "received by the busiest rank; the most work of a rank by the mean\n" + "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of what travels."""

    batch: int
    group: int
    """Queries a kv head."""
    head_dim: int
    itemsize: int
    softmaxes: int

    @property
    def wide(self) -> int:
        """Of an accumulator's element."""
        return max(4, self.itemsize)

    @property
    def keys(self) -> int:
        """A row of keys and values."""
        return 2 * self.batch * self.head_dim * self.itemsize

    @property
    def key_gradients(self) -> int:
        return 2 * self.batch * self.head_dim * self.wide

    @property
    def queries(self) -> int:
        """A row of queries of one kv head."""
        return self.batch * self.group * self.head_dim * self.itemsize

    @property
    def results(self) -> int:
        """Accumulators, maxima and sums of such a row."""
        return self.batch * self.group * self.softmaxes * (self.head_dim + 2) * self.wide

    @property
    def told(self) -> int:
        """What backward needs of such a row: queries, slopes, in 16 bits also outputs; lse and deltas."""
        outputs = self.itemsize == 2 and self.softmaxes == 1
        statistics = self.batch * self.group * (1 + self.softmaxes) * self.wide
        return (2 + outputs) * self.queries + statistics

    @property
    def query_gradients(self) -> int:
        return self.batch * self.group * self.head_dim * self.wide

    @property
    def flops(self) -> int:
        """For a pair of a query and a key of one kv head: two products forward, five backward."""
        return 14 * self.batch * self.group * self.head_dim


@lru_cache(maxsize=1024)
def planned(
    layout: Layout, batch: int, heads: int, head_dim: int, itemsize: int, method: str, softmaxes: int = 1
) -> ContextPlan:
    """The plan of a call; equal on all ranks. A query has one softmax, or one for each branch where weights
    of the mixture are detached.

    Raises:
        ValueError: an unknown method, or "ulysses" with heads that the ranks don't divide.
    """
    ranks, kv_heads = len(layout.borders) - 1, layout.heads
    sizes = _Sizes(batch, heads // kv_heads, head_dim, itemsize, softmaxes)
    keys = _counted(layout, number_needed)
    asked, lent = keys.sum(1) * sizes.keys, keys.sum(0) * sizes.key_gradients
    most = int(keys.sum(1).max())
    volumes = {
        "exchange": Volume(int(asked.max()), int(lent.max())),
        "ring": Volume(int(asked.max()), int((asked + lent).max())),
    }
    own = loads(layout)
    counts = {"exchange": own, "ring": own}
    better = balanced(layout)
    if better.handed_from or method == "balanced":
        volumes["balanced"], counts["balanced"] = _of_balanced(better, sizes), loads(better)
    lengths = [b - a for a, b in itertools.pairwise(layout.borders)]
    if not heads % ranks and not kv_heads % ranks:
        share = batch * head_dim * itemsize
        there = (layout.tokens - min(lengths)) * (heads + 2 * kv_heads) // ranks
        back = max(lengths) * heads * (ranks - 1) // ranks
        volumes["ulysses"] = Volume((there + back) * share, (there + back) * share)
        counts["ulysses"] = tuple(work(layout).sum((0, 1)).reshape(ranks, -1).sum(1).tolist())
    others = (layout.tokens - min(lengths)) * kv_heads if ranks > 1 else 0
    dense = Volume(others * sizes.keys, others * (sizes.keys + sizes.key_gradients))
    costs = {
        name: volume.forward
        + volume.backward
        + max(counts[name]) * sizes.flops / _FLOPS_A_BYTE * (_MERGED if name != "ulysses" and most else 1.0)
        for name, volume in volumes.items()
    }
    chosen = _chosen(costs, fits=most <= max(lengths) * kv_heads) if method == "auto" else method
    if chosen not in METHODS:
        raise ValueError(f"method is {method!r}; it is auto, {', '.join(METHODS)}")
    if chosen not in volumes:
        raise ValueError(
            f"ulysses gives each of {ranks} ranks as many heads, and {heads} heads with {kv_heads} kv heads "
            "don't divide; take method='exchange'"
        )
    shares = {name: tuple(n * ranks / max(1, sum(each)) for n in each) for name, each in counts.items()}
    return ContextPlan(chosen, volumes, shares, dense, most == 0)


def _counted(layout: Layout, number: Callable[[Layout, int, int], int]) -> NDArray[np.int64]:
    """`number` of all pairs of ranks, [user, source]."""
    ranks = range(len(layout.borders) - 1)
    return np.array(
        [[number(layout, rank, source) if rank != source else 0 for source in ranks] for rank in ranks],
        np.int64,
    )


def _of_balanced(layout: Layout, sizes: _Sizes) -> Volume:
    """What the busiest rank receives where queries are handed over. Those that come are the sums over the
    first dimension of [user, source], what comes back for own ones that over the second."""
    keys, queries = _counted(layout, number_needed), _counted(layout, number_handed)
    forward = keys.sum(1) * sizes.keys + queries.sum(0) * sizes.queries + queries.sum(1) * sizes.results
    backward = (
        keys.sum(1) * sizes.keys
        + keys.sum(0) * sizes.key_gradients
        + queries.sum(0) * sizes.told
        + queries.sum(1) * sizes.query_gradients
    )
    return Volume(int(forward.max()), int(backward.max()))


def _chosen(costs: dict[str, float], *, fits: bool) -> str:
    """What takes least, work and bytes together; rows that exceed a rank's own part come peer by peer.

    `balanced` is left to those who ask for it: it was slower than the ring wherever GPUs timed it.
    """
    plain = "exchange" if fits else "ring"
    return plain if costs[plain] <= costs.get("ulysses", math.inf) else "ulysses"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
