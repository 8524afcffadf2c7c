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
_LONGEST_OUTER = 32


class Plan(NamedTuple):
    """An FFT of n * outer values, of which rows fill at most the first half if `half`; if `circular`, rows
    and filters fill all of them; if `alone` there is one sequence, of whose parts some mirror others.
    """

    n: int
    outer: int
    half: bool = True
    circular: bool = False
    alone: bool = False

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

    @property
    def options(self) -> list[str]:
        """Of the compiler."""
        (r1, r2, r3), rounds, (blocks, backward_blocks), keeps = self.tuning
        given = {
            "N": self.n, "E": r1, "R1": r1, "R2": r2, "R3": r3, "OUTER": self.outer, "HALF": self.half,
            "CIRCULAR": self.circular, "ALONE": self.alone, "ROUNDS": rounds, "BLOCKS": blocks,
            "BACKWARD_BLOCKS": backward_blocks, "KEEPS": keeps,
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

    Longer rows are cut into the longest segments that fit, as each of a row's parts reads the whole row; into
    segments of half that length, two of which a multiprocessor has room for, where a row reaches few of them:
    how few was measured on an H100 (results/h100/fft-segments.csv).
    """
    least = min(_TUNINGS)
    needed = T if circular else max(least, 1 << (T + min(L, T) - 2).bit_length())
    fitting = [n for n in _TUNINGS if max(Plan(n, 1).shared) <= shared_limit]
    if not fitting or needed < least or needed & (needed - 1):
        return None
    n = min(needed, max(fitting))
    half = needed >= 2 * T
    if needed > n and _TUNINGS[n].blocks == (1, 1):
        segments = needed // (n // 2) // (1 + half)
        if segments <= (4 if alone else 2 if backward else 0):
            n //= 2
    outer = needed // n
    return Plan(n, outer, half, circular, alone and outer > 2) if outer <= _LONGEST_OUTER else None
