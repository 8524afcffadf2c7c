"""rms_norm's Triton candidate on a CUDA device: the grid, every dtype, torch.compile, graphs."""

from typing import Any

import pytest
import torch

from bakeoff.kernels.variants import text
from bakeoff.ops.rms_norm import OP, rms_norm
from bakeoff.ops.rms_norm.triton import add_normalize, normalize
from bakeoff.ops.rms_norm.triton import rms_norm as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks

TRITON = OP.candidate("triton")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make(rows: int, features: int, dtype: torch.dtype, **other: Any) -> Case:
    """A case with gradients; `other` gives weight and residual dtypes (or None), offset, row padding."""
    weight = other.get("weight", dtype)
    residual = other.get("residual")
    stride = (features + other.get("pad", 0), 1)
    args: dict[str, Any] = {
        "x": TensorMeta((rows, features), dtype, stride, True),
        "weight": TensorMeta.dense((features,), weight, grad=True) if weight else None,
        "eps": 1e-6,
        "residual": TensorMeta.dense((rows, features), residual, grad=True) if residual else None,
        "offset": other.get("offset", 0.0),
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
        {"offset": 1.0},
        {"residual": torch.bfloat16},
        {"residual": torch.float32},
        {"residual": torch.float16, "weight": torch.float32, "offset": 1.0},
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
    x, weight, *residual = leaves
    dys = [torch.randn_like(x) for _ in range(1 + len(residual))]

    def run(fn: Any) -> list[torch.Tensor]:
        out = fn(x, weight, 1e-6, residual[0] if residual else None, 0.0)
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


def tensors(rows: int, features: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, features, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(features, device="cuda", dtype=dtype, requires_grad=True)
    return x, weight, torch.randn_like(x), torch.randn_like(x).requires_grad_()


def test_misaligned_pointers() -> None:
    flat = torch.randn(1 + 64 * 512, device="cuda", dtype=torch.bfloat16)
    x = flat[1:].view(64, 512)
    assert x.data_ptr() % 16 == 2
    assert torch.equal(candidate(x, None, 1e-6, None, 0.0), candidate(x.clone(), None, 1e-6, None, 0.0))


def test_second_call_goes_straight_to_the_driver_and_agrees() -> None:
    """The remembered launch must not remember values: other tensors, another eps and offset."""
    for eps, offset in ((1e-6, 0.0), (1e-2, 1.0), (0.5, -2.0)):
        x, weight, dy, residual = tensors(50, 384)
        out = candidate(x, weight, eps, residual, offset)
        got = torch.autograd.grad(out, (x, weight, residual), (dy, dy))
        plain = [t.detach().clone().requires_grad_() for t in (x, weight, residual)]
        want_out = OP.reference(plain[0].double(), plain[1].double(), eps, plain[2].double(), offset)
        want = torch.autograd.grad(want_out, plain, (dy.double(), dy.double()))
        for a, b in zip((*out, *got), (*want_out, *want), strict=True):
            assert ((a.double() - b.double()).norm() / b.double().norm()).item() < 6e-3


def test_graph_capture() -> None:
    x, weight, dy, residual = tensors(257, 1024)

    def step() -> list[torch.Tensor]:
        y, s = candidate(x, weight, 1e-6, residual, 0.0)
        return [y.detach(), s.detach(), *torch.autograd.grad((y, s), (x, weight, residual), (dy, dy))]

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


@pytest.mark.parametrize("with_residual", [False, True])
def test_torch_compile_with_dynamic_lengths(with_residual: bool) -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        out = candidate(x * 2, weight, 1e-6, residual, 0.0)
        return out if residual is None else (out[0] + 1, out[1])

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (8, 33, 128, 57):
            x, weight, dy, residual = tensors(rows, 384)
            third = residual if with_residual else None
            wanted = (x, weight, residual) if with_residual else (x, weight)
            results = []
            for fn in (model, compiled):
                out = fn(x, weight, third)
                outs = list(out) if with_residual else [out]
                results.append(outs + list(torch.autograd.grad(outs, wanted, [dy] * len(outs))))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_public_call_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    x, weight, _, _ = tensors(64, 384)
    compiled = torch.compile(lambda x, w: rms_norm(x, w, impl="triton"), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), rms_norm(x, weight, impl="triton"))


def test_opcheck() -> None:
    x, weight, dy, residual = tensors(20, 384)
    wide = residual.detach().float().requires_grad_()
    for scale in (weight, None):
        torch.library.opcheck(normalize.traced.forward, (x, scale, 1e-6, 0.0, True, ""))
        for other in (residual, wide):
            torch.library.opcheck(add_normalize.traced.forward, (x, scale, 1e-6, other, 0.0, True, ""))
    x, weight, residual, wide = (t.detach() for t in (x, weight, residual, wide))
    given = (dy, x, weight, 1e-6, 0.0, x, weight, [True, True], "")
    torch.library.opcheck(normalize.traced.backward, given)
    for other, arrives, wants in (
        (residual, (dy, None), [True, True, False]),
        (residual, (dy, dy), [True, False, True]),
        (wide, (dy, dy.float()), [True, True, True]),
        (wide, (None, dy.float()), [False, False, True]),
    ):
        given = (*arrives, weight, x + other, 1e-6, 0.0, x, weight, other, wants, "")
        torch.library.opcheck(add_normalize.traced.backward, given)


def test_autocast_changes_nothing() -> None:
    x, weight, _, residual = tensors(33, 512)
    with torch.autocast("cuda", torch.float16):
        for name in ("eager", "triton"):
            y, s = OP.candidate(name).implementation(x, weight.float(), 1e-6, residual.float(), 0.0)
            assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    x, weight, dy, _ = tensors(5000, 1024)
    runs = [torch.autograd.grad(rms_norm(x, weight, impl="triton"), (x, weight), dy) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_more_than_2_to_the_31_elements() -> None:
    rows, features = (1 << 31) // 4096 + 5, 4096
    x = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    weight = torch.randn(features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = candidate(x, weight, 1e-6, None, 0.0)
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
    x, weight, dy, _ = tensors(2048, 4096)
    want = torch.autograd.grad(candidate(x, weight, 1e-6, None, 0.0), (x, weight), dy)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = dy.clone()
        got = torch.autograd.grad(candidate(x, weight, 1e-6, None, 0.0), (x, weight), late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
