"""The Triton candidate of rotary, interpreted, against the float64 reference; the op's laws and checks."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.rotary import kernels as rotary_kernels
from bakeoff.ops.rotary import rotary_tables
from bakeoff.ops.rotary.plain import eager
from bakeoff.ops.rotary.reference import reference
from bakeoff.ops.rotary.triton import rotary as candidate
from bakeoff.select.contests.poison import Poison
from tests.interp.rotary_inputs import FORMS, tensors

# Unit roundoff of the result, times the two roundings of a float32 product sum.
BOUND = {torch.float32: 3e-7, torch.float16: 6e-4}


launched = candidate
"""The candidate with the tiling that a test asks for."""


def triton_rotary(*args):
    """The op as the test launches it."""
    return launched(*args)


def tiles_of(size):
    """The op in tiles of so many bytes."""
    return candidate.bind(f"forward(tile={size},heads=64,access=16)")


@pytest.fixture(params=[4096, 64], ids=["tile4096", "tile64"])
def tile(request, monkeypatch):
    """Production tiles, and tiny ones, so that every axis has more than one."""
    monkeypatch.setattr(f"{__name__}.launched", tiles_of(request.param))


def exact(q, k, cos, sin, interleaved=False, position_ids=None, *, dq=None, dk=None):
    """Results and gradients of the reference in float64."""
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    outputs = reference(*wide, cos.double(), sin.double(), interleaved, position_ids)
    return (*outputs, *torch.autograd.grad(outputs, wide, (dq.double(), dk.double())))


def assert_equals(got, want):
    for mine, truth in zip(got, want, strict=True):
        assert mine.shape == truth.shape
        torch.testing.assert_close(mine.double(), truth, rtol=0, atol=BOUND[mine.dtype] * _size(truth))


def _size(truth):
    finite = truth[truth.isfinite()]
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


def assert_native(q, k, cos, sin, interleaved=False, ids=None, *, dq=None, dk=None, fn=triton_rotary):
    """Forward and gradients agree with float64, inputs stay as they were, and no fence is broken."""
    dq = torch.randn(q.shape).to(q.dtype) if dq is None else dq
    dk = torch.randn(k.shape).to(k.dtype) if dk is None else dk
    before = [t.detach().clone() for t in (q, k, cos, sin, dq, dk)]
    with Poison() as poison:
        outputs = fn(q, k, cos, sin, interleaved, ids)
        gradients = torch.autograd.grad(outputs, (q, k), (dq, dk))
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, cos, sin, dq, dk), strict=True))
    assert_equals((*outputs, *gradients), exact(q, k, cos, sin, interleaved, ids, dq=dq, dk=dk))
    return outputs, gradients


SHAPES = [
    (2, 5, 4, 2, 16, 16),
    (1, 17, 3, 1, 10, 6),
    (1, 3, 4, 4, 48, 48),
    (3, 1, 6, 2, 9, 8),
    (1, 33, 1, 1, 2, 2),
]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(shape, interleaved):
    B, T, H, HK, D, R = shape
    for dtype, ids in itertools.product((torch.float32, torch.float16), (None, 1, 2)):
        q, k = tensors(B, T, H, HK, D, dtype=dtype)
        rows = T + 3
        cos, sin = rotary_tables(rows, R)
        position_ids = torch.randint(rows, (T,) if ids == 1 else (B, T)) if ids else None
        assert_native(q, k, cos, sin, interleaved, position_ids)


def test_small_tiles_really_are_several():
    tiling = rotary_kernels.Tiling(64, 64, 16)
    block_t, block_h, *_ = rotary_kernels.blocks(17, 6, 2, 10, 3, 4, False, tiling)
    assert block_t < 17
    assert block_h == 2


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_layouts_of_inputs(form, interleaved):
    q, k = tensors(2, 6, 4, 2, 16, form=form)
    cos, sin = rotary_tables(6, 12)
    outputs, gradients = assert_native(q, k, cos, sin, interleaved)
    for result in (*outputs, *gradients):
        assert (result.transpose(1, 2) if form == "head-major" else result).is_contiguous()


@pytest.mark.parametrize("kind", ["expanded", "head-major", "one value", "sliced", "last strided"])
def test_layouts_of_incoming_gradients(kind):
    q, k = tensors(2, 5, 4, 2, 8)
    make = {
        "expanded": lambda x: torch.randn(1, x.shape[1], 1, x.shape[3]).expand(x.shape),
        "head-major": lambda x: torch.randn(x.transpose(1, 2).shape).transpose(1, 2),
        "one value": lambda x: torch.ones(()).expand(x.shape),
        "sliced": lambda x: torch.randn(*x.shape[:3], 24)[..., 3:11],
        "last strided": lambda x: torch.randn(x.transpose(2, 3).shape).transpose(2, 3),
    }[kind]
    cos, sin = rotary_tables(5, 8)
    _, gradients = assert_native(q, k, cos, sin, dq=make(q), dk=make(k))
    assert all(g.is_contiguous() for g in gradients)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("fn", [triton_rotary, eager])
def test_inputs_that_begin_anywhere(fn, interleaved):
    """A view may begin at an odd place, and a dimension of size 1 may have any stride."""
    q = torch.randn(121)[1:].view(1, 5, 3, 8).requires_grad_()
    assert_native(q, torch.randn(1, 5, 1, 8, requires_grad=True), *rotary_tables(5, 8), interleaved, fn=fn)
    q, k, _ = torch.randn(1, 1, 1, 27).unflatten(-1, (3, 9)).unbind(-2)
    assert_native(q.requires_grad_(), k.requires_grad_(), *rotary_tables(1, 8), interleaved, fn=fn)


def test_mixed_layouts_of_q_and_k():
    (q, _), (_, k) = tensors(2, 5, 4, 2, 8, form="head-major"), tensors(2, 5, 4, 2, 8, form="fused")
    outputs, _ = assert_native(q, k, *rotary_tables(5, 8))
    assert outputs[0].transpose(1, 2).is_contiguous()
    assert outputs[1].is_contiguous()


@pytest.mark.parametrize("form", ["joint", "every other row", "transposed", "narrow", "one strided"])
def test_layouts_and_dtypes_of_tables(form):
    q, k = tensors(1, 5, 2, 1, 8)
    cos, sin = rotary_tables(10, 8)
    if form == "joint":
        cos, sin = torch.cat((cos, sin), -1).split(4, -1)
    elif form == "every other row":
        cos, sin = cos[::2], sin[::2]
    elif form == "transposed":
        cos, sin = cos.t().contiguous().t(), sin.t().contiguous().t()
    elif form == "narrow":
        cos, sin = cos.half(), sin.half()
    else:
        sin = torch.cat((sin, sin), -1)[:, :4]
    assert_native(q, k, cos, sin)


def test_int32_ids_and_ids_that_are_not_dense():
    q, k = tensors(2, 5, 2, 1, 8)
    cos, sin = rotary_tables(40, 8)
    assert_native(q, k, cos, sin, False, torch.randint(40, (2, 5), dtype=torch.int32))
    assert_native(q, k, cos, sin, False, torch.randint(40, (5, 2)).t())
    assert_native(q, k, cos, sin, False, torch.randint(40, (1, 5)).expand(2, 5))


@pytest.mark.parametrize("fn", [triton_rotary, eager, reference])
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_id_outside_the_table_gives_nan_there_alone(fn, interleaved):
    q, k = tensors(1, 5, 2, 1, 10)
    cos, sin = rotary_tables(7, 8)
    ids = torch.tensor([3, 7, -1, 6, 1 << 40])
    out, _ = fn(q, k, cos, sin, interleaved, ids)
    good = torch.tensor([True, False, False, True, False])
    assert out[:, ~good, :, :8].isnan().all()
    assert torch.equal(out[..., 8:], q[..., 8:])
    want, _ = reference(q[:, good], k[:, good], cos, sin, interleaved, ids[good])
    torch.testing.assert_close(out[:, good], want)


@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 2, 8), (2, 0, 2, 2, 8), (1, 3, 0, 2, 8), (1, 3, 2, 0, 8), (1, 3, 0, 0, 8)]
)
def test_empty_tensors(shape):
    B, T, H, HK, D = shape
    q, k = tensors(B, T, H, HK, D)
    cos, sin = rotary_tables(3, 8)
    for fn in (triton_rotary, eager):
        outputs = fn(q, k, cos, sin, False, None)
        gradients = torch.autograd.grad(outputs, (q, k), (torch.ones_like(q), torch.ones_like(k)))
        assert [t.shape for t in outputs] == [t.shape for t in gradients] == [q.shape, k.shape]


@pytest.mark.parametrize("used", ["q", "k", "neither q nor k wants it"])
def test_only_what_is_needed_is_computed(used, monkeypatch):
    q, k = tensors(2, 3, 4, 2, 8)
    cos, sin = rotary_tables(3, 8)
    if used == "neither q nor k wants it":
        outputs = triton_rotary(q.detach(), k.detach(), cos, sin, False, None)
        assert not any(t.requires_grad for t in outputs)
        return
    index = "qk".index(used)
    heads = []
    launch = TritonKernel.__call__

    def noted(kernel, grid, **named):
        heads.append((named["H"], named["HK"]))
        return launch(kernel, grid, **named)

    monkeypatch.setattr(TritonKernel, "__call__", noted)
    # One output unused: its gradient is None, and its heads are not visited in backward.
    out = triton_rotary(q, k, cos, sin, False, None)[index]
    dy = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k), dy, allow_unused=True)
    assert grads[1 - index] is None
    want = exact(
        q, k, cos, sin, dq=dy if index == 0 else torch.zeros_like(q), dk=dy if index else torch.zeros_like(k)
    )
    assert_equals([grads[index]], [want[2 + index]])
    assert heads == [(4, 2), (4, 0) if index == 0 else (0, 2)]
    # One input without requires_grad.
    frozen = [q, k]
    frozen[1 - index] = frozen[1 - index].detach()
    outputs = triton_rotary(*frozen, cos, sin, False, None)
    (grad,) = torch.autograd.grad(outputs, frozen[index], (torch.randn_like(q), torch.randn_like(k)))
    assert heads[-1] == ((4, 0) if index == 0 else (0, 2))
    assert grad.shape == frozen[index].shape


def test_second_derivatives_are_the_forward_again():
    q, k = tensors(2, 3, 4, 2, 8)
    cos, sin = rotary_tables(3, 6)
    dq, dk = torch.randn_like(q).requires_grad_(), torch.randn_like(k).requires_grad_()
    gq, gk = torch.autograd.grad(
        triton_rotary(q, k, cos, sin, True, None), (q, k), (dq, dk), create_graph=True
    )
    uq, uk = torch.randn_like(q), torch.randn_like(k)
    again = torch.autograd.grad((gq, gk), (dq, dk), (uq, uk))
    assert_equals(again, exact(uq, uk, cos, sin, True, dq=dq.detach(), dk=dk.detach())[:2])


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 9),
    H=st.integers(1, 6),
    HK=st.integers(1, 4),
    D=st.integers(2, 21),
    half=st.integers(1, 10),
    form=st.sampled_from(FORMS),
    interleaved=st.booleans(),
    ids=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    tile=st.sampled_from([1, 64, 256, 4096]),
)
def test_any_shape_and_stride(B, T, H, HK, D, half, form, interleaved, ids, dtype, tile):
    q, k = tensors(B, T, H, HK, D, dtype=dtype, form=form)
    cos, sin = rotary_tables(T + 2, 2 * min(half, D // 2))
    position_ids = torch.randint(T + 2, (T,) if ids == 1 else (B, T)) if ids else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.launched", tiles_of(tile))
        assert_native(q, k, cos, sin, interleaved, position_ids)


# The op's laws, of every implementation that runs here.

IMPLEMENTATIONS = pytest.mark.parametrize("fn", [triton_rotary, eager, reference])


@IMPLEMENTATIONS
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_rotation_matrices(fn, interleaved):
    """An independent formulation: a block-diagonal matrix of 2x2 rotations for every position."""
    q, k = tensors(2, 4, 3, 1, 10)
    cos, sin = rotary_tables(4, 8)
    outputs = fn(q, k, cos, sin, interleaved, None)
    for t in range(4):
        matrix = torch.eye(10)
        for i in range(4):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            angle = t * 10000.0 ** (-2 * i / 8)
            matrix[a, a] = matrix[b, b] = math.cos(angle)
            matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
        for x, y in zip((q, k), outputs, strict=True):
            torch.testing.assert_close(y[:, t], x[:, t] @ matrix.T)


@IMPLEMENTATIONS
def test_norms_are_kept_and_the_opposite_angle_undoes(fn):
    q, k = tensors(2, 6, 3, 1, 16)
    cos, sin = rotary_tables(6, 16)
    turned = fn(q, k, cos, sin, False, None)
    torch.testing.assert_close(turned[0].norm(dim=-1), q.norm(dim=-1))
    back = fn(*turned, cos, -sin, False, None)
    torch.testing.assert_close(back, (q, k))


@IMPLEMENTATIONS
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(fn, interleaved):
    q, k = torch.randn(16).expand(1, 12, 1, 16), torch.randn(16).expand(1, 12, 1, 16)
    q, k = (x[0, :, 0] for x in fn(q, k, *rotary_tables(12, 16), interleaved, None))
    scores = q @ k.T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert scores[0].std() > 0.1


@IMPLEMENTATIONS
def test_heads_are_interchangeable_and_positions_are_not(fn):
    """A published version turns by the head's index: then its model can't tell the order of the past."""
    q, k = tensors(2, 6, 4, 4, 8)
    cos, sin = rotary_tables(6, 8)
    turned, _ = fn(q, k, cos, sin, False, None)
    heads, times = torch.tensor([2, 0, 3, 1]), torch.tensor([3, 0, 1, 2, 5, 4])
    assert torch.equal(fn(q[:, :, heads], k, cos, sin, False, None)[0], turned[:, :, heads])
    moved, _ = fn(q[:, times], k, cos, sin, False, None)
    assert (moved - turned[:, times]).abs().amax(-1).min() > 1e-3
    alike = torch.randn(1, 1, 1, 8).expand(1, 6, 4, 8)
    out, _ = fn(alike, alike, cos, sin, False, None)
    assert torch.equal(out, out[:, :, :1].expand_as(out))
    assert all(not torch.equal(out[0, s, 0], out[0, t, 0]) for s, t in itertools.combinations(range(6), 2))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_dimensions_from_R_on_pass_bit_for_bit(dtype, interleaved):
    q, k = tensors(2, 3, 4, 2, 11, dtype=dtype)
    cos, sin = rotary_tables(3, 6)
    for fn in (eager, reference, *([] if dtype == torch.float64 else [triton_rotary])):
        for x, y in zip((q, k), fn(q, k, cos, sin, interleaved, None), strict=True):
            assert y.dtype == dtype
            assert torch.equal(y[..., 6:], x[..., 6:])
            assert not torch.equal(y[:, 1:, :, :6], x[:, 1:, :, :6])


@IMPLEMENTATIONS
def test_position_ids_are_a_gather(fn):
    q, k = tensors(2, 5, 4, 2, 8)
    cos, sin = rotary_tables(50, 8)
    ids = torch.randint(50, (2, 5))
    for b in range(2):
        want = fn(q[b : b + 1], k[b : b + 1], cos[ids[b]], sin[ids[b]], False, None)
        assert torch.equal(fn(q, k, cos, sin, False, ids)[0][b : b + 1], want[0])
        assert torch.equal(fn(q[b : b + 1], k[b : b + 1], cos, sin, False, ids[b])[1], want[1])


@IMPLEMENTATIONS
def test_a_longer_table_serves_a_shorter_sequence(fn):
    q, k = tensors(2, 5, 4, 2, 8)
    cos, sin = rotary_tables(50, 8)
    assert torch.equal(fn(q, k, cos, sin, False, None)[0], fn(q, k, cos[:5], sin[:5], False, None)[0])
