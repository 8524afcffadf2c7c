"""How an FFT that stays on the chip is cut: what `kernels/fft.cu` is compiled with."""

from typing import NamedTuple

__all__ = ["Plan", "plan", "shared_bytes"]

_RADICES = {
    512: (8, 8, 8),
    1024: (16, 8, 8),
    2048: (16, 16, 8),
    4096: (16, 16, 16),
    8192: (32, 16, 16),
    16384: (32, 32, 16),
}
_BLOCKS = {512: (12, 8), 1024: (7, 4), 2048: (4, 3), 4096: (2, 1), 8192: (1, 1), 16384: (1, 1)}
"""Blocks wanted on a multiprocessor at a time, forward and backward: they bound the registers."""
_LONGEST_OUTER = 32


class Plan(NamedTuple):
    """An FFT of n * outer values, `outer` interleaved ones of n on the chip."""

    n: int
    outer: int

    @property
    def total(self) -> int:
        return self.n * self.outer

    @property
    def threads(self) -> int:
        return self.n // _RADICES[self.n][0]

    @property
    def blocks(self) -> int:
        """Wanted on a multiprocessor at a time."""
        return _BLOCKS[self.n][0]

    @property
    def options(self) -> list[str]:
        """Of the compiler."""
        r1, r2, r3 = _RADICES[self.n]
        names = ("N", "E", "R1", "R2", "R3", "OUTER", "BLOCKS", "CORRELATE_BLOCKS")
        values = (self.n, r1, r1, r2, r3, self.outer, *_BLOCKS[self.n])
        return [f"-D{name}={value}" for name, value in zip(names, values, strict=True)]


def shared_bytes(n: int, *, keeps: bool) -> int:
    """Of a block: room for values that change threads, for a maximum, for a spectrum if it `keeps` one."""
    return 4 * (n + n // 32 + 1 + (2 * n if keeps else 0))


def plan(T: int, L: int, shared_limit: int) -> Plan | None:
    """For rows of T times and L taps; None where they are too long for this machine."""
    needed = max(512, 1 << (T + min(L, T) - 2).bit_length())
    fitting = [n for n in _RADICES if shared_bytes(n, keeps=True) <= shared_limit]
    if not fitting:
        return None
    n = min(needed, max(fitting))
    found = Plan(n, needed // n)
    return found if found.outer <= _LONGEST_OUTER else None
