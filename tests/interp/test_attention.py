"""attention's kernels for decoding under the interpreter against the float64 reference."""

from typing import Any

import pytest
import torch

from bakeoff.kernels import counter
from bakeoff.ops.attention import OP, kernels
from bakeoff.ops.attention.reference import attention as reference
from bakeoff.ops.attention.triton import decode
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks


def tiled(tiles: int = 1) -> Any:
    """The candidate in tiles of 16 keys, so that a few positions are several parts."""
    return decode.bind(f"forward(keys=16,tiles={tiles},warps=4,stages=1)")


def drawn(
    B: int, T: int, S: int, H: int, K: int, D: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(S + D)
    shapes = [(B, T, H, D), (B, S, K, D), (B, S, K, D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(candidate: Any, inputs: list[torch.Tensor], *args: Any, bound: float = 1e-6) -> torch.Tensor:
    before = [x.clone() for x in inputs]
    with Poison() as poison:
        y = candidate(*inputs, *args)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    want = reference(*(x.double() for x in inputs), *args)
    assert y.is_contiguous()
    assert (y.double() - want).norm() <= bound * want.norm()
    return y


CASES = [
    # B, T, S, H, K, D, causal, window, lengths, tiles
    (2, 1, 70, 4, 4, 16, True, None, [70, 33], 1),
    (4, 1, 70, 4, 2, 48, False, None, [0, 1, 17, 999], 1),
    (2, 3, 45, 6, 2, 24, True, None, [45, 2], 2),
    (2, 5, 61, 4, 1, 16, True, 7, [40, 3], 1),
    (2, 2, 61, 4, 1, 16, True, 20, [61, 50], 2),
    (1, 16, 40, 10, 2, 8, True, 100, [35], 1),  # two blocks of rows
    (2, 2, 20, 2, 2, 96, False, None, None, 2),  # one part
    (1, 1, 33, 3, 3, 256, True, None, None, 1),
    (1, 6, 4, 2, 2, 16, True, None, None, 1),  # queries before all positions
    (3, 4, 5, 2, 1, 16, True, None, [-3, 0, 3], 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Any) -> None:
    B, T, S, H, K, D, causal, window, lengths, tiles = case
    for kind in (torch.int32, torch.int64)[: 1 + (S == 70)]:
        held = None if lengths is None else torch.tensor(lengths, dtype=kind)
        scale = 0.3 if T == 3 else None
        compare(tiled(tiles), drawn(B, T, S, H, K, D), causal, window, scale, None, held)


def test_half_precision() -> None:
    held = torch.tensor([50, 9], dtype=torch.int32)
    inputs = drawn(2, 2, 50, 4, 2, 32, torch.float16)
    compare(tiled(), inputs, True, None, None, None, held, bound=1e-3)


def test_a_row_that_sees_nothing_is_zero() -> None:
    y = compare(tiled(), drawn(2, 4, 40, 2, 1, 16), True, 3, None, None, torch.tensor([2, 0]))
    assert not y[0, :2].any()
    assert not y[1].any()
    assert y[0, 2:].all()


def test_what_lies_behind_a_row_s_length_is_not_read() -> None:
    q, k, v = drawn(2, 1, 70, 4, 2, 16)
    held = torch.tensor([33, 5])
    want = tiled()(q, k, v, True, None, None, None, held)
    for row, length in enumerate(held.tolist()):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    assert torch.equal(tiled()(q, k, v, True, None, None, None, held), want)


def test_programs_behind_a_row_s_length_change_nothing() -> None:
    """The parts are those of S, and the result that of a shorter cache, to the bit."""
    q, k, v = drawn(1, 1, 96, 2, 1, 16)
    held = torch.tensor([30])
    short = tiled()(q, k[:, :32], v[:, :32], True, None, None, None, held)
    assert torch.equal(tiled()(q, k, v, True, None, None, None, held), short)


@pytest.mark.parametrize("layout", ["heads first", "rows apart", "expanded", "columns apart", "offset"])
def test_layouts(layout: str) -> None:
    q, k, v = drawn(2, 2, 35, 4, 2, 16)
    turn = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows apart": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
        "expanded": lambda x: x[:1].expand_as(x),
        "columns apart": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
        "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x),
    }[layout]
    inputs = [turn(q), turn(k), turn(v)]
    compare(tiled(), inputs, True, None, None, None, torch.tensor([35, 20, 7])[::2])


@pytest.mark.parametrize("shape", [(0, 1, 8, 2, 2, 16), (2, 0, 8, 2, 2, 16), (2, 1, 0, 2, 2, 16)], ids=str)
def test_empty_tensors(shape: Any) -> None:
    inputs = drawn(*shape)
    y = decode(*inputs, True, None, None, None, None)
    assert y.shape == inputs[0].shape
    assert not y.any()


def test_passes_the_contest_verification() -> None:
    q, k, v = drawn(5, 2, 40, 4, 2, 16)
    case = OP.case((q, k, v, True, 19, None, None, torch.zeros(5, dtype=torch.int64)))
    _, deterministic = verify(OP, OP.candidate("decode"), yardsticks(OP, case))
    assert deterministic


def test_launches() -> None:
    """Two, or one where a row is one part."""
    q, k, v = drawn(1, 1, 32, 2, 2, 16)
    for tiles, count in ((1, 2), (2, 1)):
        before = counter.launches()
        tiled(tiles)(q, k, v, True, None, None, None, None)
        assert counter.launches() == before + count


def test_the_default_cuts_long_rows_for_the_device() -> None:
    """Four multiprocessors here, so 16 programs are enough."""
    case = next(case for case in OP.cases() if case.name == "decode 1x8192x32/8x128")
    first, *others = kernels.tilings(case)
    rows, parts = kernels.grid(1, 1, 32, 8, 8192, first)
    assert rows == 8
    assert parts >= 2
    assert len({first, *others}) == 1 + len(others)
    many = next(case for case in OP.cases() if case.name == "decode 64x8192x32/8x128")
    assert (
        kernels.grid(64, 1, 32, 8, 8192, kernels.tilings(many)[0])[1] < 8192 // kernels.tilings(many)[0].keys
    )
