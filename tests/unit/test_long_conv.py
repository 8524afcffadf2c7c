"""long_conv: its definition against the sum term by term, its laws, PyTorch's candidates, bad input."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bakeoff.ops import long_conv
from bakeoff.ops.long_conv.op import OP
from bakeoff.ops.long_conv.reference import fast_length
from bakeoff.ops.long_conv.reference import long_conv as reference
from bakeoff.select import Candidate, Case, TensorMeta
from bakeoff.select.contests.judge import Inaccurate
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.compiled import compiler_missing
from bakeoff.select.declare.key import key

NAMES = ("u", "h", "skip", "gate_in", "gate_out")


def drawn(B: int, T: int, C: int, L: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """u, h, skip and both gates."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, C), (C, L), (C,), (B, T, C), (B, T, C))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def by_term(u: Tensor, h: Tensor, skip: Any, gate_in: Any, gate_out: Any, causal: bool) -> Tensor:
    """The formula of the docstring, as a matrix with every h[|t - s|] in its place."""
    T = u.shape[1]
    v = u if gate_in is None else u * gate_in
    lag = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    reached = (lag.abs() < h.shape[1]) & ((lag >= 0) | (not causal))
    matrix = torch.where(reached, h[:, lag.abs().clamp(max=h.shape[1] - 1)], 0.0)  # [C, T, T]
    y = torch.einsum("cts,bsc->btc", matrix, v)
    if skip is not None:
        y = y + skip * v
    return y if gate_out is None else y * gate_out


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 5), st.integers(1, 50), st.booleans(), st.data())
def test_it_is_the_sum_term_by_term(
    B: int, T: int, C: int, L: int, causal: bool, data: st.DataObject
) -> None:
    """Outputs and every gradient, with any of the options, also with more taps than positions."""
    args = drawn(B, T, C, L)
    args[2:] = [arg if data.draw(st.booleans()) else None for arg in args[2:]]  # type: ignore[misc]
    wanted = [arg for arg in args if arg is not None]
    got, exact = reference(*args, causal), by_term(*args, causal)
    dy = torch.randn_like(exact)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)
    pairs = zip(torch.autograd.grad(got, wanted, dy), torch.autograd.grad(exact, wanted, dy), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_the_reference(causal: bool) -> None:
    assert torch.autograd.gradcheck(lambda *args: reference(*args, causal), drawn(2, 7, 3, 5))
    assert torch.autograd.gradgradcheck(lambda *args: reference(*args, causal), drawn(1, 4, 2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_eager_is_as_exact_as_its_dtype(dtype: torch.dtype) -> None:
    args = drawn(2, 129, 4, 100, dtype)
    exact = reference(*[arg.double() for arg in args])
    got = long_conv(args[0], args[1], skip=args[2], gate_in=args[3], gate_out=args[4], impl="eager")
    assert got.dtype == dtype
    scale = float(exact.detach().abs().max())
    assert float((got.double() - exact).abs().max().detach()) <= 2 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [4, 100])
def test_eager_rounds_the_gradient_of_u_once(dtype: torch.dtype, L: int) -> None:
    """What reaches u through the filter and what does through the skip are added before."""
    u, h, skip, dout, _ = (arg.detach().to(dtype) for arg in drawn(2, 129, 4, L))
    half, wide = u.requires_grad_(), u.detach().double().requires_grad_()
    out, exact = long_conv(half, h, skip=skip, impl="eager"), reference(wide, h.double(), skip.double())
    (got,), (want,) = torch.autograd.grad(out, half, dout), torch.autograd.grad(exact, wide, dout.double())
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_dtypes_may_differ_and_gradients_have_their_own() -> None:
    u, h, skip, *_ = drawn(2, 16, 3, 16, torch.float32)
    half = u.detach().bfloat16().requires_grad_()
    out = long_conv(half, h, skip=skip)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert half.grad is not None
    assert h.grad is not None
    assert (half.grad.dtype, h.grad.dtype) == (torch.bfloat16, torch.float32)


def test_the_future_leaves_the_past_alone() -> None:
    """Up to rounding, which an FFT spreads; the sum term by term leaves it bit for bit."""
    u, h, *_ = drawn(2, 64, 3, 64, torch.float32)
    later = u.detach().clone()
    later[:, 40:] += 100 * torch.randn(2, 24, 3)
    before, after = long_conv(u, h)[:, :40], long_conv(later, h)[:, :40]
    assert float((before - after).abs().max()) < 1e-6 * float(later.abs().max()) * 64**0.5
    assert not torch.allclose(
        long_conv(u, h, causal=False)[:, :40], long_conv(later, h, causal=False)[:, :40]
    )


def test_nothing_wraps_around() -> None:
    """A click at the last position is heard nowhere else, whatever the length."""
    for T in (1, 2, 3, 31, 32, 33, 127, 128):
        u, h, *_ = drawn(1, T, 2, T)
        click = torch.zeros_like(u)
        click[:, -1] = 1
        out = long_conv(click, h)
        torch.testing.assert_close(out[:, :-1], torch.zeros_like(out[:, :-1]), rtol=0, atol=1e-12)
        torch.testing.assert_close(out[0, -1], h[:, 0])


def test_laws() -> None:
    u, h, *_ = (arg.detach() for arg in drawn(1, 50, 3, 50))
    other = torch.randn_like(u)
    both = long_conv(2 * u + other, h)
    torch.testing.assert_close(both, 2 * long_conv(u, h) + long_conv(other, h))
    shifted = torch.nn.functional.pad(u, (0, 0, 5, 0))[:, :50]
    torch.testing.assert_close(long_conv(shifted, h)[:, 5:], long_conv(u, h)[:, :45])
    torch.testing.assert_close(long_conv(u, h, causal=False).flip(1), long_conv(u.flip(1), h, causal=False))
    one = torch.zeros_like(h)
    one[:, 0] = 1
    torch.testing.assert_close(long_conv(u, one), u)
    torch.testing.assert_close(long_conv(u, one, skip=torch.full((3,), 2.0, dtype=u.dtype)), 3 * u)


def test_any_strides() -> None:
    u, h, *_ = (arg.detach() for arg in drawn(2, 30, 4, 20))
    exact = long_conv(u, h)
    major = u.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.randn(2, 30, 8, dtype=u.dtype)[..., ::2].copy_(u)
    for view in (major, wide):
        assert not view.is_contiguous()
        torch.testing.assert_close(long_conv(view, h), exact)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("B", "T", "C"), [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_do_gives_every_argument_a_gradient_of_zeros(B: int, T: int, C: int, gated: bool) -> None:
    args = drawn(B, T, C, 4)[: 5 if gated else 2]
    for out in (long_conv(*args[:2], **dict(zip(NAMES[2:], args[2:], strict=False))), reference(*args)):
        assert out.shape == (B, T, C)
        for gradient, arg in zip(torch.autograd.grad(out.sum(), args), args, strict=True):
            assert gradient.shape == arg.shape
            assert not gradient.any()


def test_tensors_without_data() -> None:
    out = long_conv(*[arg.detach().to("meta") for arg in drawn(2, 5, 3, 4)[:2]])
    assert (out.shape, out.device.type) == ((2, 5, 3), "meta")


@pytest.mark.parametrize("causal", [True, False])
def test_torch_compile_leaves_the_length_open(causal: bool) -> None:
    """One graph for the first length and one per range of lengths, not one per length: after eight
    torch.compile gives up."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def call(*args: Tensor) -> Tensor:
        kept = dict(zip(NAMES[2:], args[2:], strict=True))
        return long_conv(*args[:2], **kept, causal=causal, impl="eager")

    torch._dynamo.reset()
    for T in (4, 9, 33, 50, 63, 65, 90, 100, 110, 127, 1100):
        args = [arg.detach() for arg in drawn(1, T, 2, 60)]
        torch.testing.assert_close(call(*args), by_term(*args, causal), rtol=1e-11, atol=1e-11)
    assert len(graphs) <= 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [1, 20])
@pytest.mark.parametrize("taps", [4, 20])
def test_torch_jit_trace_leaves_the_length_open(causal: bool, first: int, taps: int) -> None:
    def call(*args: Tensor) -> Tensor:
        return long_conv(*args[:2], **dict(zip(NAMES[2:], args[2:], strict=True)), causal=causal)

    traced = torch.jit.trace(call, tuple(drawn(1, first, 2, taps)))
    for T in (1, 2, 9, 33, 300):
        args = drawn(1, T, 2, taps)
        torch.testing.assert_close(traced(*args), by_term(*args, causal), rtol=1e-11, atol=1e-11)


def test_compiled_agrees() -> None:
    case = OP.case([*drawn(1, 8, 2, 8, torch.float32), True])
    if compiler_missing(case):
        pytest.skip(str(compiler_missing(case)))
    args = drawn(2, 40, 3, 40, torch.float32)
    kept = {"skip": args[2], "gate_in": args[3], "gate_out": args[4]}
    eager, compiled = (long_conv(*args[:2], **kept, impl=impl) for impl in ("eager", "compiled"))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_fast_lengths() -> None:
    for least in (*range(1, 300), 65_535, 131_071, 1_000_003):
        n = fast_length(least)
        assert least <= n <= max(2, 1.25 * least + 1)
        assert n % 2 == 0
        for prime in (2, 3, 5):
            while n % prime == 0:
                n //= prime
        assert n == 1


def test_layouts_have_keys_of_their_own_and_a_spanning_filter_stays_one() -> None:
    def case(T: int, L: int, stride: tuple[int, int, int]) -> Case:
        args: dict[str, Any] = dict.fromkeys(NAMES)
        args["u"] = TensorMeta((4, T, 8), torch.float32, stride)
        args["h"] = TensorMeta.dense((8, L), torch.float32)
        return Case({**args, "causal": True}, "cpu")

    last, major = case(1000, 1000, (8000, 8, 1)), case(1000, 1000, (8000, 1, 1000))
    assert key(OP, last, "eager") != key(OP, major, "eager")
    assert OP.bucket(major).u.stride == (8192, 1, 1024)
    assert OP.bucket(last).h.shape == OP.bucket(case(1001, 1001, (8008, 8, 1))).h.shape == (8, 1024)
    assert OP.bucket(case(1000, 77, (8000, 8, 1))).h.shape == (8, 77)


U, H = torch.randn(2, 6, 3), torch.randn(3, 6)


@pytest.mark.parametrize(
    ("args", "kept", "error", "message"),
    [
        ((U[0], H), {}, ValueError, r"expected \[B, T, C\]; one sequence is u\[None\]"),
        ((U, H.t()), {}, ValueError, r"h has shape .*, expected \[C, L\] with C = 3 as of u"),
        ((U, H[:, :0]), {}, ValueError, r"h has shape \(3, 0\), expected .* L >= 1"),
        ((U, H), {"skip": torch.randn(4)}, ValueError, r"skip has shape \(4,\), expected \[C\] with C = 3"),
        ((U, H), {"gate_in": U[:, :5]}, ValueError, "gate_in has shape .*, expected u's"),
        ((U, H), {"gate_out": U[:1]}, ValueError, "gate_out has shape"),
        ((U.long(), H), {}, TypeError, r"u is torch.int64; convert it"),
        ((U, H.to(torch.complex64)), {}, TypeError, "h is torch.complex64"),
        ((U, H), {"skip": 1.0}, TypeError, "skip must be a tensor, got 1.0"),
        ((U.to(torch.float8_e5m2), H), {}, TypeError, "u is torch.float8_e5m2; .* of at least 16 bits"),
        ((U, H.to(torch.float8_e4m3fn)), {}, TypeError, "h is torch.float8_e4m3fn"),
        ((U, H), {"causal": 1}, TypeError, "causal is 1, expected True or False"),
        ((U, H), {"causal": torch.ones(())}, TypeError, "causal is a tensor, expected True or False"),
        ((U, H.to("meta")), {}, ValueError, "all tensors must be on one device"),
    ],
)
def test_bad_input_names_the_fix(args: Any, kept: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        long_conv(*args, **kept)


def dft(n: int) -> Tensor:
    k = torch.arange(n, dtype=torch.float64)
    return torch.polar(torch.ones(n, n, dtype=torch.float64), -2 * math.pi / n * k * k[:, None])


def by_matrices(round_to: torch.dtype) -> Any:
    """A convolution by DFTs as products of matrices (32 x 64 points), each operand rounded to `round_to`."""

    def rounded(z: Tensor) -> Tensor:
        parts = torch.view_as_real(z).to(round_to).double()
        return torch.view_as_complex(parts.contiguous())

    def convolved(u: Tensor, h: Tensor, *_: Any) -> Tensor:
        B, T, C = u.shape
        n, m = 32, 64
        assert n * m >= 2 * T
        scale = u.detach().abs().amax(1, keepdim=True).clamp(min=1e-30).log2().floor().exp2()
        z = F.pad((u / scale).double().transpose(1, 2), (0, n * m - T)).view(B, C, n, m)
        spectrum = torch.fft.fft(h.double(), n * m).view(C, m, n).transpose(1, 2)
        size = spectrum.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
        steps = torch.outer(torch.arange(n), torch.arange(m)).double()
        turn = torch.polar(torch.ones_like(steps), -2 * math.pi / (n * m) * steps)
        outer, inner = rounded(dft(n)), rounded(dft(m))
        z = rounded(outer @ rounded(z + 0j) * turn / n**0.5) @ inner / m**0.5
        z = rounded(rounded(z * (spectrum / size)) @ inner.conj() * turn.conj() / m**0.5)
        y = (outer.conj() @ z).real.reshape(B, C, n * m)[..., :T] / n**0.5
        return ((y * size[None, :, :, 0]).transpose(1, 2) * scale).to(u.dtype)

    return convolved


def test_half_precision_dfts_are_too_coarse_for_quiet_beginnings() -> None:
    """Why there is no such candidate: what is loud later drowns what was quiet before, in float16 (however it
    is scaled) as in bfloat16; in float32 it does not."""
    meta = TensorMeta.dense((4, 1024, 64), torch.bfloat16)
    h = TensorMeta.dense((64, 1024), torch.bfloat16)
    args = {"u": meta, "h": h, "skip": None, "gate_in": None, "gate_out": None, "causal": True}
    sticks = list(yardsticks(OP, Case(args, "cpu")))
    verify(OP, Candidate("single", by_matrices(torch.float32)), sticks)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(Inaccurate, match=r"max error .* at \[\d, 0, \d+\]"):
            verify(OP, Candidate("half", by_matrices(dtype)), sticks[1:])
