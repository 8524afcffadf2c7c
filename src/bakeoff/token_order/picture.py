"""Orders as pictures, in plain SVG: the way from token to token, over cells coloured by segment."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["drawn"]

_MOST = 2**16
_COLOURS = ("#cfe3f5", "#fbe3c8", "#d5edd1", "#f3d3d9", "#e2daf1", "#f4efc4", "#d0eeee", "#ead9cf")
_DEPTH = np.array([0.35, -0.35])  # where the third axis points, for tokens of a volume


def drawn(cells: NDArray[Any] | None, perm: NDArray[np.int32], segment: int, size: int) -> str:
    """The SVG of an order whose place i holds the token with coordinates cells[perm[i]]."""
    if cells is None or not 0 < len(perm) <= _MOST:
        raise ValueError(f"a picture needs 1 to {_MOST:,} tokens with coordinates")
    if segment < 0 or not size > 0:
        raise ValueError(f"segment is {segment} and size {size}; give segment >= 0 and size > 0")
    at = cells[perm].astype(np.float64)
    flat = at[:, -2:][:, ::-1]  # x to the right, y down
    if at.shape[1] == 3:
        flat = flat + at[:, :1] * _DEPTH
    low, high = flat.min(0) - 0.5, flat.max(0) + 0.5
    width, height = high - low
    points = flat - low
    scale = size / max(width, height)
    solid = at.shape[1] == 3
    line = " ".join(f"{x:.7g},{y:.7g}" for x, y in points)
    x, y = points[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"',
        f' width="{math.ceil(width * scale)}" height="{math.ceil(height * scale)}">',
        *([] if solid else _squares(points, segment or len(points))),
        f'<polyline points="{line}" fill="none" stroke="#24506e" stroke-width="{0.06 if solid else 0.14}"',
        ' stroke-linejoin="round" stroke-linecap="round"/>',
        f'<circle cx="{x:.7g}" cy="{y:.7g}" r="0.25" fill="#b4442c"/></svg>',
    ]
    return "\n".join(parts) + "\n"


def _squares(points: NDArray[np.float64], segment: int) -> list[str]:
    """A path a segment, of unit squares around its tokens."""
    parts = []
    for number, start in enumerate(range(0, len(points), segment)):
        squares = "".join(f"M{x - 0.5:.7g} {y - 0.5:.7g}h1v1h-1z" for x, y in points[start : start + segment])
        parts.append(f'<path d="{squares}" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
    return parts
