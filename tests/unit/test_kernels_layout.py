"""Tensors as rows: which are taken as they lie, which aren't; what divides strides; results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bakeoff.kernels.layout import alignment, empty_like, row_stride

T = torch.arange(4 * 6 * 8.0).view(4, 6, 8)


@pytest.mark.parametrize(
    ("view", "stride"),
    [
        (T, 8),
        (T[..., :5], 8),
        (T[:, :1], 48),
        (T[:1, :1].expand(4, 6, 8), 0),
        (T[..., :1], 8),
        (T[0, 0, ::2][:1], 1),
        (T[:1, :1, :5], 5),
    ],
    ids=["dense", "strided", "collapsing", "expanded", "one wide", "one value", "one row"],
)
def test_rows_at_one_distance_are_taken_as_they_lie(view: torch.Tensor, stride: int) -> None:
    assert row_stride(view) == stride


@pytest.mark.parametrize(
    "view",
    [T[:, ::2][:, :2], T.transpose(0, 1), T.mT, T[..., ::2], T[0, 0, ::2]],
    ids=["scattered", "transposed leading", "transposed last", "every other", "vector"],
)
def test_other_layouts_have_no_stride(view: torch.Tensor) -> None:
    assert row_stride(view) is None
    assert empty_like(view).is_contiguous()
    assert empty_like(view).shape == view.shape


@pytest.mark.parametrize(
    ("numbers", "power"), [((48, 96), 16), ((0, 32), 16), ((8, 12), 4), ((7,), 1), ((), 16)]
)
def test_alignment(numbers: tuple[int, ...], power: int) -> None:
    assert alignment(*numbers) == power


@given(
    st.permutations(range(3)),
    st.tuples(*[st.builds(slice, st.just(0), st.integers(1, n), st.integers(1, 3)) for n in T.shape]),
)
def test_any_view_is_its_rows(order: list[int], cut: tuple[slice, ...]) -> None:
    view = T[cut].permute(*order)
    stride = row_stride(view)
    width = view.shape[-1]
    if stride is not None:
        rows = view.as_strided((view.numel() // width, width), (stride, 1), view.storage_offset())
        assert torch.equal(rows.reshape(view.shape), view)
