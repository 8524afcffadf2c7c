"""Token orders: a permutation of tokens and its inverse, made from a grid or from coordinates."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakeoff.token_order.picture import drawn
from bakeoff.token_order.places import grid_cells, grid_order, point_order
from bakeoff.token_order.report import OrderReport, reported

__all__ = ["KINDS", "TokenOrder", "permute", "token_order"]

KINDS = ("row", "tile", "snake", "morton", "hilbert", "custom")
_TILES = {2: (16, 16), 3: (8, 8, 8)}
_MOST = 2**31 - 1  # places are int32


class _Permuted(torch.autograd.Function):
    """Gathers both ways, so that backward adds nothing up and is the same in every run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, there: Tensor, back: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, there)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, there, back, ctx.dim = inputs
        ctx.save_for_backward(there, back)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        there, back = ctx.saved_tensors
        return _Permuted.apply(dy, back, there, ctx.dim), None, None, None  # type: ignore[no-untyped-call]


def permute(x: Tensor, perm: Tensor, inverse: Tensor, dim: int = 1) -> Tensor:
    """y[..., i, ...] = x[..., perm[i], ...] along `dim`, for models that keep an order's tables as buffers.

    `TokenOrder.apply` is `permute(x, perm, inverse)`, `undo` is `permute(x, inverse, perm)`. Forward and
    backward read and write each element once.

    Args:
        x: any dtype and strides.
        perm, inverse: int32 [N], inverse of each other, on x's device.
        dim: the dimension of tokens, of N elements.

    Raises:
        ValueError: `dim` has not N elements, or the tables lie on another device.

    Example:
        >>> order = token_order("snake", (2, 2))
        >>> permute(torch.tensor([[10, 20, 30, 40]]), order.perm, order.inverse)
        tensor([[10, 20, 40, 30]])
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} is none of the {x.dim()} dimensions of x")
    if x.shape[dim] != perm.shape[0]:
        raise ValueError(
            f"dimension {dim} of x has {x.shape[dim]} elements and the order {perm.shape[0]} tokens; "
            "give dim= of the tokens"
        )
    if perm.device != x.device:
        raise ValueError(
            f"x is on {x.device} and the order on {perm.device}; move it once: order = order.to(x.device)"
        )
    return _Permuted.apply(x, perm, inverse, dim)  # type: ignore[no-any-return, no-untyped-call]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenOrder:
    """An order of N tokens.

    Attributes:
        kind: row, tile, snake, morton, hilbert or custom.
        perm: int32 [N]; place i holds the token that was at perm[i].
        inverse: int32 [N]; token t is at place inverse[t]. inverse[perm] = perm[inverse] = 0, 1, ...
        cells: the tokens' coordinates [N, dimensions] before ordering; None where there are none.
    """

    kind: str
    perm: Tensor
    inverse: Tensor
    cells: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.perm.shape[0]

    def __repr__(self) -> str:
        return f"TokenOrder({self.kind!r}, {len(self)} tokens, on {self.perm.device})"

    def to(self, device: torch.device | str) -> "TokenOrder":
        """The same order with its tables on `device`."""
        return dataclasses.replace(self, perm=self.perm.to(device), inverse=self.inverse.to(device))

    def apply(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x` with its tokens, along `dim`, in this order. Differentiable; the gradient is a gather, too.

        Once at a model's entrance is enough: norms, projections and MLPs treat tokens alike, and codes of
        positions can be ordered once as well.

        Raises:
            ValueError: `dim` has another number of elements than the order tokens, or x is on another device.
        """
        return permute(x, self.perm, self.inverse, dim)

    def undo(self, y: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `apply`, bit by bit: `y` with its tokens, along `dim`, back where they were."""
        return permute(y, self.inverse, self.perm, dim)

    def report(self, segments: Sequence[int], rates: Sequence[int], **options: Any) -> OrderReport:
        """What this order is worth for `dilated_attention(..., segments, rates)`: see `OrderReport`.

        Args:
            segments, rates: the branches.
            decay: attention between tokens at distance d is taken to be exp(-d / decay); 8 by default.
            window: reach, along each axis, of the local window whose blocks and halos are counted; by
                default 8 in two dimensions and 2 in three.
            block: rows and columns of a tile of scores; 128 by default.
            devices: numbers of devices, each of which holds an equal contiguous part of the order;
                (2, 4, 8) by default.
            samples: how many queries, drawn with a fixed seed, `kept` is averaged over; 256 by default.

        Raises:
            ValueError: segments or rates that are no branches; options that are not positive, or not whole
                but for `decay`; tokens without whole coordinates.

        Example:
            >>> for kind in ("row", "tile", "hilbert"):
            ...     print(f"{token_order(kind, (64, 64)).report([256], [1]).kept:.2f}")
            0.19
            0.38
            0.38
        """
        return reported(self.cells, self.inverse.cpu().numpy(), segments, rates, **options)

    def svg(self, *, segment: int = 0, size: int = 320) -> str:
        """A picture, as SVG: the way from token to token over the grid, with cells coloured by segment.

        Args:
            segment: tokens of a segment; 0 for one colour.
            size: pixels of the longer side.

        Raises:
            ValueError: tokens without coordinates, or more than 65,536 of them; a negative `segment`, a
                `size` that is not positive.
        """
        return drawn(self.cells, self.perm.cpu().numpy(), segment, size)


def token_order(
    kind: str,
    shape: Sequence[int] | None = None,
    *,
    coordinates: Tensor | None = None,
    tile: int | Sequence[int] | None = None,
    perm: Tensor | None = None,
) -> TokenOrder:
    """An order of the tokens of a grid of `shape`, or of points at `coordinates`.

    Segments of `dilated_attention`, and shards of context parallelism, are stretches of the order. In "row"
    order a stretch of an image is a few whole rows, in the others it is compact, so that more of what lies
    near a token shares its segment. An order never changes full attention, and text has the best one already:
    leave it alone.

        row      the last coordinate runs fastest: the identity on grids
        snake    the same, every other row backwards
        tile     tiles in row order, row order inside
        morton   by the interleaved bits of the coordinates: aligned squares or cubes of any 2^k
        hilbert  a Hilbert curve: as morton, and each token is beside the last one
        custom   `perm` as it is given

    On a grid "hilbert" is the generalized curve for any size: it goes by unit steps where all sides are even,
    and in two dimensions makes at most one diagonal step elsewhere. Points are ordered by their codes in the
    enclosing cube.

    Args:
        kind: one of the above.
        shape: 2 or 3 sizes; tokens are numbered in row-major order, as `x.flatten(1, 2)` does in an image.
        coordinates: [N, 2 or 3], of integers, or floating for "morton" and "hilbert", instead of `shape`.
        tile: cells of a tile along each axis, or one number for all; 16 in two dimensions and 8 in three.
        perm: for "custom": integers [N], each of 0 to N - 1 once.

    Returns:
        TokenOrder, on the CPU; `to` moves it.

    Raises:
        ValueError: an unknown kind; arguments that don't fit it; a `perm` that is no permutation.
        TypeError: `coordinates` or a `perm` that is no tensor.

    Source: Hilbert 1891; Morton 1966; generalized curve: Červený, gilbert; bits: Skilling 2004.

    Example:
        >>> order = token_order("hilbert", (2, 2))
        >>> order.perm
        tensor([0, 2, 3, 1], dtype=torch.int32)
        >>> x = torch.arange(4.0)[None, :, None]
        >>> order.apply(x).flatten(), torch.equal(order.undo(order.apply(x)), x)
        (tensor([0., 2., 3., 1.]), True)
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it is one of {', '.join(KINDS)}")
    if tile is not None and kind != "tile":
        raise ValueError(f"tile= belongs to kind 'tile', not {kind!r}")
    if (kind == "custom") != (perm is not None):
        raise ValueError("perm= and kind 'custom' belong together: give both or none of them")
    if shape is not None and coordinates is not None:
        raise ValueError("give shape= or coordinates=, not both")
    if shape is not None:
        sizes = _sizes(shape)
        cells: NDArray[Any] | None = grid_cells(sizes)
    else:
        sizes, cells = (), None if coordinates is None else _points(kind, coordinates)
    if perm is not None:
        found = _custom(perm, None if cells is None else len(cells))
    elif cells is None:
        raise ValueError(f"an order of kind {kind!r} is made from shape= or coordinates=")
    else:
        tiles = _tiles(tile, cells.shape[1])
        found = grid_order(kind, sizes, tiles) if sizes else point_order(kind, cells, tiles)
    inverse = np.empty(len(found), np.int32)
    inverse[found] = np.arange(len(found), dtype=np.int32)
    return TokenOrder(kind, torch.from_numpy(found.astype(np.int32)), torch.from_numpy(inverse), cells)


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = _whole(shape)
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise ValueError(
            f"shape is {shape}; it has 2 or 3 sizes, whole and at least 1. One-dimensional "
            "tokens, as of text, are best in the order they have"
        )
    if int(np.prod(sizes, dtype=object)) > _MOST:
        raise ValueError(f"shape {sizes} has more than 2^31 - 1 tokens, which int32 can't number")
    return sizes


def _whole(sizes: Any) -> tuple[int, ...]:
    """Whole numbers as a tuple; an empty one for anything else."""
    try:
        found = tuple(sizes)
        return tuple(int(size) for size in found) if all(size == int(size) for size in found) else ()
    except (TypeError, ValueError, OverflowError):
        return ()


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}= takes a tensor, not {type(given).__name__}: torch.as_tensor({name})")


def _points(kind: str, coordinates: Tensor) -> NDArray[Any]:
    _check_tensor("coordinates", coordinates)
    if coordinates.dim() != 2 or coordinates.shape[1] not in (2, 3) or coordinates.is_complex():
        raise ValueError(
            f"coordinates are {coordinates.dtype} {list(coordinates.shape)}; give numbers [N, 2] or [N, 3]"
        )
    values = coordinates.detach().cpu()
    if not values.is_floating_point():
        if values.dtype == torch.bool:
            raise ValueError("coordinates are bool; give the places where a mask holds: mask.nonzero()")
        found = values.to(torch.int64).numpy()
        if found.size and int(found.max()) - int(found.min()) >= 2 ** (62 // found.shape[1]):
            raise ValueError("coordinates spread too far for codes of 62 bits; divide them by the cell size")
        return found
    if kind not in ("morton", "hilbert", "custom"):
        raise ValueError(
            f"an order of kind {kind!r} needs whole coordinates; round them: (coordinates / cell).long()"
        )
    if not bool(values.isfinite().all()):
        raise ValueError("coordinates hold NaN or infinity")
    return values.to(torch.float64).numpy()


def _tiles(tile: int | Sequence[int] | None, dims: int) -> tuple[int, ...]:
    if tile is None:
        return _TILES[dims]
    sizes = (tile,) * dims if isinstance(tile, int) else _whole(tile)
    if len(sizes) != dims or min(sizes) < 1:
        raise ValueError(f"tile is {tile}; it is a positive number or {dims} of them, all whole")
    return sizes


def _custom(perm: Tensor, tokens: int | None) -> NDArray[np.int64]:
    _check_tensor("perm", perm)
    if perm.dim() != 1 or perm.is_floating_point() or perm.is_complex() or perm.dtype == torch.bool:
        raise ValueError(f"perm is {perm.dtype} {list(perm.shape)}; it is a vector of integers")
    found = perm.detach().cpu().to(torch.int64).numpy()
    if tokens is not None and len(found) != tokens:
        raise ValueError(f"perm orders {len(found)} tokens and there are {tokens}")
    if not np.array_equal(np.sort(found), np.arange(len(found))):
        raise ValueError(f"perm is no permutation: it must hold each of 0 to {len(found) - 1} once")
    return found
