"""Who attends which queries to which keys, so that no rank has much more to do than another.

With a causal mask the last of p equal parts sees all keys and the first its own alone: of dense attention
rank i has (2i + 1)/p of the mean, the last one 2 - 1/p. But a block of one rank's queries and another's keys
can be worked on by either. The rank of the queries fetches keys and values, or it hands over queries, and
gets back their accumulator, maximum and sum. One block for each pair of ranks, half of them with the keys:
that is a round robin, and even. Queries of one block may also be divided between the two.

What that moves, for a block of L queries and L keys of H heads and Hk kv heads, D wide, in 16 bits:

    keys come      forward  4 L Hk D         backward   4 L Hk D (again) and  8 L Hk D of gradients
    queries go     forward  6 L H D          backward   6 L H D              4 L H D of gradients

against 4 L^2 H D and 10 L^2 H D FLOPs: at least 2/3 L FLOPs for each byte forward, whatever the number of
ranks. Where H = Hk the queries' way is 16 bytes to 16. The other known way is to deal out the sequence anew, two
chunks a rank, one early and one late (zigzag; Megatron-LM, ring-flash-attention). It moves half of q, k, v, y
and their gradients once, and all ranks' keys then come to every rank. With many kv heads that is more, with
few and many ranks less; but it evens out a single causal segment alone. Handing over works for branches, packed
documents and parts of any lengths, and leaves every token where it is.
"""

import itertools
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bakeoff.parallel.exchange import Layout, own_pairs, pairs

__all__ = ["balanced", "even", "work"]

_STEP = 1e-3
"""Of the mean work: what isn't moved any more."""


@lru_cache(maxsize=256)
def work(layout: Layout) -> NDArray[np.int64]:
    """[ranks, ranks, kv heads]: the pairs of a query of the first rank and a key of the second that see each
    other, whoever works on them."""
    ranks = range(len(layout.borders) - 1)
    found = [
        [
            pairs(layout, source, *layout.part(rank)) if source != rank else own_pairs(layout, rank)
            for source in ranks
        ]
        for rank in ranks
    ]
    return np.array(found, np.int64)


def loads(layout: Layout) -> tuple[int, ...]:
    """The pairs that each rank works on, queries handed over included."""
    whole = work(layout).sum(2)
    found = whole.sum(1)
    for rank, source in itertools.permutations(range(len(whole)), 2):
        first, end = layout.handed_part(rank, source)
        if end > first:
            moved = int(pairs(layout, source, first, end).sum())
            found[rank] -= moved
            found[source] += moved
    return tuple(found.tolist())


@lru_cache(maxsize=256)
def balanced(layout: Layout) -> Layout:
    """`layout` with the queries that ranks hand over; as it is where that would even out nothing."""
    whole = work(layout).sum(2)
    moved = even(whole)
    if not moved.any():
        return layout
    ranks = range(len(whole))
    rows = [[_first(layout, rank, source, int(moved[rank, source])) for source in ranks] for rank in ranks]
    return layout._replace(handed_from=tuple(map(tuple, rows)))


def even(whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of whole[i, j], the work of rank i's queries with rank j's keys, rank i hands over to rank j.

    The busiest rank gives to the least busy one that it shares work with until they are even, again and again.
    Ends when nothing worth a message is left to give. Small remainders are then left where they were.

    Example:
        >>> even(np.array([[1, 0, 0], [2, 1, 0], [2, 2, 1]]))[2].tolist()  # 1, 3, 5: the last gives the first 2
        [2, 0, 0]
    """
    ranks, mean = len(whole), whole.sum() / len(whole)
    left, load = whole.copy(), whole.sum(1)
    np.fill_diagonal(left, 0)
    moved = np.zeros_like(whole)
    for _ in range(8 * ranks * ranks):
        gain = np.minimum(left, (load[:, None] - load) // 2)
        gain[gain <= _STEP * mean] = 0
        givers = np.flatnonzero(gain.any(1))
        if not len(givers):
            break
        rank = givers[np.argmax(load[givers])]
        takers = np.flatnonzero(gain[rank])
        source = takers[np.argmin(load[takers])]
        step = gain[rank, source]
        left[rank, source] -= step
        moved[rank, source] += step
        load[rank] -= step
        load[source] += step
    return np.where(moved > mean / (32 * ranks), moved, 0)


def _first(layout: Layout, rank: int, source: int, amount: int) -> int:
    """The token of `rank` from which on the queries have about `amount` pairs with keys of `source`.

    Up to it every head selects as many rows as the others, so that attention kernels can take what they could.
    """
    low, end = layout.part(rank)
    unit = math.lcm(*layout.pattern.rates)
    first, last = 0, -(-(end - low) // unit)  # in units; `last` has too little
    while last - first > 1:
        middle = (first + last) // 2
        enough = pairs(layout, source, low + middle * unit, end).sum() >= amount
        first, last = (middle, last) if enough else (first, middle)
    return low + first * unit if amount else end
