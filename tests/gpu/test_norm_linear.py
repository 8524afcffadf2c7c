"""norm_linear's kernels on a CUDA device: the grid, torch.compile, graphs, memory."""

from typing import Any

import pytest
import torch

from bakeoff.ops.norm_linear import OP, norm_linear
from bakeoff.ops.norm_linear.triton import separate
from bakeoff.select import Case
from bakeoff.select.contests.verify import verify, yardsticks


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case) -> None:
    _, deterministic = verify(OP, OP.candidate("separate"), yardsticks(OP, case))
    assert deterministic


def arguments(N: int, K: int, M: int, kind: str = "layer") -> list[Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    return [random(2, N, K), random(M, K), random(M), random(K), random(K), 1e-5, kind]


def step(fn: Any, args: list[Any], dy: torch.Tensor) -> list[torch.Tensor]:
    y = fn(*args)
    return [y, *torch.autograd.grad(y, [a for a in args if isinstance(a, torch.Tensor)], dy)]


def test_graph_capture() -> None:
    args = arguments(150, 256, 512)
    dy = torch.randn(2, 150, 512, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(separate, args, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(separate, args, dy)
    with torch.no_grad():
        args[0].normal_()
        dy.normal_()
    graph.replay()
    for mine, want in zip(captured, step(separate, args, dy), strict=True):
        assert torch.equal(mine, want)


def test_torch_compile_whole_with_any_length() -> None:
    torch._dynamo.reset()

    def model(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, eps: float, kind: Any) -> Any:
        return norm_linear(x, weight, bias, gamma=gamma, beta=beta, eps=eps, kind=kind, impl="separate")

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for N in (16, 33, 100):
        args = arguments(N, 256, 512)
        dy = torch.randn(2, N, 512, device="cuda", dtype=torch.bfloat16)
        for mine, want in zip(step(compiled, args, dy), step(model, args, dy), strict=True):
            assert torch.equal(mine, want)


def test_what_is_normalised_is_not_kept() -> None:
    args = arguments(4096, 4096, 64)
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    y = separate(*args)
    assert torch.cuda.memory_allocated() - start <= y.nbytes + (1 << 20)
