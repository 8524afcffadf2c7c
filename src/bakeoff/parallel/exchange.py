"""Which rows of keys and values ranks exchange for dilated attention, worked out before anything runs.

Ranks hold contiguous parts of the sequence. A segment within one part needs nothing from others; of one that
straddles a border, each rank needs the keys that its peers' parts of the segment select. One rule, the
intersection of intervals, covers aligned segments, short last ones, packed documents and any length of part.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bakeoff.ops.dilated_attention.reference import Pattern

__all__ = ["Block", "Layout", "Needs", "borders", "documents_within", "needs", "number_needed", "own_blocks"]

Ints = NDArray[np.int64]
PAD = -1
"""In the place of a token where a head selects fewer than another."""


class Layout(NamedTuple):
    """What all ranks know of a call: the pattern, where parts and documents begin and end, and the mask."""

    pattern: Pattern
    borders: tuple[int, ...]
    """Rank i holds tokens borders[i] to borders[i + 1]."""
    documents: tuple[int, ...]
    """Document i is tokens documents[i] to documents[i + 1]; tokens outside all see nothing."""
    causal: bool

    @property
    def tokens(self) -> int:
        return self.borders[-1]

    @property
    def heads(self) -> int:
        """Of keys and values."""
        return len(self.pattern.phases[0])

    @property
    def local(self) -> bool:
        """Whether every segment begins and ends within one part."""
        return all(
            (border - a) % w == 0
            for border in self.borders[1:-1]
            for a, b in itertools.pairwise(self.documents)
            if a < border < b
            for w in self.pattern.segments
        )

    def part(self, rank: int) -> tuple[int, int]:
        """The tokens of `rank`: first, and one past the last."""
        return self.borders[rank], self.borders[rank + 1]


class Block(NamedTuple):
    """Rows of one branch that attend to each other: [segments, kv heads, rows] of tokens, `PAD` for none."""

    branch: int
    queries: Ints
    keys: Ints


class Needs(NamedTuple):
    """What one rank needs of another: rows, counted local token by token and head by head, each once whatever
    branches use it, in order."""

    rows: Ints
    blocks: tuple[Block, ...]


def borders(tokens: int, ranks: int) -> tuple[int, ...]:
    """Where the parts of equal length begin, and the end; lengths differ by at most one token.

    Example:
        >>> borders(10, 4)
        (0, 2, 5, 7, 10)
    """
    return tuple(rank * tokens // ranks for rank in range(ranks + 1))


def own_blocks(layout: Layout, rank: int) -> Iterator[Block]:
    """The blocks of a rank with its own keys; whole segments of a branch are one block."""
    low, high = layout.part(rank)
    for branch, (w, r, phases) in enumerate(zip(*layout.pattern, strict=True)):
        for a, b in _documents(layout, low, high):
            first, last = -(-(max(low, a) - a) // w), (min(high, b) - a) // w
            if last > first:
                starts = a + w * np.arange(first, last)
                held = _selected(0, w, 0, w, r, phases)
                if held.shape[1]:
                    tokens = np.where(held == PAD, PAD, held + starts[:, None, None])
                    yield Block(branch, tokens, tokens)
            for start, end in _cut(a, b, w, low, high):
                held = _selected(start, end, low, high, r, phases)[None]
                if held.shape[2]:
                    yield Block(branch, held, held)


@lru_cache(maxsize=256)
def needs(layout: Layout, rank: int, source: int) -> Needs:
    """What `rank` needs of `source`, another rank: the same on both."""
    found = tuple(_blocks(layout, rank, source))
    return Needs(np.flatnonzero(_marked(layout, source, found)), found)


def number_needed(layout: Layout, rank: int, source: int) -> int:
    """How many rows `needs` has; kept nowhere, as a plan asks for all pairs of ranks."""
    return int(_marked(layout, source, _blocks(layout, rank, source)).sum())


def _blocks(layout: Layout, rank: int, source: int) -> Iterator[Block]:
    """The blocks of `rank` with keys of `source`."""
    (low, high), (from_, to) = layout.part(rank), layout.part(source)
    if layout.causal and source > rank:
        return
    for branch, (w, r, phases) in enumerate(zip(*layout.pattern, strict=True)):
        for a, b in _documents(layout, low, high):
            for start, end in _cut(a, b, w, low, high):
                if min(end, to) <= max(start, from_):
                    continue
                queries = _selected(start, end, low, high, r, phases)
                keys = _selected(start, end, from_, to, r, phases)
                keys = np.where((queries != PAD).any(1)[:, None], keys, PAD)
                if (keys != PAD).any():
                    yield Block(branch, queries[None], keys[None])


def _marked(layout: Layout, source: int, found: Iterable[Block]) -> NDArray[np.bool_]:
    """Which rows of `source` blocks have as keys, [tokens * heads]."""
    first, end = layout.part(source)
    marked = np.zeros((end - first, layout.heads), bool)
    for block in found:
        for head, keys in enumerate(block.keys[0]):
            marked[keys[keys != PAD] - first, head] = True
    return marked.ravel()


def documents_within(layout: Layout, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of documents from `low` to `high`."""
    for a, b in _documents(layout, low, high):
        yield max(a, low), min(b, high)


def _documents(layout: Layout, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The documents with tokens from `low` to `high`."""
    ends = layout.documents
    for a, b in itertools.pairwise(ends):
        if min(b, high) > max(a, low):
            yield a, b


def _cut(a: int, b: int, w: int, low: int, high: int) -> list[tuple[int, int]]:
    """The segments of length `w` of document a to b that have tokens from `low` to `high`, but not a whole
    segment of them: cut by a border, or by the document's end."""
    found = []
    for token in (max(low, a), min(high, b) - 1):
        start = a + (token - a) // w * w
        end = min(start + w, b)
        whole = end - start == w and start >= low and end <= high
        if not whole and (start, end) not in found:
            found.append((start, end))
    return found


def _selected(start: int, end: int, low: int, high: int, r: int, phases: Sequence[int]) -> Ints:
    """The tokens from `low` to `high` that each head selects of the segment start to end, [heads, rows]."""
    first = start + np.asarray(phases, np.int64)
    first += -(-np.maximum(low - first, 0) // r) * r
    counts = np.maximum(-(-(min(end, high) - first) // r), 0)
    place = np.arange(int(counts.max(initial=0)))
    return np.where(place < counts[:, None], first[:, None] + r * place, PAD)
