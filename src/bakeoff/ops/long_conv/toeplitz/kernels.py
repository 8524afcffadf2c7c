"""Long convolution as products with Toeplitz matrices, on tensor cores.

Time is cut into blocks of BLOCK. With V[s, n] the value at time s of column n = (block i, sequence b) of one
channel, Y[:, (i, b)] = sum over d of H_d V[:, (i - d, b)], where H_d[r, s] = h[d BLOCK + r - s]. A filter
serves all columns of its channel, so these are products of matrices although every channel has its own.

Rows of H_d are windows of one sequence of taps, each shifted by one against the next. COPIES shifted copies
of it let each row begin at a 16-byte boundary, so that H_d is loaded in wide pieces and never formed. A
filter of a wider dtype than the data is a sum of two of the data's dtype, so that rounding it costs nothing.

Backward in time (the gradient of the input) the same products run with h reversed. The gradient of h is the
sum over columns of Y' V^T along its diagonals.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bakeoff.kernels.precision import precision

__all__ = [
    "BLOCK",
    "COPIES",
    "GATHER_SIZE",
    "SHIFT_WIDTH",
    "BackwardTiling",
    "Tiling",
    "backward_tilings",
    "correlation",
    "products",
    "tilings",
]

BLOCK = 128
COPIES = 8
SHIFT_WIDTH, GATHER_SIZE = 256, 1024


@triton.jit(do_not_specialize=["L", "W", "tiles", "h_c", "h_l"])
def _shift(
    h, copies, L, W, tiles, h_c, h_l,
    BACKWARDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """copies[c, p, m, j] sum over p to h[c, W - 2 BLOCK + m - j], backwards h[c, j - BLOCK - m]; 0 outside
    the filter."""
    c = (tl.program_id(0) // tiles).to(tl.int64)
    j = tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH)[None, :]
    m = tl.arange(0, COPIES)[:, None]
    lag = j - BLOCK - m if BACKWARDS else W - 2 * BLOCK + m - j
    tap = tl.load(h + c * h_c + lag.to(tl.int64) * h_l, mask=(lag >= 0) & (lag < L), other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        rounded = tap.to(copies.dtype.element_ty)
        target = copies + ((c * PARTS + part) * COPIES + m) * W + j
        tl.store(target, rounded, mask=j < W)
        tap -= rounded.to(tl.float32)


@triton.jit(do_not_specialize=["G", "B", "LAGS", "tiles", "W8", "v_b8", "v_c8", "y_b8", "y_c8"])
def _convolve(
    v, copies, skip, y, G, B, LAGS, tiles, W8, v_b8, v_c8, y_b8, y_c8,
    BACKWARDS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
    BLOCK: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = the products of COLUMNS columns with as many H_d as reach them, and skip v; strides and widths are
    given in units of 8."""
    c = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles) * COLUMNS
    # The longest sums first, so that short ones fill the end.
    n = ((G * B - 1) // COLUMNS * COLUMNS - n) if not BACKWARDS else n
    column = n + tl.arange(0, COLUMNS)
    i = column // B
    b = (column % B).to(tl.int64)
    r = tl.arange(0, BLOCK)
    s = tl.arange(0, DEEP)
    copies += c * PARTS * COPIES * (W8 * 8)
    row = (r % COPIES) * (W8 * 8) - (r - r % COPIES)
    if BACKWARDS:
        row += BLOCK
        blocks = tl.minimum(LAGS, G - n // B)
    else:
        row += W8 * 8 - 2 * BLOCK
        blocks = tl.minimum(LAGS, tl.minimum(n + COLUMNS - 1, G * B - 1) // B + 1)
    row = tl.multiple_of(row, 8)
    v += c * (v_c8 * 8)
    start = b * (v_b8 * 8)
    sums = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for step in range(blocks * (BLOCK // DEEP)):
        d = step // (BLOCK // DEEP)
        deep = (step % (BLOCK // DEEP)) * DEEP
        shift = deep + (d * BLOCK if BACKWARDS else -d * BLOCK)
        source = i + d if BACKWARDS else i - d
        known = (source < G) if BACKWARDS else (source >= 0)
        offset = tl.multiple_of(start + source * BLOCK + deep, 8)
        value = tl.load(v + offset[None, :] + s[:, None], mask=(known & (i < G))[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            matrix = tl.load(copies + part * COPIES * (W8 * 8) + (row + shift)[:, None] + s[None, :])
            sums = tl.dot(matrix, value, sums, input_precision=PRECISION)
    if skip is not None:
        offset = tl.multiple_of(start + i * BLOCK, 8)
        value = tl.load(v + offset[None, :] + r[:, None], mask=(i < G)[None, :], other=0.0)
        sums += tl.load(skip + c).to(tl.float32) * value.to(tl.float32)
    out = tl.multiple_of(b * (y_b8 * 8) + i * BLOCK, 8)
    target = y + c * (y_c8 * 8) + out[None, :] + r[:, None]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(i < G)[None, :])


@triton.jit(do_not_specialize=["G", "B", "spans", "ONE", "dy_b8", "dy_c8", "v_b8", "v_c8"])
def _correlate(
    dy, v, inner, outer, G, B, spans, ONE, dy_b8, dy_c8, v_b8, v_c8,
    PIECE: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of dy[t] v[t - k] over all t of a channel, for lags k in and around a span of WIDE.

    With G pieces of PIECE times, products[r, x] sums dy at r of piece p against v at x of a window that ends
    where piece p - first does; k = base + r - x. Lags base - WIDE < k <= base go to inner[c, span, base - k],
    those above to outer[c, span, base + WIDE - k], where they meet the next span's.
    """
    c = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    first = span * (WIDE // PIECE)
    r = tl.arange(0, PIECE)
    x = tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    dy += c * (dy_c8 * 8)
    v += c * (v_c8 * 8)
    products = tl.zeros((PIECE, WIDE), dtype=tl.float32)
    for start in range(0, (G - first) * B, DEEP):
        column = start + deep
        p = first + column // B
        b = (column % B).to(tl.int64)
        inside = p < G
        at = tl.multiple_of(b * (dy_b8 * 8) + p * PIECE, 8)
        left = tl.load(dy + at[None, :] + r[:, None], mask=inside[None, :], other=0.0)
        begin = tl.multiple_of((p - first + 1) * PIECE - WIDE, 8)
        at = tl.multiple_of(b * (v_b8 * 8) + begin, 8)
        right = tl.load(
            v + at[:, None] + x[None, :], mask=inside[:, None] & (begin[:, None] + x[None, :] >= 0), other=0.0
        )
        # Added outside the tensor cores, which cut sums off where others round: ONE keeps it there.
        products += ONE * tl.dot(left, right, input_precision=PRECISION)
    turned = tl.gather(products, (r[:, None] + x[None, :]) % WIDE, 1)
    below = r[:, None] + x[None, :] < WIDE
    target = (c * spans + span) * WIDE + x
    tl.store(inner + target, tl.sum(tl.where(below, turned, 0.0), 0))
    tl.store(outer + target, tl.sum(tl.where(below, 0.0, turned), 0))


@triton.jit(do_not_specialize=["L", "T", "spans", "tiles"])
def _gather(
    inner, outer, dh, dskip, L, T, spans, tiles, PIECE: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr
):
    """dh[c, k] from the one or two spans that hold lag k; 0 from T on; dskip is lag 0 once more.
    Either may be absent."""
    c = (tl.program_id(0) // tiles).to(tl.int64)
    k = tl.program_id(0) % tiles * SIZE + tl.arange(0, SIZE)
    span = (k + PIECE - 1) // WIDE
    within = (k + PIECE - 1) % WIDE
    source = (c * spans + span) * WIDE + WIDE - 1 - within
    known = (k < L) & (k < T)
    sums = tl.load(inner + source, mask=known, other=0.0)
    sums += tl.load(outer + source - WIDE, mask=known & (span > 0) & (within < PIECE - 1), other=0.0)
    if dh is not None:
        tl.store(dh + c * L + k, sums.to(dh.dtype.element_ty), mask=k < L)
    if dskip is not None:
        tl.store(dskip + c + k * 0, sums.to(dskip.dtype.element_ty), mask=k == 0)


class Tiling(NamedTuple):
    """Tiles of `_convolve`. A program has BLOCK times of so many columns."""

    columns: int
    deep: int
    """Times that a step of its sums takes."""
    warps: int
    stages: int


class BackwardTiling(NamedTuple):
    """Tiles of `_convolve` for the gradient of the data, and of `_correlate` for that of the filter."""

    columns: int
    deep: int
    warps: int
    stages: int
    wide: int
    """Lags of a program of `_correlate`."""
    sum_deep: int
    """Pieces of time that a step of its sums takes."""
    sum_warps: int
    sum_stages: int


_PIECE = 64
_HIP = torch.version.hip is not None


def products(
    columns: int, dtype: torch.dtype, tiling: Tiling | BackwardTiling | None = None, hip: bool = _HIP
) -> dict[str, Any]:
    """The constants and options of `_convolve` for so many columns."""
    chosen = tiling or _default(columns, dtype, hip)
    return {
        "COLUMNS": chosen.columns, "DEEP": chosen.deep, "BLOCK": BLOCK, "COPIES": COPIES,
        "PRECISION": precision(dtype, hip=hip), "num_warps": chosen.warps, "num_stages": chosen.stages,
    }  # fmt: skip


def correlation(dtype: torch.dtype, tiling: BackwardTiling | None = None, hip: bool = _HIP) -> dict[str, Any]:
    """The constants and options of `_correlate`."""
    chosen = tiling or _default_backward(128, dtype, hip)
    return {
        "PIECE": _PIECE, "WIDE": chosen.wide, "DEEP": chosen.sum_deep,
        "PRECISION": precision(dtype, hip=hip), "num_warps": chosen.sum_warps,
        "num_stages": chosen.sum_stages,
    }  # fmt: skip


def tilings(case: Any) -> list[Tiling]:
    """What forward may be launched with: the default, then smaller and larger tiles."""
    default = _default(_columns(case), case.u.dtype)
    found = [default, default._replace(warps=12 - default.warps)]
    depths = ((64, 2), (64, 4), (32, 3), (32, 5)) if case.u.dtype.itemsize == 2 else ((32, 3),)
    found += [default._replace(deep=deep, stages=stages) for deep, stages in depths]
    for width in (default.columns // 2, 2 * default.columns):
        if 16 <= width <= 128:
            found += [default._replace(columns=width, warps=warps) for warps in (4, 8)]
    return list(dict.fromkeys(found))


def backward_tilings(case: Any) -> list[BackwardTiling]:
    """What backward may be launched with: the default, then others for each of its kernels in turn."""
    default = _default_backward(_columns(case), case.u.dtype)
    found = [default, default._replace(sum_warps=12 - default.sum_warps)]
    depths = ((64, 2), (64, 4), (32, 3), (32, 4)) if case.u.dtype.itemsize == 2 else ((32, 3),)
    found += [default._replace(sum_deep=deep, sum_stages=stages) for deep, stages in depths]
    if case.u.dtype.itemsize == 2:  # wider sums of float32 products don't fit into registers
        found.append(default._replace(wide=256, sum_warps=8, sum_stages=2))
    found += [default._replace(**tiling._asdict()) for tiling in tilings(case)]
    return list(dict.fromkeys(found))


def _columns(case: Any) -> int:
    return -(-case.u.shape[1] // BLOCK) * case.u.shape[0]


def _default(columns: int, dtype: torch.dtype, hip: bool = _HIP) -> Tiling:
    if dtype == torch.float32:
        return Tiling(32 if columns > 16 else 16, 32, 8, 2)
    taken = min(128, max(16, 1 << (columns - 1).bit_length()))
    return Tiling(taken, 64, 8 if taken >= 64 else 4, 2 if hip else 3)


def _default_backward(columns: int, dtype: torch.dtype, hip: bool = _HIP) -> BackwardTiling:
    if dtype == torch.float32:
        return BackwardTiling(*_default(columns, dtype, hip), 128, 32, 8, 2)
    return BackwardTiling(*_default(columns, dtype, hip), 128, 64, 4, 2 if hip else 3)
