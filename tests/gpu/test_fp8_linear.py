"""fp8_linear on a CUDA device: the bits of the quantisation, the grid, graphs, torch.compile."""

from typing import Any

import pytest
import torch

from bakeoff import hardware
from bakeoff.kernels.plan import Plan
from bakeoff.nn import Fp8Linear
from bakeoff.ops import fp8_linear
from bakeoff.ops.fp8_linear import OP
from bakeoff.ops.fp8_linear import triton as room
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2
from bakeoff.ops.fp8_linear.reference import quantize as definition
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks

pytestmark = pytest.mark.skipif(
    hardware.capability(0) < (8, 9), reason="FP8 products need compute capability 8.9 or newer"
)
KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
CANDIDATES = pytest.mark.parametrize("name", ["scaled_mm", "triton"])


def quantize(x: torch.Tensor, kind: torch.dtype = E4M3, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return room.quantize(Plan({"x": x}), x, kind, more)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [1, 5, 33, 64, 1000, 2100, 4096, 5120, 14336, 16384, 28672, 30001])
def test_quantisation_gives_the_bits_of_the_definition(K: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    """The GPU's own conversion rounds to nearest even, stops at the largest number and keeps NaN, and a
    division is rounded to nearest; the definition on the CPU gives the same."""
    x = torch.randn(150, K) * torch.logspace(0, -9, K) * torch.logspace(-20, 4, 150)[:, None]
    x[3], x[4, 0], x[5, -1] = 0, float("nan"), float("inf")
    x = x.to(dtype)
    for given in (x.cuda(), x.cuda().t().contiguous().t()):
        q, scale = quantize(given, kind, more=3)
        assert not bool(q[150:].float().any())
        finite = torch.isfinite(x).all(1)
        assert not bool(q[:150][finite, K:].float().any())
        for want, want_scale in (definition(x, kind), definition(x.cuda(), kind)):
            torch.testing.assert_close(scale[:150].cpu(), want_scale.cpu(), rtol=0, atol=0, equal_nan=True)
            mine, other = q[:150, :K].cpu(), want.cpu()
            nan = torch.isnan(other.float())
            assert torch.equal(torch.isnan(mine.float()), nan)
            same = mine.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
            assert bool((same | nan).all())


def make(rows: int, K: int, M: int, grad: str = "bf16", *, bias: bool = True, pad: int = 0) -> Case:
    half = torch.bfloat16
    args: dict[str, Any] = {
        "x": TensorMeta((rows, K), half, (K + pad, 1), True),
        "weight": TensorMeta.dense((M, K), half, grad=True),
        "bias": TensorMeta.dense((M,), half, grad=True) if bias else None,
        "grad": grad,
    }
    return Case(args, "cuda:0")


def passes(name: str, case: Case) -> None:
    """The selector's own verification: forward, every gradient, guard bands, poison, unchanged inputs."""
    candidate = OP.candidate(name)
    assert candidate.reasons(case) == []
    verify(OP, candidate, yardsticks(OP, case))


@CANDIDATES
@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (7, 33, 77), (300, 1024, 512), (129, 1000, 1008), (1001, 333, 77), (64, 20000, 64)]
)
def test_shapes(name: str, shape: tuple[int, int, int], grad: str) -> None:
    passes(name, make(*shape, grad))
    passes(name, make(*shape, grad, bias=False, pad=8))


@CANDIDATES
def test_layouts(name: str) -> None:
    """Transposed x, weight and dy; a bias with gaps, and one that is not aligned to 16 bytes."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(64, 7, **half).t(), torch.randn(64, 48, **half).t()
    for bias in (torch.randn(96, **half)[::2], torch.randn(49, **half)[1:]):
        runs = []
        for impl in (name, "eager"):
            leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
            y = fp8_linear(*leaves, grad="e5m2", impl=impl)
            dy = torch.linspace(-1, 1, 7 * 48, **half).view(48, 7).t()
            runs.append([y, *torch.autograd.grad(y, leaves, dy)])
        for mine, plain in zip(*runs, strict=True):
            assert ((mine.double() - plain.double()).norm() / plain.double().norm()).item() < 1e-2


GRID = [case for case in OP.cases() if case.x.numel <= 1 << 25 and case.x.dtype == torch.bfloat16]


@CANDIDATES
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_grid(name: str, case: Case) -> None:
    passes(name, case)


def test_compiled_is_verified_or_rejected_for_its_rounding() -> None:
    """torch.compile's division is not always rounded to nearest: it must at least be close."""
    case = make(300, 1024, 512)
    x, weight, bias = (torch.randn(m.shape, device="cuda", dtype=m.dtype) for m in case.tensors.values())
    got, want = (OP.candidate(n).implementation(x, weight, bias, "bf16") for n in ("compiled", "scaled_mm"))
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() < 1e-2


def tensors(rows: int, K: int, M: int) -> list[torch.Tensor]:
    """x, weight, bias, which want gradients, and dy."""
    shapes = ((rows, K), (M, K), (M,), (rows, M))
    *leaves, dy = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    return [*[leaf.requires_grad_() for leaf in leaves], dy]


@CANDIDATES
def test_nan_and_infinity_make_their_row_nan_and_no_other(name: str) -> None:
    call = OP.candidate(name).implementation
    for value in (float("nan"), float("inf")):
        x, weight, bias, _ = (t.detach() for t in tensors(40, 64, 32))
        clean = call(x, weight, bias, "bf16")
        x[7, 3] = value
        y = call(x, weight, bias, "bf16")
        assert bool(torch.isnan(y[7]).all())
        others = torch.arange(40, device="cuda") != 7
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
def test_graph_capture_and_no_wait(grad: str) -> None:
    x, weight, bias, dy = tensors(257, 1024, 500)
    leaves = (x, weight, bias)

    def step() -> list[torch.Tensor]:
        y = room.fp8_linear(*leaves, grad)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # the planner, its record, the written-out plan
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
        weight.normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@CANDIDATES
def test_public_call_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    x, weight, bias, dy = tensors(64, 256, 128)
    leaves = (x, weight, bias)

    def run(fn: Any) -> list[torch.Tensor]:
        y = fn(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    def plain(*args: torch.Tensor) -> torch.Tensor:
        return fp8_linear(*args, impl=name)

    for a, b in zip(run(torch.compile(plain, fullgraph=True)), run(plain), strict=True):
        assert ((a.double() - b.double()).norm() / b.double().norm()).item() < 1e-2


def test_opcheck() -> None:
    x, weight, bias, _ = tensors(20, 96, 48)
    torch.library.opcheck(room.fp8_linear.traced.forward, (x, weight, bias, "bf16", True, ""))


def test_a_layer_under_autocast() -> None:
    layer, x = Fp8Linear(64, 32, device="cuda"), torch.randn(5, 7, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
