"""Where each order puts the cells of a grid, or points: row-major indices in the new order."""

import numpy as np
from numpy.typing import NDArray

from bakeoff.token_order.hilbert import hilbert_code, hilbert_path, interleaved

__all__ = ["grid_cells", "grid_order", "point_order"]

Ints = NDArray[np.int64]
_CODE_BITS = 62  # what a code's bits share in an int64


def grid_cells(shape: tuple[int, ...]) -> Ints:
    """The coordinates of a grid's cells in row-major order, [cells, dimensions]."""
    return np.indices(shape, np.int64).reshape(len(shape), -1).T


def grid_order(kind: str, shape: tuple[int, ...], tile: tuple[int, ...]) -> Ints:
    """The cells of a grid in the order `kind`."""
    if kind == "row":
        return np.arange(int(np.prod(shape, dtype=np.int64)))
    if kind == "hilbert":
        return hilbert_path(shape)
    return _by_keys(_keys(kind, grid_cells(shape), tile))


def point_order(kind: str, cells: NDArray[np.generic], tile: tuple[int, ...]) -> Ints:
    """Points [N, dimensions] in the order `kind`; those of one place stay in the order they came in."""
    if not len(cells):
        return np.zeros(0, np.int64)
    floating = np.issubdtype(cells.dtype, np.floating)
    whole = _quantised(cells) if floating else cells.astype(np.int64) - cells.min(0)
    return _by_keys(_keys(kind, whole, tile))


def _quantised(points: NDArray[np.generic]) -> Ints:
    """Floating points on the finest grid whose codes fit 62 bits; all axes have one scale."""
    values = points.astype(np.float64)
    low = values.min(0)
    extent = float((values - low).max()) or 1.0
    cells = 2 ** (_CODE_BITS // values.shape[1])
    found: Ints = np.minimum((values - low) / extent * cells, cells - 1).astype(np.int64)
    return found


def _keys(kind: str, cells: Ints, tile: tuple[int, ...]) -> list[Ints]:
    """What to sort by, the most significant first."""
    axes = list(cells.T)
    if kind == "row":
        return axes
    if kind == "tile":
        return [axis // size for axis, size in zip(axes, tile, strict=True)] + axes
    if kind == "snake":
        return _snake(axes)
    bits = max(1, int(cells.max(initial=0)).bit_length())
    return [hilbert_code(cells, bits) if kind == "hilbert" else interleaved(axes, bits)]


def _snake(axes: list[Ints]) -> list[Ints]:
    """Rows in turns forwards and backwards, so that each begins where the last one ended."""
    keys = axes[:1]
    turns = axes[0]
    for axis in axes[1:]:
        key = np.where(turns % 2, axis.max(initial=0) - axis, axis)
        keys.append(key)
        turns = (turns * (int(axis.max(initial=0)) % 2 + 1) + key) % 2
    return keys


def _by_keys(keys: list[Ints]) -> Ints:
    """Indices sorted by `keys`, as one number where that fits."""
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if sum(size.bit_length() for size in sizes) > 63:
        found: Ints = np.lexsort(keys[::-1])
        return found
    code = np.zeros_like(keys[0])
    for key, size in zip(keys, sizes, strict=True):
        code = code * size + key
    return np.argsort(code, kind="stable")
