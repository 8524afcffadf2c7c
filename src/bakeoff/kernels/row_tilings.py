"""How kernels that normalise rows are cut into programs: the defaults, what else may be faster, the launches.

Both directions are bound by memory, so a tiling is good if many bytes are under way and few threads idle.
Loads are of 16 bytes a thread: a warp of 32 threads reads 256 elements of 16 bits at once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from bakeoff.hardware import multiprocessors
from bakeoff.kernels.layout import alignment

__all__ = [
    "BackwardTiling",
    "ForwardTiling",
    "backward_launch",
    "backward_tiling",
    "backward_tilings",
    "forward_launch",
    "forward_tiling",
    "forward_tilings",
]

_LANES = 64 if torch.version.hip else 32  # threads of a warp
_ONE_PASS = 16384  # elements of a row: beyond, the default reads it twice
_MOST_HELD = 64  # elements of a tile for each thread that holds it
_SHARED = 96 << 10  # bytes of shared memory that all current GPUs give a program
_STREAM = 2**25  # bytes: a tensor of this size is gone from L2 before its next reader comes


class ForwardTiling(NamedTuple):
    """How the forward cuts [N, D] into tiles."""

    block: int
    """Columns of a piece: a power of two."""
    rows: int
    """Of a tile."""
    warps: int
    programs: int = 0
    """Of a multiprocessor, each of which walks over several tiles; 0: a program for each tile."""
    stages: int = 1
    """Tiles that such a program has under way at a time."""
    passes: int = 1
    """1: rows are kept in registers. 2: they are read twice, as are all that are too long for one pass."""


class BackwardTiling(NamedTuple):
    """How the backward cuts [N, D] into tiles. Its programs add gradients of [D] up over their tiles."""

    block: int
    """Columns of a piece: a power of two."""
    rows: int
    """Of a tile."""
    warps: int
    programs: int
    """Of a multiprocessor; 0: a program for each tile, where no gradient of [D] is asked for."""
    stages: int = 1
    """Tiles that a program has under way at a time."""
    hold: int = 1
    """1: the weight stays in registers from tile to tile. 0: it is read again, from the first cache."""
    stream: int = 0
    """1: what is read and written is marked as not worth keeping in L2."""
    passes: int = 1
    """1: rows are kept in registers. 2: a kernel of its own reads them first, for the sums over each row."""


def forward_tiling(N: int, D: int, read: int, itemsize: int, sms: int, lanes: int = _LANES) -> ForwardTiling:
    """The default for N rows of D elements of x, of `itemsize` bytes, on a device of `sms` multiprocessors.
    For each element `read` bytes come from memory.

    One tile a program. Long rows want 16-byte loads from 8 warps, short ones as few warps as hold them, and a
    device that isn't filled shorter tiles.
    """
    whole = triton.next_power_of_2(D)
    many = 16 * sms <= N
    if whole > _ONE_PASS:
        return ForwardTiling(8192, 1, 16, passes=2)
    if whole <= 512:
        return ForwardTiling(whole, (1024 if many else 512) // whole, 1)
    if whole == 1024:
        return ForwardTiling(whole, 4 if many else 1, 8 if many and read == 2 else 4)
    warps = 8 if whole <= 4096 else 16
    if whole == D or 4 * sms > N:
        return ForwardTiling(whole, 1, warps)
    # Other rows: the pieces that leave the fewest threads idle, of up to 40 elements a thread.
    cuts = [(w, w * lanes * 16 // itemsize) for w in (1, 2, 4, 8, 16) if w <= warps]
    padded = {cut: _padded(D, cut[1]) for cut in cuts if _padded(D, cut[1]) <= 40 * cut[0] * lanes}
    warps, block = min(padded, key=lambda cut: (padded[cut], cut[0]))
    return ForwardTiling(block, 1, warps)


def forward_tilings(case: Any) -> list[ForwardTiling]:
    """What the forward may be launched with for a case: the default, then other numbers of warps and pieces,
    then programs that walk over tiles, loading ahead."""
    x, residual = case.x, case.residual
    D, itemsize, sms = x.shape[-1], x.dtype.itemsize, multiprocessors(case.device)
    read = itemsize + (0 if residual is None else residual.dtype.itemsize)
    default = forward_tiling(x.numel // D, D, read, itemsize, sms)
    cuts = _cuts(D, itemsize, (4, 8, 16, 2, 1), _MOST_HELD)
    found = [default, *[ForwardTiling(*cut) for cut in cuts]]
    for block, rows, warps in sorted(cuts, key=lambda cut: _padded(D, cut[0]))[:2]:
        held = rows * _padded(D, block) // (32 * warps)
        programs = max(1, min((1 << 16) // (32 * warps * (2 * held + 16)), 64 // warps))
        # As many as fit at once by their registers, for x and the weight, and as many again, queueing.
        for count, stages in ((programs, 2), (programs, 3), (2 * programs, 2)):
            found.append(ForwardTiling(block, rows, warps, count, stages))
    if D > 4096:
        found += [ForwardTiling(2048, 1, 8, passes=2), ForwardTiling(8192, 1, 16, passes=2)]
    return list(dict.fromkeys(found))


def backward_tiling(N: int, D: int, itemsize: int, sums: int, sms: int) -> BackwardTiling:
    """The default for N rows of D elements of s, of `itemsize` bytes, on a device of `sms` multiprocessors;
    `sums`: how many gradients are sums over rows, that of the weight and of a bias.

    Few programs keep the partial sums small; asynchronous copies (stages) keep enough loads in flight for
    them. Without these gradients a tile a program is faster.
    """
    block = triton.next_power_of_2(D)
    if block > _ONE_PASS or (block == _ONE_PASS and sums > 1):  # two sums and a row are too much to hold
        return BackwardTiling(2048, 1, 4, 8, passes=2)
    hold = int(block < 16384)
    if not sums:
        tile = max(block, 4096 if 16 * sms <= N else 1024)
        return BackwardTiling(block, tile // block, tile // 1024, 0, hold=hold)
    if block <= 1024:
        tile, warps, resident = (2048, 2, 4) if block <= 512 else (2048, 4, 3)
    elif itemsize == 2:
        tile, warps, resident = 8192, 8 if block == 2048 else 16, 1
    else:
        tile, warps, resident = 4096, 8 if block <= 4096 else 16, 1
    if sums > 1:  # as many registers a thread as with one
        tile, warps = min(tile, 4096) if block == 2048 else tile, min(16, 2 * warps)
    rows = max(1, tile // block)
    while rows > 1 and rows * sms > N:
        rows //= 2
    stages = 3 if block * rows * itemsize <= 2**14 else 2 if itemsize == 2 else 1
    # float32 in pieces of two 16-byte loads a thread: one wide piece takes more registers than there are.
    piece = block if itemsize == 2 else min(block, 256 * warps)
    return BackwardTiling(piece, rows, warps, resident, stages, hold, int(N * D * itemsize >= _STREAM))


def backward_tilings(case: Any) -> list[BackwardTiling]:
    """What the backward may be launched with for a case: the default, then other numbers of warps and pieces,
    with more programs or other hints."""
    x, residual = case.x, case.residual
    D, sms = x.shape[-1], multiprocessors(case.device)
    N = x.numel // D
    s = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    sums = sum(case.tensors[name].requires_grad for name in ("weight", "bias") if name in case.tensors)
    default = backward_tiling(N, D, s.itemsize, sums, sms)
    found = [default]
    if default.passes == 1:
        found += [default._replace(stream=1 - default.stream)]
        if sums:
            found += [default._replace(programs=2 * default.programs)]
    stream = default.stream
    for block, rows, warps in _cuts(D, x.dtype.itemsize, (8, 4, 16, 2), 40 if sums < 2 else 24):
        if not sums:
            found += [BackwardTiling(block, rows, warps, 0, stream=stream)]
            continue
        held = rows * _padded(D, block) // (32 * warps)
        if sums > 1 and warps == 16 and held > 20:  # more than the 128 registers that a thread then has
            continue
        hold = int(held <= 24)
        # Registers of a thread: the sums over rows, dy, s, what is computed of them, and the weight.
        programs = max(1, min((1 << 16) // (32 * warps * min(255, (3 + sums + hold) * held + 32)), 8))
        found += [BackwardTiling(block, rows, warps, programs, stages, hold, stream) for stages in (3, 2)]
    if D > 8192:
        found += [BackwardTiling(2048, 1, 4, 8, passes=2), BackwardTiling(4096, 1, 8, 4, passes=2)]
    return list(dict.fromkeys(found))


def _cuts(D: int, itemsize: int, warps: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """Columns of a piece, rows of a tile and warps such that a piece of a tile is a 16-byte load of each
    thread, and a thread holds at most `most` elements."""
    whole, cuts = triton.next_power_of_2(D), []
    # A short row is cut where a smaller power of two fits it better.
    fitting = min((whole, whole // 4), key=lambda block: _padded(D, block)) if 16 < D <= 1024 else whole
    for w in warps:
        elements = w * 32 * 16 // itemsize
        block = min(fitting, elements)
        for rows in (elements // block, 2 * elements // block):
            held = rows * _padded(D, block)
            # Of a long row one is enough; tiles of several short ones hold at least 8 elements a thread.
            if held <= most * 32 * w and (rows == elements // block or (D <= 1024 and held <= 32 * 32 * w)):
                cuts.append((block, rows, w))
    return cuts


def _padded(D: int, block: int) -> int:
    """D rounded up to whole pieces."""
    return -(-D // block) * block


def _fits(tiling: ForwardTiling | BackwardTiling, D: int) -> bool:
    """Whether a tile of rows of D elements stays in registers."""
    held = tiling.rows * _padded(D, tiling.block)
    return tiling.passes == 1 and held <= min(_MOST_HELD * 32 * tiling.warps, 1 << 15)


def _stages(tiling: ForwardTiling | BackwardTiling, D: int, read: int) -> int:
    """The tiling's stages, or fewer if shared memory, of which each but one takes a tile, is short."""
    tile = tiling.rows * _padded(D, tiling.block) * read
    return max(1, min(tiling.stages, 1 + _SHARED // tile))


def forward_launch(
    N: int, D: int, itemsizes: Mapping[str, int], strides: Mapping[str, int], sms: int,
    tiling: ForwardTiling | None = None,
) -> tuple[int, tuple[int], dict[str, Any]]:  # fmt: skip
    """In how many passes the rows are read, the grid, and the kernel's numbers and constants by name.

    `itemsizes` are those of the tensors that are read (x, residual), `strides` the distances between rows of
    both in elements.
    """
    read = sum(itemsizes.values())
    tiling = tiling or forward_tiling(N, D, read, itemsizes["x"], sms)
    numbers = _numbers(D, strides, tiling)
    if not _fits(tiling, D):
        return 2, (N,), numbers
    tiles = -(-N // tiling.rows)
    numbers |= {"N": N, "ROWS": tiling.rows, "EVEN": N % tiling.rows == 0}
    numbers["STAGES"] = _stages(tiling, D, read) if tiling.programs else 0
    return 1, (min(tiles, tiling.programs * sms or tiles),), numbers


def backward_launch(
    N: int, D: int, itemsizes: Mapping[str, int], strides: Mapping[str, int], sums: int, sms: int,
    tiling: BackwardTiling | None = None,
) -> tuple[int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """In how many passes the rows are read, the grid, and the kernel's numbers and constants by name.

    `itemsizes` are those of the tensors that are read (dy, s, ds), `strides` the distances between rows of
    all three in elements. The first number of the grid is that of partial sums, if there are `sums`.
    """
    tiling = tiling or backward_tiling(N, D, itemsizes["s"], sums, sms)
    numbers = _numbers(D, strides, tiling)
    programs = tiling.programs * sms
    if not _fits(tiling, D):
        return 2, (min(N, programs or 8 * sms), -(-D // tiling.block)), numbers
    tiles = -(-N // tiling.rows)
    if sums and not programs:  # each program leaves its part of every sum: there must be few
        programs = 2 * sms
    numbers |= {
        "ROWS": tiling.rows,
        "STAGES": _stages(tiling, D, sum(itemsizes.values())),
        "HOLD": bool(tiling.hold),
        "LOAD": "evict_first" if tiling.stream else "",
        "STORE": ".cs" if tiling.stream else "",
    }
    return 1, (min(tiles, programs or tiles),), numbers


def _numbers(D: int, strides: Mapping[str, int], tiling: ForwardTiling | BackwardTiling) -> dict[str, Any]:
    """What all kernels take."""
    align = alignment(*strides.values())
    numbers: dict[str, Any] = {f"{name}_units": stride // align for name, stride in strides.items()}
    return numbers | {"D": D, "BLOCK": tiling.block, "ALIGN": align, "num_warps": tiling.warps}
