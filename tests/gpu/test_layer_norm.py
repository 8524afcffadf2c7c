"""layer_norm's Triton candidate on a CUDA device: the grid, every dtype, torch.compile, graphs."""

from typing import Any

import pytest
import torch

from bakeoff.kernels.variants import text
from bakeoff.ops.layer_norm import OP, layer_norm
from bakeoff.ops.layer_norm.triton import add_normalize, normalize
from bakeoff.ops.layer_norm.triton import layer_norm as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks

TRITON = OP.candidate("triton")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make(rows: int, features: int, dtype: torch.dtype, **other: Any) -> Case:
    """A case with gradients; `other` gives weight, bias and residual dtypes (or None), row padding."""
    weight = other.get("weight", dtype)
    bias = other.get("bias", weight)
    residual = other.get("residual")
    stride = (features + other.get("pad", 0), 1)
    args: dict[str, Any] = {
        "x": TensorMeta((rows, features), dtype, stride, True),
        "weight": TensorMeta.dense((features,), weight, grad=True) if weight else None,
        "bias": TensorMeta.dense((features,), bias, grad=True) if bias else None,
        "eps": 1e-5,
        "residual": TensorMeta.dense((rows, features), residual, grad=True) if residual else None,
    }
    return Case(args, "cuda:0")


def passes(case: Case) -> None:
    """The selector's own verification: forward, every gradient, guard bands, poison, unchanged inputs."""
    assert TRITON.reasons(case) == []
    _, deterministic = verify(OP, TRITON, yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 4096), (2, 33), (7, 384), (300, 512), (129, 1000), (64, 1024), (40, 2048), (33, 4096), (9, 8192),
     (5, 16384), (300, 16384), (3, 20000), (3, 65537)],
    ids=str,
)  # fmt: skip
def test_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    passes(make(*shape, dtype))


@pytest.mark.parametrize("features", [384, 1000, 4096, 16384, 20000])
@pytest.mark.parametrize(
    "form",
    [
        {"weight": None},
        {"weight": torch.float32},
        {"bias": None},
        {"weight": None, "bias": torch.bfloat16},
        {"residual": torch.bfloat16},
        {"residual": torch.float32},
        {"residual": torch.float16, "weight": torch.float32},
        {"pad": 3},
        {"pad": 16, "residual": torch.bfloat16},
    ],
    ids=str,
)
def test_forms(form: dict[str, Any], features: int) -> None:
    passes(make(37, features, torch.bfloat16, **form))


@pytest.mark.parametrize("case", [c for c in OP.cases() if c.x.numel <= 1 << 25], ids=lambda c: c.name)
def test_grid(case: Case) -> None:
    passes(case)


VARIED = [make(300, 384, torch.bfloat16), make(130, 5120, torch.bfloat16, residual=torch.bfloat16)]


@pytest.mark.parametrize("case", VARIED, ids=["384", "5120 residual"])
def test_every_variant(case: Case) -> None:
    """All launch configurations, each on the first call and replayed."""
    drawn = [torch.randn(meta.shape, device="cuda", dtype=meta.dtype) for meta in case.tensors.values()]
    leaves = [t.requires_grad_() for t in drawn]
    x, weight, bias, *residual = leaves
    dys = [torch.randn_like(x) for _ in range(1 + len(residual))]

    def run(fn: Any) -> list[torch.Tensor]:
        out = fn(x, weight, bias, 1e-5, residual[0] if residual else None)
        outs = list(out) if residual else [out]
        return [*outs, *torch.autograd.grad(outs, leaves, dys)]

    want = run(candidate)
    for axis, listed in candidate.variants(case).items():
        for tiling in listed:
            bound = candidate.bind(text({axis: tiling}))
            first, *others = [run(bound) for _ in range(4)]
            for a, b in zip(first, want, strict=True):
                assert ((a.double() - b.double()).norm() / b.double().norm()).item() < 6e-3, tiling
            for again in others:
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), tiling


def tensors(rows: int, features: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, weight, bias, residual, which want gradients, and dy."""
    shapes = [(rows, features), (features,), (features,), (rows, features)]
    leaves = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    return [*leaves, torch.randn(rows, features, device="cuda", dtype=dtype)]


def test_misaligned_pointers() -> None:
    flat = torch.randn(1 + 64 * 512, device="cuda", dtype=torch.bfloat16)
    x = flat[1:].view(64, 512)
    assert x.data_ptr() % 16 == 2
    assert torch.equal(candidate(x, None, None, 1e-5, None), candidate(x.clone(), None, None, 1e-5, None))


def test_second_call_goes_straight_to_the_driver_and_agrees() -> None:
    """The remembered launch must not remember values: other tensors, another eps."""
    for eps in (1e-5, 1e-2, 0.5):
        x, weight, bias, residual, dy = tensors(50, 384)
        out = candidate(x, weight, bias, eps, residual)
        got = torch.autograd.grad(out, (x, weight, bias, residual), (dy, dy))
        plain = [t.detach().double().requires_grad_() for t in (x, weight, bias, residual)]
        want_out = OP.reference(*plain[:3], eps, plain[3])
        want = torch.autograd.grad(want_out, plain, (dy.double(), dy.double()))
        for a, b in zip((*out, *got), (*want_out, *want), strict=True):
            assert ((a.double() - b).norm() / b.norm()).item() < 6e-3


def test_a_large_mean_costs_no_digits() -> None:
    x = torch.randn(300, 1000, device="cuda") + 1e4
    want = OP.reference(x.double())
    assert ((candidate(x, None, None, 1e-5, None).double() - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [384, 1000, 7168, 20000])
def test_equal_numbers_have_their_own_mean(features: int, dtype: torch.dtype) -> None:
    """No 1 / sqrt(eps) may stand before what a mean is rounded by."""
    x = torch.randn(9, 1, device="cuda").to(torch.bfloat16).to(dtype).expand(9, features).requires_grad_()
    y = candidate(x, None, None, 1e-5, None)
    assert not y.any()
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.37109375))
    assert not dx.any()


def test_graph_capture() -> None:
    x, weight, bias, residual, dy = tensors(257, 1024)
    leaves = (x, weight, bias, residual)

    def step() -> list[torch.Tensor]:
        y, s = candidate(x, weight, bias, 1e-5, residual)
        return [y.detach(), s.detach(), *torch.autograd.grad((y, s), leaves, (dy, dy))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
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


def test_no_call_waits_for_the_device() -> None:
    x, weight, bias, residual, dy = tensors(100, 1024)
    for _ in range(3):  # the planner, its record, the written-out plan
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = candidate(x, weight, bias, 1e-5, residual)
            torch.autograd.grad(out, (x, weight, bias, residual), (dy, dy))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("with_residual", [False, True])
def test_torch_compile_with_dynamic_lengths(with_residual: bool) -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor, weight: Any, bias: Any, residual: Any) -> Any:
        out = candidate(x * 2, weight, bias, 1e-5, residual)
        return out if residual is None else (out[0] + 1, out[1])

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (8, 33, 128):
            *leaves, residual, dy = tensors(rows, 384)
            wanted = [*leaves, residual] if with_residual else leaves
            results = []
            for fn in (model, compiled):
                out = fn(*leaves, residual if with_residual else None)
                outs = list(out) if with_residual else [out]
                results.append(outs + list(torch.autograd.grad(outs, wanted, [dy] * len(outs))))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_public_call_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    x, weight, bias, _, _ = tensors(64, 384)
    compiled = torch.compile(lambda *args: layer_norm(*args, impl="triton"), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, bias), layer_norm(x, weight, bias, impl="triton"))


def test_opcheck() -> None:
    x, weight, bias, residual, dy = tensors(20, 384)
    torch.library.opcheck(normalize.traced.forward, (x, weight, bias, 1e-5, True, ""))
    torch.library.opcheck(add_normalize.traced.forward, (x, weight, bias, 1e-5, residual, True, ""))
    x, weight, bias, residual = (t.detach() for t in (x, weight, bias, residual))
    stats = normalize.traced.forward(x, weight, bias, 1e-5, True, "")[1]
    given = (dy, x, weight, stats, 1e-5, x, weight, bias, [True, True, True], "")
    torch.library.opcheck(normalize.traced.backward, given)


def test_autocast_changes_nothing() -> None:
    x, weight, bias, residual, _ = tensors(33, 512)
    with torch.autocast("cuda", torch.float16):
        for name in ("eager", "triton"):
            call = OP.candidate(name).implementation
            y, s = call(x, weight.float(), bias.float(), 1e-5, residual.float())
            assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    x, weight, bias, _, dy = tensors(5000, 1024)
    leaves = (x, weight, bias)
    runs = [torch.autograd.grad(layer_norm(*leaves, impl="triton"), leaves, dy) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements() -> None:
    rows, features = (1 << 31) // 4096 + 5, 4096
    x = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    weight = torch.randn(features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = candidate(x, weight, None, 1e-5, None)
    dx, dw = torch.autograd.grad(y, (x, weight), x.detach())
    assert bool(torch.isfinite(dw).all())
    for piece in (slice(0, 3), slice(-3, None)):
        part = x.detach()[piece].double().requires_grad_()
        want = OP.reference(part, weight.detach().double())
        (want_dx,) = torch.autograd.grad(want, part, part.detach())
        assert ((y[piece].double() - want).norm() / want.norm()).item() < 4e-3
        assert ((dx[piece].double() - want_dx).norm() / want_dx.norm()).item() < 4e-2


def test_other_stream_and_thread() -> None:
    """The remembered launch goes to the caller's current stream."""
    x, weight, bias, _, dy = tensors(2048, 4096)
    leaves = (x, weight, bias)
    want = torch.autograd.grad(candidate(*leaves, 1e-5, None), leaves, dy)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = dy.clone()
        got = torch.autograd.grad(candidate(*leaves, 1e-5, None), leaves, late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
