"""Token orders: bijections, real Hilbert curves, exact undo, and reports that agree with counting pairs."""

import itertools
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bakeoff
from bakeoff.token_order import TokenOrder, permute, token_order
from bakeoff.token_order.order import KINDS

ROOT = Path(__file__).parents[2]
GRID_KINDS = [kind for kind in KINDS if kind != "custom"]
shapes = st.lists(st.integers(1, 12), min_size=2, max_size=3).map(tuple)


def walked(order: TokenOrder) -> np.ndarray:
    """How far, along the axes together, each token is from the one before it."""
    assert order.cells is not None
    return np.abs(np.diff(order.cells[order.perm.numpy()], axis=0)).sum(1)


@pytest.mark.parametrize("kind", GRID_KINDS)
@given(shape=shapes)
@settings(deadline=None)
def test_every_order_is_a_bijection(kind: str, shape: tuple[int, ...]) -> None:
    order = token_order(kind, shape)
    numbers = torch.arange(math.prod(shape), dtype=torch.int32)
    assert order.perm.dtype == order.inverse.dtype == torch.int32
    assert torch.equal(order.perm.sort().values, numbers)
    assert torch.equal(order.inverse[order.perm], numbers)
    assert torch.equal(order.perm[order.inverse], numbers)


@pytest.mark.parametrize("dims", [2, 3])
def test_hilbert_goes_by_unit_steps_on_even_sides(dims: int) -> None:
    for shape in itertools.product(range(2, 25 if dims == 2 else 11, 2), repeat=dims):
        assert (walked(token_order("hilbert", shape)) == 1).all(), shape


def test_hilbert_makes_at_most_one_diagonal_step_on_any_rectangle() -> None:
    for shape in itertools.product(range(1, 20), repeat=2):
        steps = walked(token_order("hilbert", shape))
        assert (steps > 1).sum() <= 1, shape
        assert steps.max(initial=0) <= 2, shape


@pytest.mark.parametrize(("dims", "side"), [(2, 32), (3, 8)])
def test_hilbert_fills_every_aligned_cube_before_it_goes_on(dims: int, side: int) -> None:
    """What makes a segment of 2^(dims k) tokens a square or a cube; snakes and rows fail it."""
    for order in (
        token_order("hilbert", (side,) * dims),
        token_order("hilbert", coordinates=torch.cartesian_prod(*[torch.arange(side)] * dims)),
    ):
        assert order.cells is not None
        cells = order.cells[order.perm.numpy()]
        for k in (1, 2):
            corners = (cells // 2**k).reshape(-1, 2 ** (dims * k), dims)
            assert (corners == corners[:, :1]).all()
        assert (walked(order) == 1).all()


def test_hilbert_of_four_cells_by_hand() -> None:
    assert token_order("hilbert", (2, 2)).perm.tolist() == [0, 2, 3, 1]
    assert token_order("hilbert", (1, 5)).perm.tolist() == [0, 1, 2, 3, 4]


def test_the_simple_orders_by_hand() -> None:
    assert token_order("row", (2, 3)).perm.tolist() == [0, 1, 2, 3, 4, 5]
    assert token_order("snake", (3, 2)).perm.tolist() == [0, 1, 3, 2, 4, 5]
    assert token_order("tile", (2, 4), tile=2).perm.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert token_order("tile", (3, 3), tile=(2, 2)).perm.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert token_order("morton", (2, 4)).perm.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@given(shape=shapes)
@settings(deadline=None)
def test_a_snake_goes_by_unit_steps(shape: tuple[int, ...]) -> None:
    assert (walked(token_order("snake", shape)) == 1).all()


def test_a_morton_order_is_that_of_interleaved_bits() -> None:
    order = token_order("morton", (5, 6, 7))
    assert order.cells is not None
    codes = [
        sum((int(c) >> bit & 1) << (3 * bit + 2 - axis) for bit in range(3) for axis, c in enumerate(cell))
        for cell in order.cells[order.perm.numpy()]
    ]
    assert codes == sorted(codes)


@pytest.mark.parametrize("kind", GRID_KINDS)
@pytest.mark.parametrize("shape", [(16, 16), (8, 4, 16)])
def test_coordinates_of_a_grid_give_an_order_of_the_grid(kind: str, shape: tuple[int, ...]) -> None:
    points = torch.cartesian_prod(*[torch.arange(size) for size in shape])
    one, two = token_order(kind, shape), token_order(kind, coordinates=points - 5)
    if kind == "hilbert":  # another of its mirror images, or of a longer side
        assert torch.equal(two.perm.sort().values, one.perm.sort().values)
    else:
        assert torch.equal(one.perm, two.perm)


def test_points_anywhere() -> None:
    points = torch.rand(1000, 3, dtype=torch.float64) * 1e-3 - 7
    for kind in ("morton", "hilbert"):
        order = token_order(kind, coordinates=points)
        near = (points[order.perm.long()].diff(dim=0)).norm(dim=1).mean()
        assert near < 0.4 * points.diff(dim=0).norm(dim=1).mean()
    same = token_order("hilbert", coordinates=torch.zeros(5, 2))
    assert same.perm.tolist() == [0, 1, 2, 3, 4]
    for dtype in (torch.int64, torch.float32):
        assert len(token_order("morton", coordinates=torch.zeros(0, 2, dtype=dtype))) == 0


@pytest.mark.parametrize("kind", ["row", "snake", "tile", "morton", "hilbert"])
@pytest.mark.parametrize("offset", [3, 2**31 - 8, 2**40 - 8])
def test_where_points_lie_as_a_whole_changes_nothing(kind: str, offset: int) -> None:
    points = torch.cartesian_prod(torch.arange(16), torch.arange(16))[torch.randperm(256)]
    there = token_order(kind, coordinates=points + offset)
    assert torch.equal(token_order(kind, coordinates=points).perm, there.perm)


def test_apply_and_undo() -> None:
    order = token_order("hilbert", (6, 5))
    for x, dim in (
        (torch.randn(2, 30, 4), 1),
        (torch.randn(30), 0),
        (torch.randn(3, 4, 30), -1),
        (torch.randint(9, (30, 2)).T.contiguous().T, 0),
        (torch.randn(0, 30), 1),
    ):
        assert torch.equal(order.apply(x, dim), x[(slice(None),) * (dim % x.dim()) + (order.perm.long(),)])
        assert torch.equal(order.undo(order.apply(x, dim), dim), x)
        assert torch.equal(order.apply(order.undo(x, dim), dim), x)


def test_gradients() -> None:
    order = token_order("hilbert", (2, 3))
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(order.apply, (x,))
    torch.autograd.gradgradcheck(order.undo, (x,))
    weight = torch.randn(2, 6, 3, dtype=torch.float64)
    (dx,) = torch.autograd.grad((order.apply(x) * weight).sum(), x)
    assert torch.equal(dx, order.undo(weight))


def test_inside_torch_compile_and_vmap() -> None:
    order = token_order("morton", (4, 4))
    x = torch.randn(3, 16, 2, requires_grad=True)

    def square(x: Tensor) -> Tensor:
        return order.undo(order.apply(x).square())

    y = torch.compile(square, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, x.square())
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert torch.equal(torch.vmap(lambda row: order.apply(row, 0))(x), order.apply(x))


def test_full_attention_doesn_t_change() -> None:
    """And attention in segments does: that is what an order is for."""
    order = token_order("hilbert", (4, 8))
    x = torch.randn(2, 32, 8, dtype=torch.float64)

    def attend(x: Tensor, segment: int) -> Tensor:
        x = x.unflatten(1, (-1, segment))
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).flatten(1, 2)

    torch.testing.assert_close(order.undo(attend(order.apply(x), 32)), attend(x, 32))
    assert not torch.allclose(order.undo(attend(order.apply(x), 8)), attend(x, 8))


def counted(order: TokenOrder, segments: list[int], rates: list[int], decay: float) -> tuple[float, float]:
    """(keys a query, kept), pair by pair, from the definition of dilated attention."""
    n, place = len(order), order.inverse.tolist()
    heads = math.lcm(*rates)
    keys, kept = 0.0, 0.0
    assert order.cells is not None
    mass = np.exp(-np.linalg.norm(order.cells[:, None] - order.cells[None], axis=-1) / decay)
    for head, t in itertools.product(range(heads), range(n)):
        held = [
            u
            for u in range(n)
            if any(
                place[t] // w == place[u] // w
                and place[t] % w % r == head % r
                and place[u] % w % r == head % r
                for w, r in zip(segments, rates, strict=True)
            )
        ]
        keys += len(held) / (heads * n)
        kept += mass[t, held].sum() / mass[t].sum() / (heads * n)
    return keys, kept


@pytest.mark.parametrize("kind", ["row", "hilbert"])
@pytest.mark.parametrize(("segments", "rates"), [([4, 12], [1, 2]), ([6, 9, 24], [2, 3, 1]), ([5], [5])])
def test_the_report_s_attention_is_that_of_the_definition(
    kind: str, segments: list[int], rates: list[int]
) -> None:
    order = token_order(kind, (4, 6))
    report = order.report(segments, rates, decay=2.0, samples=24)
    keys, kept = counted(order, segments, rates, 2.0)
    assert report.keys == pytest.approx(keys)
    assert report.kept == pytest.approx(kept, rel=1e-5)
    assert f"{report.kept:.1%}" in str(report)


@pytest.mark.parametrize("kind", ["row", "tile", "hilbert"])
def test_the_report_s_blocks_and_halos_are_those_of_the_mask(kind: str) -> None:
    hole = torch.cartesian_prod(torch.arange(7), torch.arange(9))
    order = token_order(
        kind, coordinates=hole[(hole[:, 0] != 3) | (hole[:, 1] < 6)], tile=4 if kind == "tile" else None
    )
    report = order.report([8], [1], window=2, block=8, devices=(1, 2, 3))
    assert order.cells is not None
    cells, n = order.cells[order.perm.numpy()], len(order)
    mask = (np.abs(cells[:, None] - cells[None]) <= 2).all(-1)
    blocks = -(-n // 8)
    padded = np.zeros((8 * blocks, 8 * blocks), bool)
    padded[:n, :n] = mask
    assert report.active_blocks == pytest.approx(padded.reshape(blocks, 8, blocks, 8).any((1, 3)).mean())
    for halo in report.halos:
        size = -(-n // halo.devices)
        shares = []
        for start in range(0, n, size):
            needed = mask[start : start + size].any(0)
            needed[start : start + size] = False
            shares.append(needed.sum() / len(mask[start : start + size]))
        assert halo.share == pytest.approx(max(shares))


def test_blocks_of_many_queries_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    order = token_order("hilbert", (64, 64))
    whole = order.report([256], [1], block=16).active_blocks
    monkeypatch.setattr("bakeoff.token_order.report._BLOCKS", 128 * 256)  # half of the 256 blocks
    assert order.report([256], [1], block=16).active_blocks == pytest.approx(whole, rel=0.05)


def test_a_report_tells_good_orders_from_bad_ones() -> None:
    """Rows lose to tiles by a factor, and tiles to no curve by more than a little at one size of segment."""
    order = {kind: token_order(kind, (64, 64)) for kind in GRID_KINDS}
    order["random"] = token_order("custom", (64, 64), perm=torch.randperm(4096))
    kept = {kind: o.report([256], [1]).kept for kind, o in order.items()}
    assert kept["random"] < kept["row"] / 2 < kept["tile"] / 3.5
    assert kept["morton"] == pytest.approx(kept["tile"], rel=0.02) == pytest.approx(kept["hilbert"], rel=0.02)


def test_pictures() -> None:
    for shape in ((8, 8), (4, 4, 4)):
        picture = ET.fromstring(token_order("hilbert", shape).svg(segment=16))
        (line,) = (part for part in picture if part.tag.endswith("polyline"))
        assert len(line.attrib["points"].split()) == 64
        assert sum(part.tag.endswith("path") for part in picture) == (4 if len(shape) == 2 else 0)


def test_a_picture_of_a_long_row_shows_every_token() -> None:
    picture = ET.fromstring(token_order("row", (1, 20000)).svg())
    (line,) = (part for part in picture if part.tag.endswith("polyline"))
    assert len(set(line.attrib["points"].split())) == 20000
    assert (picture.attrib["width"], picture.attrib["height"]) == ("320", "1")
    for how in ({"segment": -1}, {"size": 0}):
        with pytest.raises(ValueError, match="give segment >= 0 and size > 0"):
            token_order("row", (2, 2)).svg(**how)


def test_a_window_wider_than_the_grid_is_the_grid() -> None:
    order = token_order("hilbert", (8, 8))
    assert order.report([16], [1], window=10**6) == order.report([16], [1], window=7)


def test_the_page_shows_what_is_drawn_today() -> None:
    """docs/token-order.md says by which command."""
    orders = {kind: token_order(kind, (16, 16), tile=8 if kind == "tile" else None) for kind in GRID_KINDS}
    for kind, order in orders.items():
        assert (ROOT / "docs" / "images" / f"order-{kind}.svg").read_text() == order.svg(segment=64)


def test_the_public_names() -> None:
    assert bakeoff.ops.token_order is token_order
    order = token_order("row", (2, 2))
    assert repr(order) == "TokenOrder('row', 4 tokens, on cpu)"
    assert order.to("cpu").perm is order.perm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "peano", "shape": (2, 2)}, "'peano'; it is one of row"),
        ({"kind": "row"}, "made from shape= or coordinates="),
        ({"kind": "row", "shape": (4,)}, "as of text, are best in the order they have"),
        ({"kind": "row", "shape": (4, 0)}, "whole and at least 1"),
        ({"kind": "row", "shape": (4.5, 4)}, "whole and at least 1"),
        ({"kind": "row", "shape": 16}, "shape is 16; it has 2 or 3 sizes"),
        ({"kind": "row", "shape": (None, 4)}, "whole and at least 1"),
        ({"kind": "tile", "shape": (4, 4), "tile": (2.5, 2)}, "all whole"),
        ({"kind": "tile", "shape": (4, 4), "tile": 2.5}, "all whole"),
        ({"kind": "row", "shape": (2**16, 2**16)}, "int32 can't number"),
        ({"kind": "row", "shape": (4, 4), "tile": 2}, "tile= belongs to kind 'tile'"),
        ({"kind": "tile", "shape": (4, 4), "tile": 0}, "a positive number or 2 of them"),
        ({"kind": "tile", "shape": (4, 4), "tile": (2, 2, 2)}, "a positive number or 2 of them"),
        ({"kind": "row", "shape": (4, 4), "coordinates": torch.ones(3, 2)}, "not both"),
        ({"kind": "row", "coordinates": torch.ones(3, 4)}, r"\[N, 2\] or \[N, 3\]"),
        ({"kind": "snake", "coordinates": torch.ones(3, 2)}, "round them"),
        ({"kind": "hilbert", "coordinates": torch.full((3, 2), math.nan)}, "NaN or infinity"),
        ({"kind": "hilbert", "coordinates": torch.ones(3, 2) > 0}, "mask.nonzero()"),
        ({"kind": "morton", "coordinates": torch.tensor([[0, 2**40], [0, 0]])}, "divide them"),
        ({"kind": "custom", "shape": (2, 2)}, "belong together"),
        ({"kind": "row", "shape": (2, 2), "perm": torch.arange(4)}, "belong together"),
        ({"kind": "custom", "perm": torch.tensor([0, 2])}, "each of 0 to 1 once"),
        ({"kind": "custom", "perm": torch.tensor([0.0, 1.0])}, "a vector of integers"),
        ({"kind": "custom", "shape": (2, 2), "perm": torch.arange(3)}, "orders 3 tokens and there are 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_orders(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_order(**arguments)  # type: ignore[arg-type]


def test_what_is_no_tensor() -> None:
    for points in ([[0, 0], [0, 1]], np.zeros((2, 2))):
        with pytest.raises(TypeError, match=r"takes a tensor, not .*: torch.as_tensor\(coordinates\)"):
            token_order("hilbert", coordinates=points)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"perm= takes a tensor, not list: torch.as_tensor\(perm\)"):
        token_order("custom", perm=[1, 0])  # type: ignore[arg-type]


def test_bad_calls() -> None:
    order = token_order("row", (2, 3))
    with pytest.raises(ValueError, match="dimension 1 of x has 5 elements and the order 6 tokens"):
        order.apply(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="none of the 2 dimensions"):
        order.undo(torch.zeros(6, 6), dim=2)
    with pytest.raises(ValueError, match=r"move it once: order = order.to"):
        permute(torch.zeros(2, 6, device="meta"), order.perm, order.inverse)
    for segments, rates, message in (
        ([4], [1, 2], "1 segments and 2 rates"),
        ([], [], "0 segments"),
        ([4], [8], "at most its segment"),
        ([4], [0], "at least 1"),
        ([4.5], [1], "give whole numbers"),
        (4, 1, "give whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            order.report(segments, rates)  # type: ignore[arg-type]
    for options, message in (
        ({"decay": 0}, "decay is 0"),
        ({"decay": math.inf}, "decay is inf; it must be positive and finite"),
        ({"window": 1.5}, "window is 1.5; it must be positive and whole"),
        ({"devices": (2, 0)}, "devices is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            order.report([4], [1], **options)
    with pytest.raises(ValueError, match="whole coordinates"):
        token_order("custom", perm=torch.arange(4)).report([4], [1])
    with pytest.raises(ValueError, match="whole coordinates"):
        token_order("morton", coordinates=torch.rand(4, 2)).report([4], [1])
    with pytest.raises(ValueError, match="same coordinates"):
        token_order("morton", coordinates=torch.zeros(4, 2).long()).report([4], [1])
    with pytest.raises(ValueError, match="cells; divide coordinates"):
        token_order("morton", coordinates=torch.tensor([[0, 0], [2**20, 2**20]])).report([2], [1])
    with pytest.raises(ValueError, match="tokens with coordinates"):
        token_order("custom", perm=torch.arange(4)).svg()
