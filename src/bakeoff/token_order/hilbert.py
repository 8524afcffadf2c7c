"""Hilbert curves: through grids of any size by splitting boxes, and of points by their bits.

On a grid a box is a corner and two or three signed edge vectors; the curve enters at the corner and leaves
at the far end of the first edge. A long box is cut across, any other into the parts of a Hilbert curve, of
even length where that is possible, until only straight lines are left. How boxes are cut whose sides are no
powers of two is the idea of the generalized Hilbert curve of Červený (github.com/jakubcerveny/gilbert); how
points get their place from their bits is Skilling's (AIP Conf. Proc. 707, 2004).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["hilbert_code", "hilbert_path", "interleaved"]

Ints = NDArray[np.int64]
Edges = NDArray[np.int32]
Chosen = NDArray[np.bool_]
Part = tuple[Edges, ...]
"""Boxes as (corner, edge, edge[, edge]), each [boxes, dimensions]."""
Rule = Callable[..., list[Part]]


def hilbert_path(shape: tuple[int, ...]) -> Ints:
    """The grid's cells along the curve, as indices in row-major order.

    It begins and ends at a longest side, and goes by unit steps where all sides are even.
    """
    dims = len(shape)
    axes = sorted(range(dims), key=lambda axis: (-shape[axis], -axis))  # the longest first
    boxes = np.zeros((1, dims + 1, dims), np.int32)
    for edge, axis in enumerate(axes, 1):
        boxes[0, edge, axis] = shape[axis]
    while True:
        sizes = _length(boxes[:, 1:])
        lines = (sizes > 1).sum(1) <= 1
        if lines.all():
            return _cells(boxes, sizes.max(1), shape)
        boxes = _cut(boxes, sizes, lines)


def _cut(boxes: Edges, sizes: Edges, lines: Chosen) -> Edges:
    """The parts of each box in its place; lines stay."""
    count, edges, dims = boxes.shape
    parts = np.zeros((count, 2 * dims - 1, edges, dims), np.int32)
    used = np.zeros(parts.shape[:2], bool)
    parts[:, 0], used[:, 0] = boxes, True
    for chosen, rule in _flat(sizes) if dims == 2 else _solid(sizes):
        at = np.flatnonzero(chosen & ~lines)
        for number, part in enumerate(rule(*boxes[at].transpose(1, 0, 2))):
            parts[at, number] = np.stack(part, 1)
            used[at, number] = _length(parts[at, number, 1:]).all(1)
    found: Edges = parts[used]
    return found


def _length(edges: Edges) -> Edges:
    """The length of edges [..., dimensions] parallel to an axis."""
    found: Edges = np.abs(edges).sum(-1, dtype=np.int32)
    return found


def _cells(boxes: Edges, lengths: Edges, shape: tuple[int, ...]) -> Ints:
    """The cells of boxes that are lines, one after another."""
    strides = np.array([int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))])
    edges = boxes[:, 1:]
    edge = np.take_along_axis(edges, _length(edges).argmax(1)[:, None, None], 1)[:, 0]
    first, step = boxes[:, 0] @ strides, np.sign(edge) @ strides
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    place = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
    found: Ints = np.repeat(first, lengths) + place * np.repeat(step, lengths)
    return found


def _half(edge: Edges) -> Edges:
    """About half of each edge, an even number of cells where there are more than two."""
    size, sign = _length(edge)[:, None], np.sign(edge)
    half = size // 2
    return sign * np.where((half % 2 == 1) & (size > 2), half + 1, half)


def _across(p: Edges, a: Edges, *others: Edges) -> list[Part]:
    """Two boxes, one after another along `a`."""
    half = _half(a)
    return [(p, half, *others), (p + half, a - half, *others)]


def _u_turn(p: Edges, a: Edges, b: Edges) -> list[Part]:
    """Up along `b`, over along `a`, and down again."""
    up, over = _half(b), _length(a)[:, None] // 2 * np.sign(a)
    return [(p, up, over), (p + up, a, b - up), (_end(p, a, up), -up, over - a)]


def _u_turn_b(p: Edges, a: Edges, b: Edges, c: Edges) -> list[Part]:
    """The same in a box too thin along `c` to be cut there."""
    up, over = _half(b), _half(a)
    return [(p, up, c, over), (p + up, a, b - up, c), (_end(p, a, up), -up, c, over - a)]


def _u_turn_c(p: Edges, a: Edges, b: Edges, c: Edges) -> list[Part]:
    """The same in a box too thin along `b`."""
    up, over = _half(c), _half(a)
    return [(p, up, over, b), (p + up, a, b, c - up), (_end(p, a, up), -up, over - a, b)]


def _cube(p: Edges, a: Edges, b: Edges, c: Edges) -> list[Part]:
    """Up along `b`, deep along `c`, over along `a`, and all the way back: eight octants in five boxes."""
    over, up, deep = _half(a), _half(b), _half(c)
    return [
        (p, up, deep, over),
        (p + up, c, over, b - up),
        (_end(p, up, c), a, -up, deep - c),
        (_end(p, a, c) + up, -c, over - a, b - up),
        (_end(p, a, up), -up, deep, over - a),
    ]


def _end(p: Edges, a: Edges, b: Edges) -> Edges:
    """The last cell along `a` and along `b`."""
    return p + (a - np.sign(a)) + (b - np.sign(b))


def _flat(sizes: Edges) -> list[tuple[Chosen, Rule]]:
    """Which rectangles are cut by which rule."""
    w, h = sizes.T
    return [(2 * w > 3 * h, _across), (2 * w <= 3 * h, _u_turn)]


def _solid(sizes: Edges) -> list[tuple[Chosen, Rule]]:
    """Which boxes are cut by which rule; the first that holds."""
    w, h, d = sizes.T
    long, flat, thin = (2 * w > 3 * h) & (2 * w > 3 * d), 3 * h > 4 * d, 3 * d > 4 * h
    return [
        (long, _across),
        (~long & flat, _u_turn_b),
        (~long & thin, _u_turn_c),
        (~long & ~flat & ~thin, _cube),
    ]


def hilbert_code(cells: Ints, bits: int) -> Ints:
    """The place of each cell [N, dimensions] on the Hilbert curve through the cube of side 2**bits."""
    axes = list(cells.astype(np.int64).T)
    for bit in reversed(range(1, bits)):
        _turn(axes, 1 << bit)
    for axis in range(1, len(axes)):  # Gray code
        axes[axis] ^= axes[axis - 1]
    flips = np.zeros_like(axes[0])
    for bit in reversed(range(1, bits)):
        flips ^= np.where(axes[-1] & (1 << bit), (1 << bit) - 1, 0)
    return interleaved([axis ^ flips for axis in axes], bits)


def _turn(axes: list[Ints], bit: int) -> None:
    """Below `bit`, mirrors the first axis where an axis has that bit, and swaps the two where it has not."""
    low = bit - 1
    for number, axis in enumerate(axes):
        high = (axis & bit) != 0
        swapped = np.where(high, 0, (axes[0] ^ axis) & low)
        axes[0] = axes[0] ^ np.where(high, low, swapped)
        if number:
            axes[number] = axis ^ swapped


def interleaved(axes: list[Ints], bits: int) -> Ints:
    """The bits of several numbers in turns, the first number's as the highest: the Morton code."""
    code = np.zeros_like(axes[0])
    for bit in reversed(range(bits)):
        for axis in axes:
            code = (code << 1) | ((axis >> bit) & 1)
    return code
