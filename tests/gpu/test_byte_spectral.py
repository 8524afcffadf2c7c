"""byte_spectral's Triton candidate on a CUDA device: the grid, every dtype, torch.compile, graphs, size."""

import math
from typing import Any

import pytest
import torch

from bakeoff.kernels import variants
from bakeoff.ops.byte_spectral import OP, byte_spectral
from bakeoff.ops.byte_spectral.plain import eager
from bakeoff.ops.byte_spectral.reference import byte_spectral as reference
from bakeoff.ops.byte_spectral.triton import byte_spectral as candidate
from bakeoff.select import Case
from bakeoff.select.contests.verify import verify, yardsticks

TRITON = OP.candidate("triton")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 3e-6}
GRID = [case for case in OP.cases() if case.causal]


def arguments(
    B: int, T: int, *, C: int = 1, W: int = 64, K: int | None = 32, D: int | None = 256,
    features: str = "magnitude", dtype: torch.dtype = torch.bfloat16,
) -> list[Any]:  # fmt: skip
    """Positional arguments with leaves; the result has `dtype`."""
    bins = W // 2 + 1 if K is None else K
    F = C * bins * (2 if features == "complex" else 1)
    table = torch.randn(256, C, device="cuda").to(torch.float32 if D else dtype)
    made: list[Any] = [
        torch.randint(256, (B, T), dtype=torch.uint8, device="cuda"),
        table,
        torch.randn(W, device="cuda"),
        None if K is None else torch.rand(K, device="cuda") * math.pi,
        features,
        None if D is None else torch.randn(F, D, device="cuda").to(dtype),
        None if D is None else torch.randn(D, device="cuda").to(dtype),
    ]
    for a in made[1:]:
        if isinstance(a, torch.Tensor):
            a.requires_grad_()
    return [*made, True]


def leaves(args: list[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]


def results(call: Any, args: list[Any], dy: torch.Tensor) -> list[torch.Tensor]:
    out = call(*args)
    return [out.detach(), *torch.autograd.grad(out, leaves(args), dy.to(out.dtype))]


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case) -> None:
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    assert TRITON.reasons(case) == []
    _, deterministic = verify(OP, TRITON, yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", ["magnitude", "log", "complex"])
@pytest.mark.parametrize(
    "shape",
    [
        {"B": 3, "T": 129, "C": 2, "W": 9, "K": 5, "D": 20},
        {"B": 2, "T": 500, "W": 64, "K": 64, "D": 300},
        {"B": 1, "T": 70, "W": 33, "K": 3, "D": 64},
        {"B": 5, "T": 31, "C": 3, "W": 64, "K": None, "D": None},
        {"B": 2, "T": 1, "W": 1, "K": 1, "D": 1},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, Any], features: str, dtype: torch.dtype) -> None:
    args = arguments(**shape, features=features, dtype=dtype)
    dy = torch.randn_like(candidate(*args))
    wide = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    for got, exact in zip(results(candidate, args, dy), results(reference, wide, dy), strict=True):
        few = 1.5 if got.numel() < 16 else 1.0  # roundings that don't average out
        assert (got - exact).norm() <= few * BOUND[dtype] * exact.norm()


@pytest.mark.parametrize(
    "shape",
    [
        {"B": 2, "T": 500, "W": 64, "K": 32, "D": 300},
        {"B": 2, "T": 130, "C": 2, "W": 64, "K": 64, "D": 512, "features": "complex"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_variant_is_as_exact_as_the_default(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """The second shape has the largest tiles of the weight: they and what else there is must fit."""
    args = arguments(**shape, dtype=dtype)
    dy = torch.randn_like(candidate(*args))
    default = results(candidate, args, dy)
    for axis, tilings in candidate.variants(OP.case(args)).items():
        for tiling in tilings[1:]:
            variant = candidate.bind(variants.text({axis: tiling}))
            for got, want in zip(results(variant, args, dy), default, strict=True):
                assert (got - want).norm() <= 2 * BOUND[dtype] * want.norm(), (axis, tiling)


def test_misaligned_ids() -> None:
    args = arguments(4, 257)
    flat = torch.zeros(4 * 257 + 1, dtype=torch.uint8, device="cuda")
    flat[1:] = args[0].flatten()
    moved = flat[1:].view(4, 257)
    assert moved.data_ptr() % 16
    assert torch.equal(candidate(moved, *args[1:]), candidate(*args))


def test_graph_capture() -> None:
    args = arguments(4, 257)
    dy = torch.randn(4, 257, 256, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(candidate, args, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(candidate, args, dy)
    with torch.no_grad():
        args[0].random_(256)
        args[1].normal_()
        args[3].uniform_(0, 3)
        dy.normal_()
    graph.replay()
    for a, b in zip(captured, results(candidate, args, dy), strict=True):
        assert torch.equal(a, b)


def test_torch_compile_whole_with_any_length() -> None:
    torch._dynamo.reset()

    def model(ids: Any, table: Any, window: Any, omega: Any, weight: Any, bias: Any) -> Any:
        return byte_spectral(ids, table * 2, window, omega, weight=weight, bias=bias, impl="triton") + 1

    compiled = torch.compile(model, fullgraph=True)
    for T in (16, 33, 100, 64):
        args = arguments(2, T)
        dy = torch.randn(2, T, 256, device="cuda")
        call = [args[0], *leaves(args)]
        for a, b in zip(results(compiled, call, dy), results(model, call, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_opcheck() -> None:
    for K, D in ((32, 256), (None, None)):
        args = arguments(2, 40, K=K, D=D)
        torch.library.opcheck(candidate.traced.forward, (*args, True, ""))
        ids, table, window, omega, features, weight, bias, causal = (
            a.detach() if isinstance(a, torch.Tensor) else a for a in args
        )
        dout = candidate(ids, table, window, omega, features, weight, bias, causal)
        saved, likes = (ids, table, window, omega, weight), (table, window, omega, weight, bias)
        wanted = [True, True, K is not None, D is not None, D is not None]
        torch.library.opcheck(candidate.traced.backward, (dout, *saved, features, causal, *likes, wanted, ""))


def test_autocast() -> None:
    args = arguments(4, 100, dtype=torch.float32)
    named = {"weight": args[5], "bias": args[6]}
    found = {}
    for impl in ("triton", "eager"):
        with torch.autocast("cuda", torch.bfloat16):
            out = byte_spectral(*args[:4], **named, impl=impl)
        assert out.dtype == torch.bfloat16
        found[impl] = [out, *torch.autograd.grad(out.float().square().sum(), leaves(args))]
    for a, b in zip(*found.values(), strict=True):
        assert a.dtype == b.dtype
        assert ((a - b).norm() / b.norm()).item() < 1e-2


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    args = arguments(16, 1024)
    dy = torch.randn(16, 1024, 256, device="cuda")
    runs = [results(candidate, args, dy) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_the_future_is_not_seen() -> None:
    args = arguments(4, 1000)
    with torch.no_grad():
        out = candidate(*args)
        for t in (0, 63, 64, 500, 998):
            edited = args[0].clone()
            edited[:, t + 1 :].random_(256)
            assert torch.equal(candidate(edited, *args[1:])[:, : t + 1], out[:, : t + 1])


def test_features_never_reach_memory() -> None:
    args = arguments(16, 4096, C=4)  # 4 * 32 features of 4 bytes would be 32 MiB, twice that with both parts
    with torch.no_grad():
        candidate(*args)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = candidate(*args)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 4096


def test_more_than_2_to_the_31_elements() -> None:
    B, T = (1 << 31) // (8192 * 256) + 2, 8192
    args = arguments(B, T)
    out = candidate(*args)
    assert out.numel() > 1 << 31
    gradients = torch.autograd.grad(out, leaves(args), out.detach())
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    for row in (0, B - 1):
        want = eager(args[0][row : row + 1, -300:], *args[1:])[:, 100:]
        torch.testing.assert_close(out[row : row + 1, -200:], want, rtol=2e-2, atol=0.5)
