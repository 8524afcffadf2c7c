"""byte_spectral's CUDA C++ candidate on a CUDA device: the grid, every dtype, torch.compile, graphs."""

from typing import Any

import pytest
import torch

from bakeoff.ops.byte_spectral import OP, byte_spectral
from bakeoff.ops.byte_spectral.cuda.launch import cuda
from bakeoff.ops.byte_spectral.reference import byte_spectral as reference
from bakeoff.select import Case
from bakeoff.select.contests.verify import verify, yardsticks
from tests.gpu.test_byte_spectral import BOUND, DTYPES, arguments, leaves, results

CUDA = OP.candidate("cuda")
GRID = [case for case in OP.cases() if case.causal]


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case) -> None:
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    assert CUDA.reasons(case) == []
    _, deterministic = verify(OP, CUDA, yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", ["magnitude", "log", "complex"])
@pytest.mark.parametrize(
    "shape",
    [
        {"B": 3, "T": 129, "C": 2, "W": 9, "K": 5, "D": 20},
        {"B": 2, "T": 500, "W": 64, "K": 64, "D": 300},
        {"B": 5, "T": 31, "C": 3, "W": 64, "K": None, "D": None},
        {"B": 2, "T": 1, "W": 1, "K": 1, "D": 1},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, Any], features: str, dtype: torch.dtype) -> None:
    args = arguments(**shape, features=features, dtype=dtype)
    if CUDA.reasons(OP.case(args)):
        pytest.skip("more spectra than 48 KiB hold")
    dy = torch.randn_like(cuda(*args))
    wide = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    for got, exact in zip(results(cuda, args, dy), results(reference, wide, dy), strict=True):
        few = 1.5 if got.numel() < 16 else 1.0  # roundings that don't average out
        assert (got - exact).norm() <= few * BOUND[dtype] * exact.norm()


def test_graph_capture_without_a_synchronisation() -> None:
    args = arguments(4, 257)
    dy = torch.randn(4, 257, 256, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            results(cuda, args, dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(cuda, args, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(cuda, args, dy)
    with torch.no_grad():
        args[0].random_(256)
        args[1].normal_()
        args[3].uniform_(0, 3)
        dy.normal_()
    graph.replay()
    for a, b in zip(captured, results(cuda, args, dy), strict=True):
        assert torch.equal(a, b)


def test_torch_compile_whole_with_any_length() -> None:
    torch._dynamo.reset()

    def model(ids: Any, table: Any, window: Any, omega: Any, weight: Any, bias: Any) -> Any:
        return byte_spectral(ids, table * 2, window, omega, weight=weight, bias=bias, impl="cuda") + 1

    compiled = torch.compile(model, fullgraph=True)
    for T in (16, 33):
        args = arguments(2, T)
        dy = torch.randn(2, T, 256, device="cuda")
        call = [args[0], *leaves(args)]
        for a, b in zip(results(compiled, call, dy), results(model, call, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_opcheck() -> None:
    from bakeoff.ops.byte_spectral.cuda.launch import _op

    for K, D in ((32, 256), (None, None)):
        args = arguments(2, 40, K=K, D=D)[:-1]
        torch.library.opcheck(_op.traced.forward, (*args, True, ""))
