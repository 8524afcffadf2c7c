"""How an FFT that stays on the chip is cut: what `kernels/fft.cu` is compiled with."""

from typing import NamedTuple

__all__ = ["Plan", "Tuning", "plan"]


class Tuning(NamedTuple):
    """How an FFT of some length is spread over a multiprocessor."""

    radices: tuple[int, int, int]
    """Of the three passes. Each thread holds as many values as the first."""
    rounds: int
    """In which values change threads: 1 with room for all of them, 2 with room for half, 0 for real parts and
    then for imaginary ones."""
    blocks: tuple[int, int]
    """Wanted on a multiprocessor at a time by `convolve` and `differentiate`: they bound the registers."""
    keeps: bool
    """Whether `differentiate` has room for the filter's spectrum, and for the sum of its gradient's."""


_TUNINGS = {
    256: Tuning((8, 8, 4), 1, (24, 16), True),
    512: Tuning((8, 8, 8), 1, (16, 12), True),
    1024: Tuning((16, 8, 8), 1, (12, 8), True),
    2048: Tuning((16, 16, 8), 1, (6, 4), True),
    4096: Tuning((16, 16, 16), 1, (3, 2), True),
    8192: Tuning((32, 16, 16), 2, (2, 2), False),
    16384: Tuning((32, 32, 16), 0, (1, 1), False),
}
# What an FFT of so many values cost an H100, in picoseconds a value, where a row fills half of it and where
# it is a window (results/h100/fft-windows.csv, ops.json for whole rows of other lengths; 262,144: a guess).
_FORWARD = {
    256: (2.4, 2.8), 512: (2.3, 2.8), 1024: (2.1, 2.7), 2048: (2.3, 2.9), 4096: (2.6, 3.1), 8192: (2.8, 3.3),
    16384: (4.2, 4.7), 32768: (6.3, 9.5), 65536: (7.9, 11.5), 131072: (10.1, 15.0), 262144: (16.0, 24.0),
}  # fmt: skip
_BACKWARD = {
    256: (4.4, 5.3), 512: (3.7, 4.5), 1024: (3.6, 5.3), 2048: (3.9, 5.6), 4096: (4.4, 6.1), 8192: (6.3, 7.6),
    16384: (8.0, 10.8), 32768: (14.7, 24.0), 65536: (20.4, 34.0), 131072: (24.2, 40.0), 262144: (38.0, 60.0),
}  # fmt: skip
_LONGEST_OUTER = 32
_STEP = 32


class Plan(NamedTuple):
    """An FFT of n * outer values, of which rows fill at most the first half if `half`; if `circular`, rows
    and filters fill all of them; if `alone` there is one sequence, of whose parts some mirror others; if
    `windows`, rows are windows of a sequence, which overlap by what a filter reaches.
    """

    n: int
    outer: int
    half: bool = True
    circular: bool = False
    alone: bool = False
    windows: bool = False

    @property
    def total(self) -> int:
        return self.n * self.outer

    @property
    def made(self) -> int:
        """Parts that blocks make."""
        return self.outer // 2 + 1 if self.alone else self.outer

    @property
    def tuning(self) -> Tuning:
        return _TUNINGS[self.n]

    @property
    def threads(self) -> int:
        return self.n // self.tuning.radices[0]

    def valid(self, T: int, L: int) -> int:
        """Values of a row that are its own, for sequences of T times and filters of L taps; windows begin at
        64-byte boundaries."""
        return (self.total - L + 1) // _STEP * _STEP if self.windows else T

    @property
    def options(self) -> list[str]:
        """Of the compiler."""
        (r1, r2, r3), rounds, (blocks, backward_blocks), keeps = self.tuning
        given = {
            "N": self.n, "E": r1, "R1": r1, "R2": r2, "R3": r3, "OUTER": self.outer, "HALF": self.half,
            "CIRCULAR": self.circular, "ALONE": self.alone, "WINDOWS": self.windows, "ROUNDS": rounds,
            "BLOCKS": blocks, "BACKWARD_BLOCKS": backward_blocks, "KEEPS": keeps,
        }  # fmt: skip
        return [f"-D{name}={int(value)}" for name, value in given.items()]

    @property
    def shared(self) -> tuple[int, int]:
        """Bytes of a block of `convolve` and of `differentiate`: room for values that change threads, one or
        two spectra, and two maxima a warp."""
        rounds = self.tuning.rounds
        room = self.n // 32 * 33 if rounds == 0 else 2 * (self.n // rounds // 16 * 17)
        rest = room + 2 * (self.threads // 32)
        spectra = 1 + self.tuning.keeps
        return 4 * (rest + 2 * self.n), 4 * (rest + 2 * self.n * spectra)


def plan(
    T: int, L: int, shared_limit: int, circular: bool = False, alone: bool = False, backward: bool = False
) -> Plan | None:
    """For rows of T times and L taps, or of T taps on a circle if `circular`; of one sequence if `alone`; of
    `differentiate` if `backward`.

    None where they are too long for this machine, or where T is no power of 2 or too short for a circle.

    Where filters are short, rows are cut into windows if these cost less.
    """
    least, L = min(_TUNINGS), min(L, T)
    needed = T if circular else max(least, 1 << (T + L - 2).bit_length())
    if needed < least or needed & (needed - 1):
        return None
    whole = _segments(needed, needed >= 2 * T, shared_limit, alone, backward)
    if circular:
        return whole and whole._replace(circular=True)
    total = max(least, 1 << (2 * L - 1).bit_length())
    found = [whole]
    while total < needed:
        window = _segments(total, False, shared_limit, False, backward)
        found.append(window and window._replace(windows=True))
        total *= 2

    def cost(how: Plan) -> float:
        costs = (_BACKWARD if backward else _FORWARD)[min(how.total, max(_FORWARD))]
        rows = -(-T // how.valid(T, L))
        empty = alone and rows == 1  # a pair's other row
        return rows * how.made * how.n * (1 + empty) * costs[not how.half]

    return min((how for how in found if how), key=cost, default=None)


def _segments(total: int, half: bool, shared_limit: int, alone: bool, backward: bool) -> Plan | None:
    """For rows of `total` values.

    Longer ones are cut into the longest segments that fit, as each of a row's parts reads the whole row; into
    segments of half that length, two of which a multiprocessor has room for, where a row reaches few of them:
    how few was measured on an H100 (results/h100/fft-segments.csv).
    """
    fitting = [n for n in _TUNINGS if max(Plan(n, 1).shared) <= shared_limit]
    if not fitting:
        return None
    n = min(total, max(fitting))
    if total > n and _TUNINGS[n].blocks == (1, 1):
        segments = total // (n // 2) // (1 + half)
        if segments <= (4 if alone else 2 if backward else 0):
            n //= 2
    outer = total // n
    return Plan(n, outer, half, alone=alone and outer > 2) if outer <= _LONGEST_OUTER else None
