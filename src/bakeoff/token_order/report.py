"""What an order is worth: attention kept by segments, blocks of a local window, tokens of other devices."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Halo", "OrderReport", "reported"]

Ints = NDArray[np.integer[Any]]
_FAR = 45.0  # past so many times `decay` all tokens together hold less than a rounding of float64
_BRANCHES, _PHASES, _BOX, _BLOCKS = 12, 4096, 2**28, 2**28


@dataclasses.dataclass(frozen=True)
class Halo:
    """What the window of a device needs from others: remote tokens over own ones, of the worst device."""

    devices: int
    share: float


@dataclasses.dataclass(frozen=True)
class OrderReport:
    """Three measures of an order; `keys` depends on the branches alone and is the same for every order.

    Attributes:
        keys: keys that a query of one head attends to, on average.
        kept: of attention that decays as exp(-distance / decay) over all tokens, the share on those keys; a
            mean over queries, and over heads of every phase.
        active_blocks: of a score matrix in blocks, the share with a pair of tokens within the window: what a
            block-sparse kernel computes for exact local attention. Of more than 16,384 blocks of queries (in
            blocks of 128, two million tokens) a sample is looked at.
        halos: for each number of devices, the tokens that local attention needs from other devices.
    """

    keys: float
    kept: float
    active_blocks: float
    halos: tuple[Halo, ...]

    def __str__(self) -> str:
        halos = ", ".join(f"{halo.share:.2f} of {halo.devices} devices" for halo in self.halos)
        return (
            f"{self.keys:.0f} keys a query hold {self.kept:.1%} of the attention; a local window touches "
            f"{self.active_blocks:.1%} of the blocks; remote tokens, times a device's own: {halos or '-'}"
        )


def reported(
    cells: NDArray[Any] | None,
    places: Ints,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    decay: float = 8.0,
    window: int | None = None,
    block: int = 128,
    devices: Sequence[int] = (2, 4, 8),
    samples: int = 256,
) -> OrderReport:
    """The report of tokens with coordinates `cells`, of which token t is at places[t]."""
    branches = _branches(segments, rates, len(places))
    if cells is None or np.issubdtype(cells.dtype, np.floating) or not len(cells):
        raise ValueError(
            "a report needs tokens with whole coordinates: make the order from shape= or rounded coordinates="
        )
    window = {2: 8, 3: 2}[cells.shape[1]] if window is None else window
    if not 0 < decay < math.inf:
        raise ValueError(f"decay is {decay}; it must be positive and finite")
    counts = [("window", window), ("block", block), ("samples", samples)]
    for name, value in [*counts, *(("devices", number) for number in devices)]:
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is {value}; it must be positive and whole")
    table = _table(cells, places)
    keys, kept = _attention(cells, places, table, branches, decay, samples)
    active, halos = _windowed(table, len(places), window, block, devices)
    return OrderReport(keys, kept, active, halos)


def _branches(segments: Sequence[int], rates: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    try:
        segments, rates = (tuple(map(operator.index, sizes)) for sizes in (segments, rates))
    except TypeError:
        raise ValueError(
            f"segments are {segments} and rates {rates}; give whole numbers, such as (64, 256), (1, 4)"
        ) from None
    if len(segments) != len(rates) or not 0 < len(segments) <= _BRANCHES:
        raise ValueError(
            f"{len(segments)} segments and {len(rates)} rates; give as many of each, 1 to {_BRANCHES}"
        )
    for w, r in zip(segments, rates, strict=True):
        if not 1 <= r <= w:
            raise ValueError(f"segment {w} with rate {r}; a rate is at least 1 and at most its segment")
    return [(min(w, tokens), r) for w, r in zip(segments, rates, strict=True)]


def _attention(
    cells: NDArray[Any],
    places: Ints,
    table: NDArray[np.int32],
    branches: list[tuple[int, int]],
    decay: float,
    samples: int,
) -> tuple[float, float]:
    """(keys a query, share of attention on them), by samples of queries."""
    tokens = len(places)
    chosen = np.random.default_rng(0).permutation(tokens)[:samples]
    heads = np.arange(min(math.lcm(*(r for _, r in branches)), _PHASES))
    sets = np.arange(2 ** len(branches))
    token_at = np.empty(tokens, np.int64)
    token_at[places] = np.arange(tokens)
    counts, shares = [], []
    for query, whole in zip(chosen, _masses(cells[chosen] - cells.min(0), table, decay), strict=True):
        place = int(places[query])
        begin = min(place // w * w for w, _ in branches)
        end = min(max((place // w + 1) * w for w, _ in branches), tokens)
        near = np.arange(begin, end)  # beyond these no branch holds a key
        away = np.square((cells[token_at[near]] - cells[query]).astype(np.float64)).sum(1)
        holding = np.zeros(len(near), np.int64)  # bit i: branch i holds the key, in heads of its phase
        active = np.zeros(len(heads), np.int64)
        for bit, (w, r) in enumerate(branches):
            phase = place % w % r
            holding |= ((near // w == place // w) & (near % w % r == phase)).astype(np.int64) << bit
            active |= (heads % r == phase).astype(np.int64) << bit
        hit = (sets & active[:, None]) != 0
        held = np.bincount(holding, np.exp(-np.sqrt(away) / decay), len(sets))
        shares.append(float((hit @ held).mean() / whole))
        counts.append(float((hit @ np.bincount(holding, minlength=len(sets))).mean()))
    return float(np.mean(counts)), float(np.mean(shares))


def _masses(queries: NDArray[Any], table: NDArray[np.int32], decay: float) -> Iterator[float]:
    """The attention of each query, a cell of `table`, to all tokens."""
    sizes = np.array(table.shape)
    reach = np.minimum(math.ceil(_FAR * decay), sizes - 1)
    away = np.zeros((1,) * len(reach), np.float32)
    for axis, far in enumerate(reach):
        along = np.square(np.arange(-far, far + 1, dtype=np.float32))
        away = away + along.reshape([-1 if i == axis else 1 for i in range(len(reach))])
    mass = np.exp(np.sqrt(away) / np.float32(-decay))
    gaps = bool((table < 0).any())
    for at in queries.astype(np.int64):
        low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, sizes)
        seen = mass[tuple(slice(a, b) for a, b in zip(low - at + reach, high - at + reach, strict=True))]
        if gaps:
            there = table[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] >= 0
            seen = seen[there]
        yield float(seen.sum(dtype=np.float64))


def _table(cells: NDArray[Any], places: Ints) -> NDArray[np.int32]:
    """The place of the token in each cell of the box around all; -1 where there is none."""
    at = cells - cells.min(0)
    box = tuple(int(size) + 1 for size in at.max(0))
    if math.prod(box) > _BOX:
        raise ValueError(
            f"the box around the tokens has {math.prod(box):,} cells; divide coordinates by the cell size"
        )
    table = np.full(box, -1, np.int32)
    table[tuple(at.T)] = places
    if int((table >= 0).sum()) != len(places):
        raise ValueError("several tokens have the same coordinates; a report needs one in a cell")
    return table


def _windowed(
    table: NDArray[np.int32], tokens: int, window: int, block: int, devices: Sequence[int]
) -> tuple[float, tuple[Halo, ...]]:
    """(share of active blocks, halos) of attention within `window` along each axis."""
    blocks = -(-tokens // block)
    looked_at = np.arange(blocks)
    if blocks**2 > _BLOCKS:
        looked_at = np.sort(np.random.default_rng(0).permutation(blocks)[: max(_BLOCKS // blocks, 1)])
    row_of = np.full(blocks, len(looked_at))  # the last row is for blocks that are not looked at
    row_of[looked_at] = np.arange(len(looked_at))
    active = np.zeros((len(looked_at) + 1, blocks), bool)
    own = [-(-tokens // number) for number in devices]  # tokens of a device
    needed = [np.zeros((number, tokens), bool) for number in devices]
    for one, two in _neighbours(table, window):
        here, there = one // block, two // block
        active[row_of[here], there] = True
        active[row_of[there], here] = True
        for size, mine in zip(own, needed, strict=True):
            here, there = one // size, two // size
            remote = here != there
            mine[here[remote], two[remote]] = True
            mine[there[remote], one[remote]] = True
    halos = []
    for number, size, mine in zip(devices, own, needed, strict=True):
        held = np.clip(tokens - size * np.arange(number), 0, size)
        halos.append(Halo(number, float((mine.sum(1)[held > 0] / held[held > 0]).max())))
    return float(active[:-1].mean()), tuple(halos)


def _neighbours(table: NDArray[np.int32], window: int) -> Iterator[tuple[Ints, Ints]]:
    """The places of all pairs of tokens within the window, each pair once, by their distance."""
    reach = np.minimum(window, np.array(table.shape) - 1)  # no pair lies further apart
    steps = np.indices(2 * reach + 1).reshape(table.ndim, -1).T - reach
    for step in steps[len(steps) // 2 :]:  # the others are the same pairs, turned round
        sizes = [max(0, size - abs(int(s))) for size, s in zip(table.shape, step, strict=True)]
        starts = [max(0, -int(s)) for s in step]
        one = table[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        two = table[
            tuple(slice(a + int(s), a + int(s) + n) for a, s, n in zip(starts, step, sizes, strict=True))
        ]
        both = (one >= 0) & (two >= 0)
        yield one[both], two[both]
