"""spectral_filter against a transform written out as a matrix; gradients, laws, checks."""

import doctest
import math

import pytest
import torch

from bakeoff.ops.spectral_filter import OP, spectral_filter
from bakeoff.ops.spectral_filter.plain import eager
from bakeoff.ops.spectral_filter.reference import spectral_filter as reference
from bakeoff.select.op import Case, TensorMeta
from bakeoff.select.verify import verify, yardsticks

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


def test_verification_of_compiled():
    args = {"x": TensorMeta.dense((2, 11, 4), torch.float32, grad=True),
            "weight": TensorMeta.dense((6, 4), torch.complex64, grad=True)}  # fmt: skip
    case = Case(args, "cpu")
    compiled = OP.candidate("compiled")
    if compiled.reasons(case):
        pytest.skip(compiled.reasons(case)[0])
    verify(OP, compiled, list(yardsticks(OP, case)))


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
        (torch.zeros(2, 4, 3), torch.zeros(2, 2) + 0j, ValueError, r"expected \[K, 3\]"),
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
