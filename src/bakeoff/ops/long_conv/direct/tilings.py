"""How the kernels of `direct` cut channels and time."""

from typing import NamedTuple

__all__ = ["Tiling", "channel_last", "channel_major"]

_ACCESS = 16  # bytes at most
_FILTER_REGISTERS = 32  # of a thread's filters and sums, by default
_AHEAD = 24  # registers of a thread that are being read, by default
_MOST_REGISTERS = 200
_IN_DOUBLE = 16  # totals of a thread at most that are float64


class Tiling(NamedTuple):
    """How a kernel cuts channels and time."""

    channels: int
    """Of a thread, which it reads by one access, where channels lie side by side and are so aligned; fewer
    where they aren't. Where positions lie side by side a thread has one."""
    reads: int
    """Accesses of each tensor that a thread has under way: of positions, or of 16 bytes of them."""
    threads: int
    """Of a block."""
    blocks: int
    """That a multiprocessor should hold at a time."""
    pieces: int
    """Where channels lie side by side the pieces that a sequence is cut into, at least; where positions do
    those that threads take one after another, at most."""


def channel_last(taps: int, gates: int, itemsize: int, backward: bool) -> list[Tiling]:
    """For channels side by side: the default, then others.

    The wider a thread's accesses, the fewer instructions a value takes, and the more registers its filters
    and sums. By default these take few, so that many threads are resident, and read ahead.
    """
    widest = _ACCESS // itemsize
    channels = widest
    while channels > 1 and taps * (2 + backward) * channels > _FILTER_REGISTERS:
        channels //= 2

    def tiling(channels: int, **others: int) -> Tiling:
        return _channel_last(taps, gates, itemsize, backward, channels, **others)

    first = tiling(channels)
    found = [first]
    found += [tiling(other) for other in (2 * channels, channels // 2) if 1 <= other <= widest]
    found += [
        tiling(channels, reads=2 * first.reads),
        tiling(channels, reads=max(2, first.reads // 2)),
        tiling(channels, threads=128),
        tiling(channels, threads=256),
        tiling(channels, pieces=4),
        tiling(channels, pieces=16),
        tiling(channels, pieces=64),
    ]
    if 2 * channels <= widest:
        found.append(tiling(2 * channels, reads=max(2, first.reads // 2)))
    fits = [x for x in found if _registers(x, taps, gates, itemsize, backward) <= _MOST_REGISTERS]
    return list(dict.fromkeys([first, *fits]))


def _channel_last(
    taps: int,
    gates: int,
    itemsize: int,
    backward: bool,
    channels: int,
    reads: int = 0,
    threads: int = 64,
    pieces: int = 1,
) -> Tiling:
    """A tiling with as many blocks as their registers allow."""
    if reads == 0 and channels == 1:
        reads = 8 if not backward or taps <= 32 else 3 if gates else 6
    elif reads == 0:
        ahead = _AHEAD // (_tensors(gates, backward) * _words(channels, itemsize))
        reads = max(2, min(8, 1 << ahead.bit_length() - 1 if ahead else 2))
    tiling = Tiling(channels, reads, threads, 1, pieces)
    resident = 65536 // _registers(tiling, taps, gates, itemsize, backward)
    return tiling._replace(blocks=max(1, max(256, min(1024, resident)) // threads))


def _registers(tiling: Tiling, taps: int, gates: int, itemsize: int, backward: bool) -> int:
    """About as many as a thread needs: for filters and sums, backward for a window and results, and for what
    is read and what was read."""
    channels, reads = tiling.channels, tiling.reads
    totals = taps * channels * (2 if taps * channels <= _IN_DOUBLE else 1)
    held = 2 * taps * channels + backward * (totals + 2 * reads * channels)
    return held + 2 * _tensors(gates, backward) * _words(channels, itemsize) * reads + 40


def _tensors(gates: int, backward: bool) -> int:
    """That are read: u and the gates; backward dout, and if there is a gate_out y."""
    return 1 + gates.bit_count() + backward * (1 + gates // 2)


def _words(channels: int, itemsize: int) -> int:
    return -(-channels * itemsize // 4)


def channel_major(taps: int, gates: int, wide: bool, backward: bool) -> list[Tiling]:
    """For positions side by side: the default, then others. `wide`: by accesses of 16 bytes."""
    reads = 2 if wide and taps <= 8 else 1
    if not backward:
        if taps <= 16:
            first = Tiling(1, reads, 128, 8 if taps <= (4 if gates else 8) else 5, 4)
        else:
            first = Tiling(1, reads, 64, 8, 16)
    elif taps <= 8:
        first = Tiling(1, reads, 128, 4 if gates else 8 if taps <= 4 else 5, 8)
    else:
        first = Tiling(1, reads, 128 if taps <= 16 else 64, 3 if gates else 4, 8 if taps <= 16 else 16)
    found = [
        first,
        first._replace(reads=3 - reads),
        first._replace(pieces=2 * first.pieces),
        first._replace(pieces=first.pieces // 2),
        first._replace(blocks=max(1, first.blocks * 3 // 4)),
        first._replace(threads=2 * first.threads, blocks=max(1, first.blocks // 2)),
        first._replace(reads=3 - reads, pieces=2 * first.pieces),
        first._replace(pieces=1),
    ]
    if reads == 2:
        found.append(first._replace(reads=4, blocks=max(1, first.blocks // 2)))
    return list(dict.fromkeys(found))
