"""swiglu's Triton candidate on a CUDA device: the grid, every dtype and layout, torch.compile, graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.swiglu import OP, swiglu
from bakeoff.ops.swiglu.reference import swiglu as reference
from bakeoff.ops.swiglu.triton import swiglu as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks

TRITON = OP.candidate("triton")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMS = ("packed", "separate", "halves")


def make(rows: int, features: int, dtype: torch.dtype, form: str, pad: int = 0) -> Case:
    """A case with gradients, rows `pad` elements further apart than they need be."""
    if form == "packed":
        gate, up = TensorMeta((rows, 2 * features), dtype, (2 * features + pad, 1), True), None
    else:
        stride = features * (2 if form == "halves" else 1) + pad
        gate = up = TensorMeta((rows, features), dtype, (stride, 1), True)
    return Case({"gate": gate, "up": up}, "cuda:0")


def passes(case: Case) -> None:
    """The selector's own verification: forward, every gradient, guard bands, poison, unchanged inputs."""
    assert TRITON.reasons(case) == []
    _, deterministic = verify(OP, TRITON, yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4096),
        (2, 33),
        (7, 384),
        (1, 1),
        (300, 1),
        (300, 512),
        (129, 1000),
        (64, 1012),
        (33, 2752),
        (5, 70000),
    ],
    ids=str,
)
def test_shapes(shape: tuple[int, int], dtype: torch.dtype, form: str) -> None:
    passes(make(*shape, dtype, form))


@pytest.mark.parametrize("pad", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("form", FORMS)
def test_distances_between_rows(form: str, pad: int) -> None:
    passes(make(37, 1008, torch.bfloat16, form, pad))


def tensors(
    *shape: int, form: str = "packed", dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Leaves gate and up for a y of `shape`, and a gradient for it."""
    both = torch.randn(*shape[:-1], 2 * shape[-1], device="cuda", dtype=dtype)
    dy = torch.randn(*shape, device="cuda", dtype=dtype)
    if form == "packed":
        return both.requires_grad_(), None, dy
    gate, up = (half.detach() for half in both.chunk(2, -1))
    if form == "separate":
        gate, up = gate.contiguous(), up.contiguous()
    return gate.requires_grad_(), up.requires_grad_(), dy


def step(fn: Callable[..., Any], gate: Any, up: Any, dy: torch.Tensor) -> list[torch.Tensor]:
    y = fn(gate, up)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (gate, up) if t is not None], dy)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_each_float32_element_is_exact() -> None:
    """By itself, not beside larger ones: tl.exp alone would be off by 3e-6 at -75."""
    gate = torch.cat([torch.linspace(-75, 40, 12701), torch.logspace(-30, 1, 1000)]).cuda().requires_grad_()
    up = torch.randn_like(gate).requires_grad_()
    dy = torch.randn_like(gate.detach())
    got = step(candidate, gate, up, dy)
    exact = step(reference, *(t.detach().double().requires_grad_() for t in (gate, up)), dy.double())
    turns = (gate.detach() + 1.2784645).abs() < 0.5  # there dgate's own sum cancels
    for index, (mine, want) in enumerate(zip(got, exact, strict=True)):
        error = (mine.double() - want).abs() / want.abs()
        assert error[~turns if index == 1 else slice(None)].max() < (2e-6 if index == 1 else 1e-6)


@pytest.mark.parametrize("offset", [1, 4])
def test_misaligned_pointers(offset: int) -> None:
    flat = torch.randn(offset + 64 * 512, device="cuda", dtype=torch.bfloat16)
    gate = flat[offset:].view(64, 512).requires_grad_()
    assert gate.data_ptr() % 16
    dy = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    copy = gate.detach().clone().requires_grad_()
    same(step(candidate, gate, None, dy), step(candidate, copy, None, dy))


@pytest.mark.parametrize("form", FORMS)
def test_one_launch_each_way(form: str) -> None:
    gate, up, dy = tensors(64, 1008, form=form)
    before = launches()
    y = candidate(gate, up)
    assert launches() == before + 1
    torch.autograd.grad(y, [t for t in (gate, up) if t is not None], dy)
    assert launches() == before + 2


def test_memory_is_the_results_and_nothing_else() -> None:
    """The packed form's gradient is one tensor, written once: no halves that are put together."""
    gate, _, dy = tensors(4096, 4096)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    y = candidate(gate, None)
    (dgate,) = torch.autograd.grad(y, gate, dy)
    assert torch.cuda.max_memory_allocated() - start == y.nbytes + dgate.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_graph_capture(form: str) -> None:
    gate, up, dy = tensors(257, 1008, form=form)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(candidate, gate, up, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(candidate, gate, up, dy)
    with torch.no_grad():
        for t in (gate, up, dy):
            if t is not None:
                t.normal_()
    graph.replay()
    same(captured, step(candidate, gate, up, dy))


@pytest.mark.parametrize("form", FORMS)
def test_torch_compile_whole_with_any_length(form: str) -> None:
    torch._dynamo.reset()

    def model(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return swiglu(gate, up, impl="triton") * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (16, 33, 64, 100):
        gate, up, dy = tensors(2, rows, 1008, form=form)
        same(step(compiled, gate, up, dy), step(model, gate, up, dy))


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str) -> None:
    gate, up, dy = tensors(20, 384, form=form)
    torch.library.opcheck(candidate.traced.forward, (gate, up, True, ""))
    given = (gate.detach(), None if up is None else up.detach())
    for wanted in ([True, True], [True, False], [False, True]):
        if up is not None or wanted == [True, False]:
            torch.library.opcheck(candidate.traced.backward, (dy, *given, *given, wanted, ""))


def test_autocast() -> None:
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    project = torch.nn.Linear(64, 2 * 128, device="cuda")
    results = {}
    for impl in ("triton", "eager"):
        with torch.autocast("cuda", torch.bfloat16):
            y = swiglu(project(x), impl=impl)
        assert y.dtype == torch.bfloat16
        results[impl] = [y, *torch.autograd.grad(y.float().square().sum(), x)]
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    gate, up, dy = tensors(5000, 1008)
    first = step(candidate, gate, up, dy)
    for _ in range(2):
        same(step(candidate, gate, up, dy), first)


@pytest.mark.parametrize("form", ["packed", "separate"])
@pytest.mark.parametrize(
    ("rows", "features"), [((1 << 19) + 5, 4096), (2, (1 << 30) + 40), (1, (1 << 31) + 40)]
)
def test_more_than_two_to_the_31_elements(rows: int, features: int, form: str) -> None:
    """Offsets past 2^31 elements, in many rows, in two whose columns take 64 bits, and in a single one."""
    shape = (rows, features * (2 if form == "packed" else 1))
    gate = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    up = None if form == "packed" else gate.detach().flip(-1).requires_grad_()
    y = candidate(gate, up)
    dy = y.detach()
    got = torch.autograd.grad(y, [t for t in (gate, up) if t is not None], dy)
    for piece in (slice(0, 2048), slice(-2048, None)):
        row = 0 if piece.start == 0 else -1
        halves = [gate[row, :features], gate[row, features:]] if up is None else [gate[row], up[row]]
        slopes = [got[0][row, :features], got[0][row, features:]] if up is None else [g[row] for g in got]
        wide = [half.detach()[piece].double().requires_grad_() for half in halves]
        want = reference(*wide)
        found = [y[row, piece], *(slope[piece] for slope in slopes)]
        exact = [want, *torch.autograd.grad(want, wide, dy[row, piece].double())]
        for mine, truth in zip(found, exact, strict=True):
            assert ((mine.double() - truth).norm() / truth.norm()).item() < 4e-3


def test_other_stream() -> None:
    """Launches go to the caller's current stream."""
    gate, up, dy = tensors(2048, 4096)
    want = step(candidate, gate, up, dy)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        got = step(candidate, gate, up, dy.clone())
    stream.synchronize()
    same(got, want)
