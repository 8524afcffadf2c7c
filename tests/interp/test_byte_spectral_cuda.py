"""The CUDA C++ candidate of byte_spectral, emulated, against the float64 reference."""

import pytest
import torch

from bakeoff.ops.byte_spectral import OP
from bakeoff.ops.byte_spectral import op as declaration
from bakeoff.ops.byte_spectral.cuda import launch
from bakeoff.ops.byte_spectral.cuda.launch import cuda
from tests.interp import emulated
from tests.interp.test_byte_spectral import SHAPES, arguments, assert_exact, results, widened


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    emulated.emulate(monkeypatch, shared=48 << 10)


KINDS = ["magnitude", "log", "complex"]
FIRST = [(0, "log"), (1, "magnitude"), (2, "complex"), (3, "complex"), (3, "magnitude"), (4, "log")]
OTHERS = [(n, kind) for n in range(len(SHAPES)) for kind in KINDS if (n, kind) not in FIRST]


@pytest.mark.parametrize(
    ("shape", "features"),
    [*FIRST, *[pytest.param(*given, marks=pytest.mark.exhaustive) for given in OTHERS]],
)
def test_output_and_every_gradient(shape, features):
    assert_exact(cuda, arguments(**SHAPES[shape], features=features))


def test_blocks_with_several_tiles(monkeypatch):
    monkeypatch.setattr(launch, "_PROGRAMS", 2)
    assert_exact(cuda, arguments(3, 43, C=2, W=12, K=7, D=5, features="log"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [None, 20])
def test_results_are_rounded_once(dtype, D):
    """Exact gradients of what autograd sees: float64 with the same inputs, to the dtype's precision."""
    args = arguments(2, 21, C=2, W=9, K=5, D=D, dtype=dtype)
    if D is None:
        args[1] = args[1].detach().to(dtype).requires_grad_()
    dy = torch.randn(2, 21, D or 10).to(dtype)
    exact = widened(args)
    for mine, truth in zip(results(cuda, args, dy), results(OP.reference, exact, dy), strict=True):
        assert mine.isfinite().all()
        assert (mine - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()


def test_strided_ids_and_views():
    args = arguments(3, 40, C=3, W=7, K=4, D=6)
    args[0] = torch.randint(256, (3, 90), dtype=torch.uint8)[:, 1:80:2]
    args[1] = torch.randn(3, 256).t().requires_grad_()
    args[2] = torch.randn(14)[::2].requires_grad_()
    args[5] = torch.randn(6, 12).t().requires_grad_()
    assert_exact(cuda, args)


def test_repeats_itself_bit_for_bit():
    args = arguments(2, 60, W=9, K=5, D=8)
    dy = torch.randn(2, 60, 8)
    for one, other in zip(results(cuda, args, dy), results(cuda, args, dy), strict=True):
        assert torch.equal(one, other)


def test_no_positions():
    args = arguments(0, 7)
    out = cuda(*args)
    assert out.shape == (0, 7, 6)
    leaves = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))


def test_only_some_gradients():
    args = arguments(2, 20, bias=False)
    args[2].requires_grad_(False)
    assert_exact(cuda, args)


def test_what_it_cannot_take_is_said():
    whole = OP.case(arguments(1, 9, K=None, features="complex", causal=False))
    assert "whole row" in declaration.cuda_cannot(whole)
    wide = OP.case(arguments(1, 9, C=40, W=64, K=32, features="complex"))
    assert "narrow the table" in declaration.cuda_cannot(wide)
    exact = arguments(1, 9)
    exact[1] = exact[1].detach().double()
    assert "float64" in declaration.cuda_cannot(OP.case(exact))
    assert declaration.cuda_cannot(OP.case(arguments(1, 9, W=64, K=64))) is None
