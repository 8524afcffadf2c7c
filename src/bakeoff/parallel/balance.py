"""Who attends which queries to which keys, so that no rank has much more to do than another.

With a causal mask the last of p equal parts sees all keys and the first its own alone: of dense attention
rank i has (2i + 1)/p of the mean, the last one 2 - 1/p. But a block of one rank's queries and another's keys
can be worked on by either. The rank of the queries fetches keys and values, or it hands over queries, and
gets back their accumulator, maximum and sum. One block for each pair of ranks, half of them with the keys:
that is a round robin, and even. Queries of one block may also be divided between the two.

Bytes that move for a block of L queries and L keys, H heads and Hk kv heads, D wide, in 16 bits:

    keys come      forward  4 L Hk D      backward  4 L Hk D (again) and 8 L Hk D of gradients
    queries go     forward  6 L H D       backward  6 L H D and 4 L H D of gradients

Forward, queries are 2 L H D and float32 accumulators 4 L H D; backward, queries, outputs and their gradients
go. The block has 4 L^2 H D and 10 L^2 H D FLOPs, so that a handed byte stands for 2/3 L FLOPs forward and L
backward, over any number of ranks: with 8,192 tokens a rank some 5,500, where NVLink moves a byte in the
time of 1,000. With H = Hk either way is 16 bytes, and balance is free.

The other known way deals the sequence out anew, two chunks a rank, one early and one late (zigzag). Half of
q, k, v, y and of their gradients moves once, and then every rank needs the keys of all, not half of them.
With H = Hk that is more bytes than here; with few kv heads and many ranks it is less. But it evens out only
one causal segment over equal parts. Handing over also works for branches, documents and parts of any lengths.
"""

import itertools
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bakeoff.parallel.exchange import Layout, own_pairs, pairs

__all__ = ["balanced", "even", "loads", "work"]

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
    better = layout._replace(handed_from=tuple(map(tuple, rows)))
    return better if max(loads(better)) < max(loads(layout)) else layout


def even(whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of whole[i, j], the work of rank i's queries with rank j's keys, rank i hands over to rank j.

    The busiest rank gives to the least busy one that it shares work with until both are even, again and
    again, until no step is worth it. Amounts that are then too small for a message stay where they were.

    Example:
        >>> even(np.array([[1, 0, 0], [2, 1, 0], [2, 2, 1]])).tolist()  # of 1, 3 and 5 the last gives 2
        [[0, 0, 0], [0, 0, 0], [2, 0, 0]]
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

    Up to it all heads select equally many rows, so that attention kernels can still take the blocks.
    """
    low, end = layout.part(rank)
    if not amount:
        return end
    unit = math.lcm(*layout.pattern.rates)
    first, last = 0, -(-(end - low) // unit)  # in units; `last` has too little
    while last - first > 1:
        middle = (first + last) // 2
        enough = pairs(layout, source, low + middle * unit, end).sum() >= amount
        first, last = (middle, last) if enough else (first, middle)
    return low + first * unit
