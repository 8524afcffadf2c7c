"""spectral_filter on a CUDA device: the op's grid at full size, graph capture."""

import pytest
import torch

from bakeoff.ops.spectral_filter import OP, spectral_filter
from bakeoff.ops.spectral_filter.reference import spectral_filter as reference
from bakeoff.select.contests.verify import verify, yardsticks


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_compiled_passes_the_contest_verification(case):
    verify(OP, OP.candidate("compiled"), yardsticks(OP, case))


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_ffts_on_the_chip_pass_the_contest_verification(case):
    fft = OP.candidate("fft")
    if fft.reasons(case):
        pytest.skip(fft.reasons(case)[0])
    _, deterministic = verify(OP, fft, yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("impl", ["eager", "compiled", "fft"])
@pytest.mark.parametrize("T", [256, 2048, 8192, 65536])
def test_real_frequencies_ignore_the_imaginary_part(T, impl):
    """Against a result of the CPU's FFT."""
    x = torch.randn(2, T, 8, dtype=torch.bfloat16)
    weight = torch.randn(T // 2 + 1, 8, dtype=torch.complex64)
    weight[0] += 300j
    weight[-1] -= 300j
    want = reference(x.double(), weight.to(torch.complex128))
    got = spectral_filter(x.cuda(), weight.cuda(), impl=impl).cpu()
    assert (got - want).abs().max() < 2**-8 * want.abs().max()


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [256, 1024, 16_384, 32_768, 65_536])
def test_ffts_on_the_chip_against_float64(T, B):
    x = torch.randn(B, T, 5, device="cuda", requires_grad=True)
    for K in (T // 2 + 1, 100):
        weight = torch.randn(K, 5, device="cuda", dtype=torch.complex64, requires_grad=True)
        exact = [x.detach().double().requires_grad_(), weight.detach().to(torch.complex128).requires_grad_()]
        dy = torch.randn_like(x)
        y, want = spectral_filter(x, weight, impl="fft"), reference(*exact)
        found = (y, *torch.autograd.grad(y, (x, weight), dy))
        for mine, right in zip(found, (want, *torch.autograd.grad(want, exact, dy.double())), strict=True):
            assert (mine - right).abs().max() < 3e-6 * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("T", [1, 2, 37, 1000])
def test_eager_against_float64(T, dtype):
    x = torch.randn(3, T, 20, device="cuda", dtype=dtype)
    weight = torch.randn(T // 2 + 1, 20, device="cuda", dtype=torch.complex64)
    want = reference(x.double(), weight.to(torch.complex128))
    error = (spectral_filter(x, weight, impl="eager").double() - want).abs().max() / want.abs().max()
    assert error < max(torch.finfo(dtype).eps, 2e-6)


@pytest.mark.parametrize("impl", ["eager", "fft"])
def test_graph_capture(impl):
    x = torch.randn(2, 256, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(33, 32, device="cuda", dtype=torch.complex64, requires_grad=True)

    def step():
        y = spectral_filter(x, weight, impl=impl)
        return (y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)
