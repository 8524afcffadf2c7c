"""How FFTs that stay on the chip are cut: what `fft.cu` is compiled with, and which cut a call gets."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

__all__ = ["FFTPlan", "Passes", "Tiling", "choose", "plans", "tilings"]

_LONGEST_ROW = 32  # segments
_WINDOW_STEP = 32  # windows begin at 64-byte boundaries


class Passes(NamedTuple):
    """How an FFT of some length is spread over the threads of a block."""

    radices: tuple[int, int, int]
    """Of the three passes. Each thread holds as many values as the first."""
    rounds: int
    """In which values change threads: 1 with shared memory for all of them, 2 for half, 0 for real parts and
    then for imaginary ones."""
    blocks: tuple[int, int]
    """That a multiprocessor should hold at a time, forward and backward: they bound the registers."""
    stores_spectrum: bool
    """Whether backward keeps the filter's spectrum, and the sum of its gradient's, on the chip."""


_PASSES = {
    256: Passes((8, 8, 4), 1, (24, 16), True),
    512: Passes((8, 8, 8), 1, (16, 12), True),
    1024: Passes((16, 8, 8), 1, (12, 8), True),
    2048: Passes((16, 16, 8), 1, (6, 4), True),
    4096: Passes((16, 16, 16), 1, (3, 2), True),
    8192: Passes((32, 16, 16), 2, (2, 2), False),
    16384: Passes((32, 32, 16), 0, (1, 1), False),
}


class Tiling(NamedTuple):
    """What may be chosen of a transform. A tiling that doesn't suit a call's lengths stands for the
    default."""

    window: int
    """Values of the overlapping windows that rows are cut into; 0 for whole rows."""
    segment: int
    """Values of an FFT on the chip, at most."""
    blocks: int
    """That a multiprocessor should hold at a time; 0 for the default."""


class FFTPlan(NamedTuple):
    """A transform of `segment` * `segments` values: each segment's fits on the chip."""

    segment: int
    segments: int = 1
    half: bool = True
    """Whether rows fill at most the first half."""
    circular: bool = False
    """Whether rows and filters fill all of it, and the end wraps around."""
    single: bool = False
    """Whether there is one sequence, of whose parts some mirror others."""
    windows: bool = False
    """Whether rows are windows of a sequence, which overlap by what a filter reaches."""
    backward: bool = False
    blocks_wanted: int = 0
    """On a multiprocessor at a time; 0 for the default."""

    @property
    def total(self) -> int:
        """Values of the transform."""
        return self.segment * self.segments

    @property
    def parts(self) -> int:
        """The parts of a row's spectrum that blocks compute."""
        return self.segments // 2 + 1 if self.single else self.segments

    @property
    def passes(self) -> Passes:
        return _PASSES[self.segment]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.segment // self.passes.radices[0]

    @property
    def blocks(self) -> int:
        """That a multiprocessor should hold at a time."""
        return self.blocks_wanted or self.passes.blocks[self.backward]

    def valid(self, T: int, L: int) -> int:
        """The values of a row that are its own, for sequences of T times and filters of L taps."""
        return (self.total - L + 1) // _WINDOW_STEP * _WINDOW_STEP if self.windows else T

    @property
    def macros(self) -> dict[str, int]:
        """What `fft.cu` is compiled with, but for the dtype."""
        (r1, r2, r3), rounds, _, stores = self.passes
        return {
            "N": self.segment, "E": r1, "R1": r1, "R2": r2, "R3": r3, "SEGMENTS": self.segments,
            "HALF": self.half, "CIRCULAR": self.circular, "SINGLE": self.single, "WINDOWS": self.windows,
            "ROUNDS": rounds, "BACKWARD": self.backward, "BLOCKS": self.blocks, "STORES": stores,
        }  # fmt: skip

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: for values that change threads, one or two spectra, and two
        maxima a warp."""
        rounds = self.passes.rounds
        workspace = self.segment // 32 * 33 if rounds == 0 else 2 * (self.segment // rounds // 16 * 17)
        spectra = 2 if self.backward and self.passes.stores_spectrum else 1
        return 4 * (workspace + 2 * (self.threads // 32) + 2 * self.segment * spectra)

    @property
    def transforms(self) -> int:
        """FFTs that each pair of rows takes."""
        if not self.backward:
            return 2
        return 3 if self.passes.stores_spectrum or self.circular else 5

    @property
    def cost(self) -> float:
        """Of a row, in butterflies of one value. The numbers fit the times in results/h100/fft-windows.csv
        and fft-segments.csv to 16 %.

        A transform of n values costs 8 + log2 n a value, and a fixed time. Half as many threads on a
        multiprocessor make it wait 1.5 times as long, and a single block, whose barriers stop all of them,
        1.9 times. Reading a value costs 16 to 32. Rows in segments are read whole for every part, and parts
        go through memory.
        """
        n, segments = self.segment, self.segments
        transform = 8 + math.log2(n) + 850 / n
        waits = math.pow(512 / (self.blocks * self.threads), 0.6) * (1.9 if self.blocks == 1 else 1)
        times_read = 2 if self.backward else 1
        if segments == 1:
            memory = times_read * (16.0 if self.half else 32.0)
        else:
            memory = times_read * (43 * segments / (1 + self.half) + 53)
        return self.parts * n * (self.transforms * transform * waits + memory)


def choose(
    T: int,
    L: int,
    shared: int,
    *,
    circular: bool = False,
    single: bool = False,
    backward: bool = False,
    tiling: Tiling | None = None,
) -> FFTPlan | None:
    """The plan for sequences of T times and filters of L taps, or of T times on a circle, on a device whose
    blocks have `shared` bytes of shared memory: that of the tiling, or the one of the least cost. `single`
    for one sequence alone.

    None where rows are too long for the device, or where T is no power of 2 or too short for a circle.
    """
    L = min(L, T)
    every = _ranked(T, L, shared, circular, single, backward)
    if tiling is not None:
        for plan in every:
            if (plan.total if plan.windows else 0, plan.segment) == tiling[:2]:
                return plan._replace(blocks_wanted=tiling.blocks)
    return every[0] if every else None


@lru_cache(maxsize=4096)
def _ranked(T: int, L: int, shared: int, circular: bool, single: bool, backward: bool) -> tuple[FFTPlan, ...]:
    """All plans, of the least cost first; but rows in segments much shorter than they could be, for which the
    costs were never compared with times, last."""
    every = [*plans(T, L, shared, circular=circular, single=single, backward=backward)]
    longest = max((plan.segment for plan in every), default=0)

    def rank(plan: FFTPlan) -> tuple[bool, float]:
        return plan.segments > 1 and 2 * plan.segment < longest, _rows(plan, T, L, single) * plan.cost

    return tuple(sorted(every, key=rank))


def plans(T: int, L: int, shared: int, *, circular: bool, single: bool, backward: bool) -> Iterator[FFTPlan]:
    """Every way to cut rows of T times for filters of L taps."""
    shortest = min(_PASSES)
    needed = T if circular else max(shortest, 1 << (T + L - 2).bit_length())
    if needed < shortest or needed & (needed - 1):
        return
    whole = FFTPlan(0, half=needed >= 2 * T, circular=circular, single=single, backward=backward)
    yield from _segmented(needed, whole, shared)
    total = needed if circular else max(shortest, 1 << (2 * L - 1).bit_length())
    window = FFTPlan(0, half=False, windows=True, backward=backward)
    while total < needed:
        yield from _segmented(total, window, shared)
        total *= 2


def _segmented(total: int, plan: FFTPlan, shared: int) -> Iterator[FFTPlan]:
    """The plans of so many values, in segments of every length that fits, forward and backward alike."""
    for n in _PASSES:
        segments = total // n
        fits = max(FFTPlan(n, backward=backward).shared for backward in (False, True)) <= shared
        if fits and 1 <= segments <= _LONGEST_ROW:
            yield plan._replace(segment=n, segments=segments, single=plan.single and segments > 2)


def _rows(plan: FFTPlan, T: int, L: int, single: bool) -> int:
    """Rows of each sequence; one alone has a pair's other row for nothing."""
    rows = -(-T // plan.valid(T, L))
    return rows * (1 + (single and rows == 1))


def tilings(
    T: int, L: int, shared: int, *, circular: bool = False, single: bool = False, backward: bool = False
) -> list[Tiling]:
    """The default, then others by their cost, then the default with fewer blocks, which have more registers
    each. Those of thrice the default's cost are left out."""
    L = min(L, T)
    every = _ranked(T, L, shared, circular, single, backward)
    if not every:
        return []
    most = 3 * _rows(every[0], T, L, single) * every[0].cost
    found = [
        Tiling(plan.total if plan.windows else 0, plan.segment, 0)
        for plan in every
        if _rows(plan, T, L, single) * plan.cost <= most
    ]
    fewer = [every[0].blocks * quarters // 4 for quarters in (3, 2)]
    return [*found, *(found[0]._replace(blocks=blocks) for blocks in dict.fromkeys(fewer) if blocks)]
