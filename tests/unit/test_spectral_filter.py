"""spectral_filter's corners: nothing to do, tensors without data, refusals."""

import pytest
import torch

from bakeoff.ops import spectral_filter
from bakeoff.ops.spectral_filter import OP
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_to_do_gives_the_weight_a_gradient_of_zeros(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(1, shape[2], dtype=torch.complex64, requires_grad=True)
    y = spectral_filter(x, weight)
    assert y.shape == shape
    for gradient, of in zip(torch.autograd.grad(y.sum(), (x, weight)), (x, weight), strict=True):
        assert gradient.shape == of.shape
        assert not gradient.any()


def test_tensors_without_data() -> None:
    y = spectral_filter(torch.empty(2, 7, 3, device="meta"), torch.ones(2, 3, device="meta") + 0j)
    assert (y.shape, y.device.type) == ((2, 7, 3), "meta")


def test_torch_export_leaves_the_length_open() -> None:
    class Filter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return spectral_filter(x, self.weight)

    module = Filter()
    shapes = {"x": {1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(module, (torch.randn(2, 20, 8),), dynamic_shapes=shapes).module()
    for T in (20, 21, 34):
        x = torch.randn(2, T, 8)
        torch.testing.assert_close(exported(x), module(x))


def test_compiled_passes_the_contest_verification() -> None:
    args = {
        "x": TensorMeta.dense((2, 11, 4), torch.float32, grad=True),
        "weight": TensorMeta.dense((6, 4), torch.complex64, grad=True),
    }
    case, compiled = Case(args, "cpu"), OP.candidate("compiled")
    if compiled.reasons(case):
        pytest.skip(compiled.reasons(case)[0])
    verify(OP, compiled, list(yardsticks(OP, case)))


def test_a_bucket_has_no_more_weights_than_frequencies() -> None:
    args = {
        "x": TensorMeta.dense((2, 7, 3), torch.float32),
        "weight": TensorMeta.dense((6, 3), torch.complex64),
    }
    assert OP.bucket(Case(args, "cpu")).weight.shape == (4, 3)


def test_refusals() -> None:
    weight = torch.ones(2, 3, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"x is torch.float8_e4m3fn; convert it to .* at least 16 bits"):
        spectral_filter(torch.zeros(2, 7, 3).to(torch.float8_e4m3fn), weight)
    with pytest.raises(TypeError, match=r"x must be a tensor, got \[1.0, 2.0\]"):
        spectral_filter([1.0, 2.0], weight)  # type: ignore[arg-type]
