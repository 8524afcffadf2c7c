"""spectral_filter on a CUDA device: the op's grid at full size, graph capture."""

import pytest
import torch

from bakeoff.ops.spectral_filter import OP, spectral_filter
from bakeoff.ops.spectral_filter.reference import spectral_filter as reference
from bakeoff.select.verify import verify, yardsticks


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_compiled_passes_the_contest_verification(case):
    verify(OP, OP.candidate("compiled"), yardsticks(OP, case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("T", [1, 2, 37, 1000])
def test_eager_against_float64(T, dtype):
    x = torch.randn(3, T, 20, device="cuda", dtype=dtype)
    weight = torch.randn(T // 2 + 1, 20, device="cuda", dtype=torch.complex64)
    want = reference(x.double(), weight.to(torch.complex128))
    error = (spectral_filter(x, weight, impl="eager").double() - want).abs().max() / want.abs().max()
    assert error < max(torch.finfo(dtype).eps, 2e-6)


def test_graph_capture():
    x = torch.randn(2, 64, 32, device="cuda", requires_grad=True)
    weight = torch.randn(33, 32, device="cuda", dtype=torch.complex64, requires_grad=True)

    def step():
        y = spectral_filter(x, weight, impl="eager")
        return (y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)
