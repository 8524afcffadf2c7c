"""Tensors as rows: which are taken as they lie, which are copied."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bakeoff.layout import rows_of

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
    same, between = rows_of(view)
    assert same is view
    assert between == stride


@pytest.mark.parametrize(
    "view",
    [T[:, ::2][:, :2], T.transpose(0, 1), T.mT, T[..., ::2], T[0, 0, ::2]],
    ids=["scattered", "transposed leading", "transposed last", "every other", "vector"],
)
def test_other_layouts_are_copied(view: torch.Tensor) -> None:
    dense, between = rows_of(view)
    assert dense.is_contiguous()
    assert torch.equal(dense, view)
    assert between == view.shape[-1]


@given(
    st.permutations(range(3)),
    st.tuples(*[st.builds(slice, st.just(0), st.integers(1, n), st.integers(1, 3)) for n in T.shape]),
)
def test_any_view_is_its_rows(order: list[int], cut: tuple[slice, ...]) -> None:
    view = T[cut].permute(*order)
    found, stride = rows_of(view)
    width = view.shape[-1]
    rows = found.as_strided((view.numel() // width, width), (stride, 1), found.storage_offset())
    assert torch.equal(rows.reshape(view.shape), view)
