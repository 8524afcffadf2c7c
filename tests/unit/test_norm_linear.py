"""norm_linear's checks and declaration, and plain PyTorch's results."""

from typing import Any

import pytest
import torch

from bakeoff import Unsupported
from bakeoff.ops import norm_linear
from bakeoff.ops.norm_linear.op import OP
from bakeoff.ops.norm_linear.plain import eager
from bakeoff.ops.norm_linear.reference import norm_linear as reference

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "row": ({"x": torch.ones(())}, ValueError, r"x has shape \(\), expected .*x\[None\]"),
    "empty rows": ({"x": torch.ones(2, 0), "weight": torch.ones(5, 0)}, ValueError, "K >= 1"),
    "weight": ({"weight": torch.ones(4, 5)}, ValueError, r"\[M, K\] with K = 4 as of x; .*torch.nn.Linear"),
    "weight dtype": ({"weight": torch.ones(5, 4).half()}, TypeError, "weight is torch.float16 and x"),
    "bias": ({"bias": torch.ones(4)}, ValueError, r"expected \[M\] with M = 5 as of weight"),
    "gamma": ({"gamma": torch.ones(5)}, ValueError, r"expected \[K\] with K = 4 as of x"),
    "beta": (
        {"gamma": torch.ones(4), "beta": torch.ones(4).half()}, TypeError, "beta is torch.float16 and gamma",
    ),
    "eps": ({"eps": -1.0}, ValueError, "eps must be >= 0"),
    "kind": ({"kind": "batch"}, ValueError, "kind is 'batch', expected one of layer, rms"),
    "candidate": ({"impl": "cuda"}, Unsupported, "it has eager, compiled, separate"),
    "CPU": ({"impl": "separate"}, Unsupported, "runs on CUDA, not on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        norm_linear(**{"x": torch.ones(2, 4), "weight": torch.ones(5, 4), **args})


def arguments(kind: str, dtype: torch.dtype, scale: torch.dtype, **absent: bool) -> list[Any]:
    given = [torch.randn(2, 3, 16), torch.randn(5, 16), torch.randn(5), torch.randn(16), torch.randn(16)]
    names = ("x", "weight", "bias", "gamma", "beta")
    dtypes = (dtype, dtype, dtype, scale, scale)
    tensors = [
        None if absent.get(name) else t.to(kind_of)
        for name, t, kind_of in zip(names, given, dtypes, strict=True)
    ]
    return [*tensors, 1e-5, kind]


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("without", ["", "bias", "gamma", "beta"])
def test_plain_pytorch_rounds_what_is_between(
    without: str, scale: torch.dtype, dtype: torch.dtype, kind: str
) -> None:
    args = arguments(kind, dtype, scale, **{without: True})
    exact = reference(*[a.double() if isinstance(a, torch.Tensor) else a for a in args])
    unit = max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)
    for fn, roundings in ((reference, 0.6), (eager, 2)):
        y = fn(*args)
        assert y.dtype == dtype
        assert ((y.double() - exact).norm() / exact.norm()).item() < roundings * unit


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_equals_torch_s_layers(kind: str) -> None:
    norm = torch.nn.LayerNorm(16) if kind == "layer" else torch.nn.RMSNorm(16, eps=1e-5)
    linear = torch.nn.Linear(16, 5)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        norm.weight.normal_()
    beta = norm.bias if kind == "layer" else None
    y = norm_linear(x, linear.weight, linear.bias, gamma=norm.weight, beta=beta, kind=kind)
    torch.testing.assert_close(y, linear(norm(x)))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_of_the_definition(kind: str) -> None:
    args = [
        a.requires_grad_() if isinstance(a, torch.Tensor) else a
        for a in arguments(kind, *2 * [torch.float64])
    ]
    args[0] = args[0][0].detach().requires_grad_()
    assert torch.autograd.gradcheck(reference, args)


def test_a_mean_has_no_part_in_layer_norm_and_one_in_rms() -> None:
    x, weight = torch.randn(4, 16), torch.randn(5, 16)
    torch.testing.assert_close(norm_linear(x + 3, weight), norm_linear(x, weight))
    assert not torch.allclose(norm_linear(x + 3, weight, kind="rms"), norm_linear(x, weight, kind="rms"))


def test_the_kernels_take_the_grid_and_rows_that_fit_registers() -> None:
    supports = OP.candidate("separate").supports
    assert [case.name for case in OP.cases() if supports(case) is not None] == []
    long = OP.case([torch.empty(2, 16385), torch.empty(3, 16385), None, None, None, 1e-5, "layer"])
    assert "up to 16384" in str(supports(long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_chooses_the_dtype(dtype: torch.dtype) -> None:
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((5, 8), (3, 8), (3,))
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = norm_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    want = norm_linear(*narrow)
    assert torch.equal(y, want)
    for mine, other in zip(
        torch.autograd.grad(y.sum(), (x, weight, bias)), torch.autograd.grad(want.sum(), narrow), strict=True
    ):
        assert mine.dtype == dtype
        assert torch.equal(mine, other.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert norm_linear(x.double(), weight.double()).dtype == torch.float64
