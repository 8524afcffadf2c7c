"""The Triton candidates of long_conv, interpreted, against the float64 reference; the op's laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.ops.long_conv import OP, long_conv
from bakeoff.ops.long_conv.rows import rows, unpack
from bakeoff.ops.long_conv.reference import long_conv as reference
from bakeoff.select.poison import Poison
from bakeoff.select.verify import verify, yardsticks

toeplitz = OP.by_name["toeplitz"]
# Relative to the largest element: roundings of operands and of the result.
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}
GATED, PLAIN = (True, True, True), (False, False, False)


def tensors(B, T, C, L, dtype=torch.float32, optional=GATED, major=False, wide_filter=True):
    """Leaves: u, h, skip, gate_in, gate_out, the last three where `optional` says so."""

    def like_u():
        x = torch.randn(B, C, T).transpose(1, 2) if major else torch.randn(B, T, C)
        return x.to(dtype).requires_grad_()

    kind = torch.float32 if wide_filter else dtype
    h = (torch.randn(C, L) / L**0.5).to(kind).requires_grad_()
    skip = torch.randn(C).to(kind).requires_grad_() if optional[0] else None
    gates = [like_u() if wanted else None for wanted in optional[1:]]
    return [like_u(), h, skip, *gates]


def widened(args):
    return [None if a is None else a.detach().double().requires_grad_() for a in args]


def step(fn, args, dout):
    out = fn(*args, True)
    leaves = [a for a in args if a is not None]
    return (out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def check(args, dout=None, fn=toeplitz.call):
    out_like = args[0]
    dout = torch.randn(out_like.shape).to(out_like.dtype) if dout is None else dout
    with Poison() as poison:
        got = step(fn, args, dout)
    assert not poison.broken()
    want = step(reference, widened(args), dout)
    bound = BOUND[out_like.dtype]
    for mine, exact in zip(got, want, strict=True):
        assert mine.isfinite().all()
        scale = exact.abs().max().clamp(min=1e-30)
        assert (mine.double() - exact).abs().max() <= bound * scale


SHAPES = [(2, 1, 3, 1), (3, 5, 1, 3), (2, 127, 2, 127), (1, 128, 3, 128), (2, 129, 2, 7), (2, 300, 2, 300)]


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gradient(shape, major):
    check(tensors(*shape, major=major))


@pytest.mark.parametrize("optional", [PLAIN, (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
def test_every_form(optional, major):
    check(tensors(2, 256, 2, 130, optional=optional, major=major))


@pytest.mark.parametrize("wide_filter", [True, False])
def test_half_precision(wide_filter):
    check(tensors(3, 260, 3, 260, torch.float16, wide_filter=wide_filter))


def test_more_taps_than_positions():
    args = tensors(2, 20, 3, 300)
    check(args)
    dh = step(toeplitz.call, args, torch.ones(2, 20, 3))[2]
    assert not dh[:, 20:].any()


def test_more_columns_than_a_tile():
    check(tensors(40, 257, 1, 200, optional=PLAIN))


def test_gradients_that_are_expanded_or_transposed():
    args = tensors(2, 130, 3, 50)
    check(args, torch.randn(3).expand(2, 130, 3))
    check(args, torch.randn(2, 3, 130).transpose(1, 2))
    check(args, torch.randn(130, 3, 2).permute(2, 0, 1))


def test_inputs_of_any_strides():
    u = torch.randn(130, 6, 2).permute(2, 0, 1)[..., ::2].requires_grad_()
    h = torch.randn(50, 3).t().requires_grad_()
    check([u, h, None, u.detach().clone().requires_grad_(), None])


@settings(max_examples=12, deadline=None)
@given(
    B=st.integers(1, 5), T=st.integers(1, 280), C=st.integers(1, 4), L=st.integers(1, 300),
    optional=st.tuples(st.booleans(), st.booleans(), st.booleans()), major=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_shapes(B, T, C, L, optional, major, dtype):
    check(tensors(B, T, C, L, dtype, optional, major))


def test_only_the_gradients_that_are_wanted():
    args = tensors(2, 130, 3, 50)
    for wanted in range(5):
        leaves = [a.detach().requires_grad_(i == wanted) for i, a in enumerate(args)]
        out = toeplitz.call(*leaves, True)
        (mine,) = torch.autograd.grad(out.sum(), leaves[wanted])
        (exact,) = torch.autograd.grad(reference(*args, True).sum(), args[wanted])
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_the_future_leaves_the_past_bit_equal():
    u, h, *_ = tensors(2, 300, 2, 300, torch.float16, PLAIN)
    later = u.detach().clone()
    later[:, 170:] = 1000.0
    before, after = (toeplitz.call(x, h, None, None, None, True)[:, :170] for x in (u, later))
    assert torch.equal(before, after)


def test_an_impulse_returns_the_filter():
    h = torch.randn(3, 200)
    click = torch.zeros(1, 200, 3)
    click[0, 0] = 1.0
    assert torch.equal(toeplitz.call(click, h, None, None, None, True)[0], h.t())


def test_repeats_itself_bit_for_bit():
    args = tensors(2, 260, 3, 260, torch.float16)
    dout = torch.randn(2, 260, 3).half()
    for first, second in zip(step(toeplitz.call, args, dout), step(toeplitz.call, args, dout), strict=True):
        assert torch.equal(first, second)


def test_what_is_not_finite_stays_in_its_channel_and_out_of_earlier_blocks():
    u, h, *_ = tensors(1, 300, 2, 20, optional=PLAIN)
    u = u.detach().clone()
    u[0, 200, 0] = float("nan")
    out = toeplitz.call(u, h, None, None, None, True)
    assert out[0, :128].isfinite().all()
    assert out[0, 200, 0].isnan()
    assert out[..., 1].isfinite().all()


def test_packing_and_unpacking_are_inverse():
    for x in (torch.randn(3, 70, 5), torch.randn(3, 5, 70).transpose(1, 2), torch.randn(2, 128, 1)):
        packed = rows(x)
        assert torch.equal(packed[:, :, : x.shape[1]], x.transpose(1, 2))
        assert not packed[:, :, x.shape[1] :].any()
        back, second = unpack(packed, x, other=x, both=True)
        assert torch.equal(back, x)
        assert torch.equal(second, x * x)
        assert back.stride() == x.stride()


def test_rows_are_not_copied():
    x = torch.randn(2, 3, 256).transpose(1, 2)
    assert rows(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "args",
    [
        tensors(9, 256, 8, 256, torch.float16, PLAIN, major=True, wide_filter=False),
        tensors(9, 256, 8, 256, torch.float16, PLAIN),
        tensors(9, 140, 8, 50),
    ],
    ids=["major", "wide filter", "gated float32"],
)
def test_passes_the_contest_verification(args):
    """Against eager's own error, on ordinary and hostile inputs."""
    case = OP.case([*args, True])
    _, deterministic = verify(OP, toeplitz, list(yardsticks(OP, case)))
    assert deterministic


def test_says_what_it_can_not_do():
    u, h = torch.randn(1, 8, 2), torch.randn(2, 3)
    with pytest.raises(Unsupported, match="only causal filters"):
        long_conv(u, h, causal=False, impl="toeplitz")
    with pytest.raises(Unsupported, match="no float64"):
        long_conv(u.double(), h, impl="toeplitz")
    with pytest.raises(Unsupported, match="gates must have u's dtype"):
        long_conv(u.half(), h, gate_in=u, impl="toeplitz")


def test_differentiating_twice_is_refused():
    args = tensors(1, 9, 2, 4)
    out = toeplitz.call(*args, True)
    (du,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        du.sum().backward()
