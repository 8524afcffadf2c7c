"""Which rows of keys and values ranks exchange for dilated attention, worked out before anything runs.

Ranks hold contiguous parts of the sequence. A segment within one part needs nothing from others; of one that
straddles a border, each rank needs the keys that its peers' parts of the segment select. One rule, the
intersection of intervals, covers aligned segments, short last ones, packed documents and any length of part.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bakeoff.ops.dilated_attention.reference import Pattern

__all__ = [
    "Block",
    "Layout",
    "Needs",
    "borders",
    "documents_within",
    "handed",
    "needs",
    "number_handed",
    "number_needed",
    "own_blocks",
    "own_pairs",
    "pairs",
]

Ints = NDArray[np.int64]
PAD = -1
"""In the place of a token where a head selects fewer than another."""


class Layout(NamedTuple):
    """What all ranks know of a call: the pattern, where parts and documents begin and end, the mask, and
    which queries are handed over."""

    pattern: Pattern
    borders: tuple[int, ...]
    """Rank i holds tokens borders[i] to borders[i + 1]."""
    documents: tuple[int, ...]
    """Document i is tokens documents[i] to documents[i + 1]; tokens outside all see nothing."""
    causal: bool
    handed_from: tuple[tuple[int, ...], ...] = ()
    """Rank i hands over its queries from token handed_from[i][j] on to rank j, which attends them to its own
    keys (see `balance`). Empty where no rank does."""

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

    def handed_part(self, rank: int, source: int) -> tuple[int, int]:
        """The tokens of `rank` whose queries are handed over to `source`: first, and one past the last."""
        _, end = self.part(rank)
        return (self.handed_from[rank][source] if self.handed_from else end), end


class Block(NamedTuple):
    """Rows of one branch that attend to each other: [segments, kv heads, rows] of tokens, `PAD` for none."""

    branch: int
    queries: Ints
    keys: Ints


class Needs(NamedTuple):
    """What one rank needs of another: rows, counted token by token and head by head, each once whatever
    branches use it, in order."""

    rows: Ints
    blocks: tuple[Block, ...]


def borders(tokens: int, ranks: int) -> tuple[int, ...]:
    """Where the parts of equal length begin, and the end; lengths differ by at most one token.

    Raises ValueError for what is no number of tokens or ranks.

    Example:
        >>> borders(10, 4)
        (0, 2, 5, 7, 10)
    """
    if ranks < 1 or tokens < 0 or tokens != int(tokens):
        raise ValueError(f"{tokens} tokens over {ranks} ranks; give a whole number >= 0 and a rank or more")
    return tuple(rank * int(tokens) // ranks for rank in range(ranks + 1))


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
    """The rows of keys that `rank` needs of `source`, another rank: the same on both."""
    found = tuple(_kept(layout, rank, source))
    return Needs(np.flatnonzero(_marked(layout, layout.part(source), (block.keys for block in found))), found)


def number_needed(layout: Layout, rank: int, source: int) -> int:
    """How many rows `needs` has; kept nowhere, as a plan asks for all pairs of ranks."""
    return _number(layout, source, layout.part(rank)[0], layout.handed_part(rank, source)[0], "keys")


@lru_cache(maxsize=256)
def handed(layout: Layout, rank: int, source: int) -> Needs:
    """The rows of queries that `rank` hands over to `source`, from the first of `Layout.handed_part` on, and
    the blocks that `source` works on for it. Each of the rows sees a key."""
    part = layout.handed_part(rank, source)
    found = tuple(_blocks(layout, source, *part))
    return Needs(np.flatnonzero(_marked(layout, part, (block.queries for block in found))), found)


def number_handed(layout: Layout, rank: int, source: int) -> int:
    """How many rows `handed` has."""
    return _number(layout, source, *layout.handed_part(rank, source), "queries")


def own_pairs(layout: Layout, rank: int) -> Ints:
    """How many pairs of a query and a key of this rank see each other, for each kv head."""
    low, high = layout.part(rank)
    found = np.zeros(layout.heads, np.int64)
    for w, r, phases in zip(*layout.pattern, strict=True):
        for a, b in _documents(layout, low, high):
            whole = max(0, (min(b, high) - a) // w - -(-(max(low, a) - a) // w))
            parts = [(whole, _counts(0, w, 0, w, r, phases)[1])]
            parts += [(1, _counts(*cut, low, high, r, phases)[1]) for cut in _cut(a, b, w, low, high)]
            for number, rows in parts:
                found += number * (rows * (rows + 1) // 2 if layout.causal else rows * rows)
    return found


def pairs(layout: Layout, source: int, low: int, high: int) -> Ints:
    """How many pairs of a query from `low` to `high`, of another rank, and a key of `source` see each other,
    for each kv head."""
    found = np.zeros(layout.heads, np.int64)
    for _, (start, end), r, phases in _shared(layout, source, low, high):
        _, queries = _counts(start, end, low, high, r, phases)
        found += queries * _counts(start, end, *layout.part(source), r, phases)[1]
    return found


def _number(layout: Layout, source: int, low: int, high: int, what: Literal["queries", "keys"]) -> int:
    """How many rows of queries or of keys the blocks of `_blocks` have."""
    parts = {"queries": (low, high), "keys": layout.part(source)}
    shared = list(itertools.islice(_shared(layout, source, low, high), 2))
    if len(shared) > 1:  # which may have rows in common
        found = (getattr(block, what) for block in _blocks(layout, source, low, high))
        return int(_marked(layout, parts[what], found).sum())
    total = 0
    for _, (start, end), r, phases in shared:
        counts = {name: _counts(start, end, *part, r, phases)[1] for name, part in parts.items()}
        total += int(counts[what][(counts["queries"] > 0) & (counts["keys"] > 0)].sum())
    return total


def _kept(layout: Layout, rank: int, source: int) -> Iterator[Block]:
    """The blocks with keys of `source` that `rank` works on itself."""
    return _blocks(layout, source, layout.part(rank)[0], layout.handed_part(rank, source)[0])


def _blocks(layout: Layout, source: int, low: int, high: int) -> Iterator[Block]:
    """The blocks of queries from `low` to `high`, of another rank, with keys of `source`."""
    for branch, (start, end), r, phases in _shared(layout, source, low, high):
        queries = _selected(start, end, low, high, r, phases)
        keys = _selected(start, end, *layout.part(source), r, phases)
        used = ((queries != PAD).any(1) & (keys != PAD).any(1))[:, None]
        if used.any():
            yield Block(branch, np.where(used, queries, PAD)[None], np.where(used, keys, PAD)[None])


def _shared(
    layout: Layout, source: int, low: int, high: int
) -> Iterator[tuple[int, tuple[int, int], int, Sequence[int]]]:
    """(branch, segment, rate, phases) of the segments that hold tokens from `low` to `high`, all of one other
    rank, and tokens of `source` that these may see."""
    from_, to = layout.part(source)
    if layout.causal and from_ >= high:
        return
    nearest = high - 1 if from_ >= high else low  # its document is the only one that may reach `source`
    for branch, (w, r, phases) in enumerate(zip(*layout.pattern, strict=True)):
        for a, b in _documents(layout, nearest, min(nearest + 1, high)):
            for start, end in _cut(a, b, w, low, high):
                if min(end, to) > max(start, from_):
                    yield branch, (start, end), r, phases


def _marked(layout: Layout, part: tuple[int, int], found: Iterable[Ints]) -> NDArray[np.bool_]:
    """Which rows of the tokens of `part` are among `found`, [tokens * heads]."""
    first, end = part
    marked = np.zeros((end - first, layout.heads), bool)
    for tokens in found:
        for head, held in enumerate(tokens[0]):
            marked[held[held != PAD] - first, head] = True
    return marked.ravel()


def documents_within(layout: Layout, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of documents from `low` to `high`."""
    for a, b in _documents(layout, low, high):
        yield max(a, low), min(b, high)


def _documents(layout: Layout, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The documents with tokens from `low` to `high`."""
    ends = layout.documents
    first = max(0, bisect.bisect_right(ends, low) - 1)
    for a, b in itertools.pairwise(ends[first : bisect.bisect_left(ends, high) + 1]):
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
    first, counts = _counts(start, end, low, high, r, phases)
    place = np.arange(int(counts.max(initial=0)))
    return np.where(place < counts[:, None], first[:, None] + r * place, PAD)


def _counts(start: int, end: int, low: int, high: int, r: int, phases: Sequence[int]) -> tuple[Ints, Ints]:
    """(the first, how many) of the tokens of `_selected`, for each head."""
    first = start + np.asarray(phases, np.int64)
    first += -(-np.maximum(low - first, 0) // r) * r
    return first, np.maximum(-(-(min(end, high) - first) // r), 0)
