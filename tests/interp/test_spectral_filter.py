"""spectral_filter against a transform written out as a matrix; gradients, laws, checks; its CUDA emulated."""

import doctest
import math

import pytest
import torch

from bakeoff.errors import Unsupported
from bakeoff.fft_conv import launch
from bakeoff.fft_conv.plans import FFTPlan, choose
from bakeoff.kernels import counter
from bakeoff.kernels.variants import text
from bakeoff.ops.spectral_filter import OP, spectral_filter
from bakeoff.ops.spectral_filter.plain import eager
from bakeoff.ops.spectral_filter.reference import spectral_filter as reference
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at
from tests.interp.emulated import emulate, replays

FORMS = pytest.mark.parametrize("fn", [reference, eager])
SIZES = pytest.mark.parametrize(("T", "K"), [(1, 1), (2, 2), (7, 4), (8, 5), (8, 3), (9, 0), (13, 7)])


def tensors(B, T, C, K, dtype=torch.float64):
    x = torch.randn(B, T, C, dtype=dtype, requires_grad=True)
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    return x, torch.randn(K, C, dtype=wide, requires_grad=True)


def written_out(x, weight):
    """sum over frequencies of the real signal's series, as matrices of cos and sin."""
    T, K = x.shape[1], weight.shape[0]
    f = torch.arange(T // 2 + 1, dtype=torch.float64)
    t = torch.arange(T, dtype=torch.float64)
    turn = torch.exp(-2j * math.pi * f[:, None] * t / T)
    spectrum = torch.einsum("ft,btc->bfc", turn, x.to(torch.complex128))
    every = torch.cat((weight, torch.ones(T // 2 + 1 - K, x.shape[2], dtype=weight.dtype)))
    double = torch.full((T // 2 + 1,), 2.0, dtype=torch.float64)
    double[0] = 1
    if T % 2 == 0:
        double[-1] = 1
    return torch.einsum("ft,bfc->btc", double[:, None] * turn.conj(), spectrum * every).real / T


@FORMS
@SIZES
def test_equals_the_series_written_out(fn, T, K):
    x, weight = tensors(2, T, 3, K)
    dy = torch.randn_like(x)
    got, want = fn(x, weight), written_out(x, weight)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (x, weight), dy), torch.autograd.grad(want, (x, weight), dy), strict=True
    ):
        torch.testing.assert_close(a, b)


@FORMS
@SIZES
def test_gradcheck(fn, T, K):
    assert torch.autograd.gradcheck(fn, tensors(2, T, 2, K))


@FORMS
@pytest.mark.parametrize("T", [1, 6, 7])
def test_real_frequencies_ignore_the_imaginary_part(fn, T):
    x, weight = tensors(2, T, 3, T // 2 + 1)
    real = [0] + ([T // 2] if T % 2 == 0 else [])
    turned = weight.detach().clone()
    turned[real] += 5j
    torch.testing.assert_close(fn(x, turned), fn(x, weight))
    (gradient,) = torch.autograd.grad(fn(x, weight), weight, torch.randn_like(x))
    assert gradient[real].imag.abs().max() < 1e-14
    assert gradient[real].real.abs().min() > 0


@FORMS
def test_one_is_the_identity_and_filters_compose(fn):
    x, weight = tensors(2, 12, 3, 5)
    torch.testing.assert_close(fn(x, torch.ones_like(weight)), x)
    torch.testing.assert_close(fn(x, weight[:0]), x)
    other = torch.randn_like(weight)
    other.data[0].imag = weight.data[0].imag = 0
    torch.testing.assert_close(fn(fn(x, weight), other), fn(x, weight * other))


@FORMS
def test_circular_shifts_commute_so_it_is_not_causal(fn):
    x, weight = tensors(1, 9, 2, 5)
    torch.testing.assert_close(fn(x.roll(4, 1), weight), fn(x, weight).roll(4, 1))
    changed = x.detach().clone()
    changed[:, -1] += 1
    assert ((fn(changed, weight) - fn(x, weight))[:, 0].abs() > 1e-6).all()


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32(fn, dtype):
    x, weight = tensors(2, 10, 3, 6, torch.float32)
    x = x.detach().to(dtype)
    y = fn(x, weight)
    assert y.dtype == dtype
    want = written_out(x.double(), weight.to(torch.complex128))
    assert (y.double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()


@pytest.fixture
def on_chip(monkeypatch):
    """Makes the candidate with kernels run here, on a GPU with so many bytes of shared memory a block."""

    def choose(shared=227 << 10):
        emulate(monkeypatch, shared)
        return OP.by_name["fft"]

    return choose


def check_on_chip(candidate, x, weight, bound):
    """The result and both gradients, relative to the largest element."""
    dy = torch.randn(x.shape).to(x.dtype)
    with Poison() as poison:
        y = candidate.implementation(x, weight)
        got = (y, *torch.autograd.grad(y, (x, weight), dy))
    assert not poison.broken()
    exact = [x.detach().double().requires_grad_(), weight.detach().to(torch.complex128).requires_grad_()]
    y = reference(*exact)
    for mine, want in zip(got, (y, *torch.autograd.grad(y, exact, dy.double())), strict=True):
        assert mine.shape == want.shape
        if want.numel():
            assert (mine - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
@pytest.mark.parametrize(
    ("B", "T", "C", "K"),
    [(3, 256, 2, 129), (1, 512, 3, 20), (5, 1024, 1, 1), (2, 256, 2, 0), (1, 256, 9, 128)],
)
def test_on_chip(on_chip, B, T, C, K, major):
    x, weight = tensors(B, T, C, K, torch.float32)
    if major:
        x = x.detach().mT.contiguous().mT.requires_grad_()
    check_on_chip(on_chip(), x, weight, 1e-6)


def test_on_chip_weights_that_are_strided_and_conjugated(on_chip):
    x, weight = tensors(2, 256, 3, 100, torch.float32)
    check_on_chip(on_chip(), x, weight.detach().mT.contiguous().mT.conj().requires_grad_(), 1e-6)


@pytest.mark.parametrize("wanted", [0, 1])
def test_on_chip_one_gradient(on_chip, wanted):
    candidate = on_chip()
    args = tensors(3, 256, 2, 100, torch.float32)
    both = torch.autograd.grad(candidate.implementation(*args).square().sum(), args)
    args = [a.detach().requires_grad_(i == wanted) for i, a in enumerate(args)]
    (found,) = torch.autograd.grad(candidate.implementation(*args).square().sum(), args[wanted])
    assert torch.equal(found, both[wanted])


def test_on_chip_in_half_precision(on_chip):
    x, weight = tensors(2, 256, 3, 129, torch.float32)
    check_on_chip(on_chip(), x.detach().half().requires_grad_(), weight, 1e-3)


@pytest.mark.parametrize(("B", "T"), [(3, 1024), (1, 2048), (3, 2048), (1, 4096)])
def test_rows_that_fit_on_no_chip(on_chip, B, T):
    shared = FFTPlan(512, backward=True).shared
    assert choose(T, T, shared, circular=True).segments >= T // 512
    for K in (T // 4, T // 2 + 1):
        check_on_chip(on_chip(shared), *tensors(B, T, 1, K, torch.float32), 1e-6)


@pytest.mark.parametrize("B", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_tiling(on_chip, B):
    """Also of another length, which some don't suit."""
    candidate = on_chip()
    x, weight = tensors(B, 1024, 1, 100, torch.float32)
    found = candidate.implementation.variants(OP.case((x, weight)))
    assert found["forward"][0].segment == found["backward"][0].segment == 1024
    for forward, backward in zip(found["forward"], found["backward"], strict=False):
        bound = at(candidate, text({"forward": forward, "backward": backward}))
        check_on_chip(bound, x, weight, 1e-6)
        check_on_chip(bound, *tensors(B, 512, 1, 100, torch.float32), 1e-6)


def test_recorded_calls_are_replayed(on_chip):
    candidate = on_chip()
    launched = []
    for _ in range(4):
        before = counter.launches()
        check_on_chip(candidate, *tensors(3, 256, 2, 100, torch.float32), 1e-6)
        launched.append(counter.launches() - before)
    assert launched[0] > 0
    assert len(set(launched)) == 1
    assert replays(candidate.implementation) == [True, True]


def test_several_pairs_of_rows_in_a_block(on_chip, monkeypatch):
    monkeypatch.setattr(launch, "splits", lambda *_: 1)
    check_on_chip(on_chip(), *tensors(5, 256, 2, 100, torch.float32), 1e-6)


@pytest.mark.parametrize(
    ("K", "dtype"), [(100, torch.float16), (129, torch.float16), (129, torch.float32)], ids=str
)
def test_verification_of_what_runs_on_chip(on_chip, K, dtype):
    args = {"x": TensorMeta.dense((9, 256, 8), dtype, grad=True),
            "weight": TensorMeta.dense((K, 8), torch.complex64, grad=True)}  # fmt: skip
    case = Case(args, "cpu")
    _, deterministic = verify(OP, on_chip(), list(yardsticks(OP, case)))
    assert deterministic


def test_not_on_chip_inside_torch_compile(on_chip):
    """Which leaves the length open."""
    on_chip()
    weight = torch.randn(50, 2, dtype=torch.complex64)
    compiled = torch.compile(spectral_filter, backend="aot_eager", dynamic=True, fullgraph=True)
    for T in (256, 300):
        x = torch.randn(2, T, 2).half()
        torch.testing.assert_close(compiled(x, weight), spectral_filter(x, weight, impl="eager"))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fft.*can't be traced by torch.compile"):
        compiled(x, weight, impl="fft")
    torch._dynamo.reset()


def test_on_chip_what_is_not_finite_stays_in_its_row(on_chip):
    candidate = on_chip()
    x, weight = (a.detach() for a in tensors(4, 256, 2, 50, torch.float32))
    want = candidate.implementation(x, weight)
    x[1, 3, 0] = float("nan")
    got = candidate.implementation(x, weight)
    assert got[1, :, 0].isnan().all()
    assert torch.equal(got[1, :, 1], want[1, :, 1])
    torch.testing.assert_close(got[[0, 2, 3]], want[[0, 2, 3]])


def test_on_chip_says_what_it_can_not_do(on_chip):
    on_chip()
    weight = torch.ones(3, 2, dtype=torch.complex64)
    for T in (128, 300, 1 << 20):
        with pytest.raises(Unsupported, match=f"powers of 2, from 256 to some 500,000, not {T}"):
            spectral_filter(torch.zeros(1, T, 2, dtype=torch.float16), weight, impl="fft")
    with pytest.raises(Unsupported, match="no float64"):
        spectral_filter(torch.zeros(1, 256, 2).double(), weight, impl="fft")
    x = torch.randn(1, 256, 2).half().requires_grad_()
    y = spectral_filter(x, weight, impl="fft")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"spectral_filter's kernels can't be differentiated twice.*using\(spectral"
    ):
        torch.autograd.grad(dx.sum(), x)


def test_what_runs_before_a_contest(on_chip):
    on_chip()

    def guess(T, regime, dtype=torch.float16):
        args = {"x": TensorMeta.dense((4, T, 8), dtype, grad=True),
                "weight": TensorMeta.dense((9, 8), torch.complex64, grad=True)}  # fmt: skip
        return OP.heuristic(Case(args, "cpu"), regime)

    assert guess(1024, "graph") == guess(256, "eager") == guess(65536, "eager", torch.float32) == "fft"
    assert guess(1024, "compiled") == guess(1000, "graph") == guess(1024, "graph", torch.float64) == "eager"


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty(shape):
    weight = torch.ones(1, shape[2], dtype=torch.complex64)
    assert spectral_filter(torch.zeros(shape), weight).shape == shape


@pytest.mark.parametrize(
    ("x", "weight", "error", "text"),
    [
        (
            torch.zeros(2, 4, 3),
            torch.zeros(4, 3) + 0j,
            ValueError,
            r"4 bins, but T = 4 .* 3 frequencies: use",
        ),
        (torch.zeros(2, 4, 3), torch.zeros(2, 2) + 0j, ValueError, r"expected \[K, C\] with C = 3"),
        (torch.zeros(4, 3), torch.zeros(2, 3) + 0j, ValueError, r"one sequence is x\[None\]"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 3), TypeError, r"torch.view_as_complex\(weight\)"),
        (torch.zeros(2, 4, 3, dtype=torch.int64), torch.zeros(2, 3) + 0j, TypeError, "floating point"),
        (torch.zeros(2, 4, 3), None, TypeError, "weight must be a tensor"),
    ],
)
def test_bad_arguments_name_the_fix(x, weight, error, text):
    with pytest.raises(error, match=text):
        spectral_filter(x, weight)


def test_documented_example():
    (example,) = doctest.DocTestFinder().find(spectral_filter, globs={"spectral_filter": spectral_filter})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
