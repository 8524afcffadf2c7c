"""Attention of a few queries a row to a long cache, in Triton: keys split over programs, joined in order.

A program takes one row's queries of all heads that share a key head, as the rows of one tile, and `KEYS`
positions; another kernel joins what the programs of a row have found. Bytes decide: keys and values that a
row holds are read once, programs behind its length end at once, and 4 D FLOPs a pair are next to nothing.

Strides come in units of ALIGN elements: the product tells the compiler what 16-byte accesses need.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bakeoff.hardware import multiprocessors

__all__ = ["Tiling", "grid", "tilings", "width_of"]

LOG2E = tl.constexpr(1.4426950408889634)
_TILE = 1 << 14  # bytes of keys, and as many of values, that a program has in flight
_ROWS = 64  # queries of all heads in a tile, at most
_JOINED = 16  # parts that are joined at a time


class Tiling(NamedTuple):
    """How the keys of a row are cut."""

    keys: int
    """In a tile."""
    tiles: int
    """Of a program."""
    warps: int
    stages: int


def width_of(D: int) -> int:
    """The width of a tile that holds heads D wide."""
    return max(16, triton.next_power_of_2(D))


def rows_of(T: int, G: int) -> int:
    """The queries of a tile: T of each of G heads, or a part of them."""
    return min(_ROWS, max(16, triton.next_power_of_2(T * G)))


def tilings(case: Any) -> list[Tiling]:
    """What a case may be launched with: the default, then others."""
    (B, T, H, D), (S, K) = case.q.shape, case.k.shape[1:3]
    widest = max(16, min(128, _TILE // (width_of(D) * case.q.dtype.itemsize)))
    others = max(1, B * K * -(-T * (H // K) // rows_of(T, H // K)))
    wanted = 4 * multiprocessors(case.device)
    keys = widest
    while keys > 32 and others * -(-S // keys) < wanted:
        keys //= 2
    sizes = (keys, *(size for size in (keys // 2, keys * 2) if 16 <= size <= widest))
    found = [Tiling(size, _tiles(S, size, others, wanted), 4, 2) for size in sizes]
    first = found[0]
    found += [first._replace(tiles=n) for n in (first.tiles * 2, first.tiles // 2) if n]
    few = case.q.dtype.itemsize == 2 and rows_of(T, H // K) == 16  # more would not fit in 64 threads
    found += [first._replace(warps=warps) for warps in (8, 2)[: 1 + few]]
    found += [first._replace(stages=stages) for stages in (1, 3)]
    return [*dict.fromkeys(found)]


def _tiles(S: int, keys: int, others: int, wanted: int) -> int:
    """Tiles of a program, a power of two: as many as leave enough programs for the device."""
    most = max(1, others * -(-S // keys) // wanted)
    return min(64, 1 << (most.bit_length() - 1))


def grid(B: int, T: int, H: int, K: int, S: int, tiling: Tiling) -> tuple[int, int]:
    """Programs for rows and key heads, and for parts of the keys."""
    G = H // K
    return B * K * -(-T * G // rows_of(T, G)), max(1, -(-S // (tiling.keys * tiling.tiles)))


NUMBERS = [
    "T", "S", "H", "KEYS", "PARTS", "window", "scale", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "v_b", "v_t",
    "v_h",
]  # fmt: skip


@triton.jit
def _held(lengths, b, T, S, window, CAUSAL: tl.constexpr):
    # How many positions a row holds, and the first that any of its queries sees.
    held = S
    if lengths is not None:
        held = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int64), 0), S.to(tl.int64)).to(tl.int32)
    low = 0
    if CAUSAL:
        low = tl.maximum(held - T + 1 - window, 0)
    return held, low


@triton.jit(do_not_specialize=NUMBERS)
def _parts(
    q, k, v, lengths, y, sums, levels, T: tl.int32, S: tl.int32, H: tl.int32, KEYS: tl.int32, PARTS: tl.int32,
    window: tl.int32, scale: tl.float32, q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64,
    k_t: tl.int64, k_h: tl.int64, v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, G: tl.constexpr,
    CAUSAL: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax's top, total and weighted values over KEYS positions; with one part a row, y itself."""
    blocks = tl.cdiv(T * G, ROWS)
    which = tl.program_id(0)
    heads = H // G
    b = (which // blocks // heads).to(tl.int64)
    shared = which // blocks % heads
    part = tl.program_id(1)
    held, low = _held(lengths, b, T, S, window, CAUSAL)
    first = part * KEYS
    last = tl.minimum(first + KEYS, held)
    if SPLIT and ((first >= held) | (first + KEYS <= low)):
        return
    row = which % blocks * ROWS + tl.arange(0, ROWS)
    there = row < T * G
    t, h = row // G, shared * G + row % G
    d = tl.arange(0, WIDTH)
    wide = (d < D)[None, :]
    at = b * q_b + t.to(tl.int64) * q_t + h.to(tl.int64) * q_h
    query = tl.load(q + at[:, None] * ALIGN + d[None, :], mask=there[:, None] & wide, other=0.0)
    end = tl.zeros([ROWS], tl.int32) + held
    if CAUSAL:
        end = held - T + t + 1
    begin = end - window
    k += (b * k_b + shared * k_h) * ALIGN
    v += (b * v_b + shared * v_h) * ALIGN
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(tl.maximum(first, low // BLOCK * BLOCK), last, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        inside = (s < last)[:, None] & wide
        place = s.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_t * ALIGN + d[None, :], mask=inside, other=0.0)
        values = tl.load(v + place * v_t * ALIGN + d[None, :], mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        seen = (s < last)[None, :] & (s[None, :] < end[:, None])
        if CAUSAL:
            seen = seen & (s[None, :] >= begin[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher > -float("inf"), higher, 0.0)
        weights = tl.exp2((scores - level[:, None]) * LOG2E)
        kept = tl.exp2((top - level) * LOG2E)
        total = total * kept + tl.sum(weights, 1)
        found = found * kept[:, None]
        found = tl.dot(weights.to(values.dtype), values, found, input_precision=PRECISION)
        top = higher
    into = (b * H + h) * T + t
    if SPLIT:
        place = into * PARTS + part
        tl.store(sums + place[:, None] * D + d[None, :], found, mask=there[:, None] & wide)
        tl.store(levels + place * 2, top, mask=there)
        tl.store(levels + place * 2 + 1, total, mask=there)
    else:
        found = found / tl.where(total > 0.0, total, 1.0)[:, None]
        into = (b * T + t) * H + h
        tl.store(y + into[:, None] * D + d[None, :], found.to(y.dtype.element_ty), mask=there[:, None] & wide)


@triton.jit(do_not_specialize=["T", "S", "H", "KEYS", "PARTS", "window"])
def _join(
    lengths, sums, levels, y, T: tl.int32, S: tl.int32, H: tl.int32, KEYS: tl.int32, PARTS: tl.int32,
    window: tl.int32, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """y of one query of one head from the parts of its row, some at a time, the first first."""
    into = tl.program_id(0).to(tl.int64)
    b, h, t = into // T // H, into // T % H, into % T
    held, low = _held(lengths, b, T, S, window, CAUSAL)
    d = tl.arange(0, WIDTH)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    found = tl.zeros([WIDTH], tl.float32)
    last = tl.cdiv(held, KEYS)
    for start in range(low // KEYS, last, JOINED):
        part = start + tl.arange(0, JOINED)
        there = part < last
        place = into * PARTS + part
        tops = tl.load(levels + place * 2, mask=there, other=-float("inf"))
        totals = tl.load(levels + place * 2 + 1, mask=there, other=0.0)
        each = tl.load(
            sums + place[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        level = tl.where(higher > -float("inf"), higher, 0.0)
        weights = tl.exp2((tops - level) * LOG2E)
        kept = tl.exp2((top - level) * LOG2E)
        total = total * kept + tl.sum(weights * totals, 0)
        found = found * kept + tl.sum(weights[:, None] * each, 0)
        top = higher
    found = found / tl.where(total > 0.0, total, 1.0)
    tl.store(y + ((b * T + t) * H + h) * D + d, found.to(y.dtype.element_ty), mask=d < D)
