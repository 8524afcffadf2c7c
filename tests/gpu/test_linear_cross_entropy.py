"""linear_cross_entropy on a CUDA device: the grid, torch.compile, graphs, memory."""

from typing import Any

import pytest
import torch

from bakeoff.graphs import forbid_sync
from bakeoff.ops.linear_cross_entropy import OP, linear_cross_entropy
from bakeoff.ops.linear_cross_entropy.chunked import chunked
from bakeoff.ops.linear_cross_entropy.triton import linear_cross_entropy as kernels
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at, variants_of

MOST = 1 << 28
"""Logits of a case, of which the reference keeps several in float64: 2 GiB each."""


def shortened(case: Case) -> Case:
    """The case with so few rows that there are at most `MOST` logits: still several chunks."""
    x, N = case.x, min(case.target.numel, MOST // case.weight.shape[0])
    rows = {
        "x": TensorMeta.dense((N, x.shape[-1]), x.dtype, grad=x.requires_grad),
        "target": TensorMeta.dense((N,), case.target.dtype),
    }
    return Case({**case.args, **rows}, case.device, case.name)


CASES = [shortened(case) for case in OP.cases()]


@pytest.fixture
def room(case: Case, request: pytest.FixtureRequest) -> None:
    """Large cases one after the other."""
    if case.target.numel * case.weight.shape[0] > MOST // 2:
        request.getfixturevalue("much_memory")


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("candidate", ["triton", "chunked"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case: Case, candidate: str) -> None:
    _, deterministic = verify(OP, OP.candidate(candidate), yardsticks(OP, case))
    assert deterministic


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_every_tiling_passes_the_contest_verification(case: Case) -> None:
    candidate = OP.candidate("triton")
    for text in variants_of(candidate, case).get("forward", ()):
        verify(OP, at(candidate, text), yardsticks(OP, case))


def arguments(
    N: int = 300, D: int = 256, V: int = 20001, dtype: torch.dtype = torch.bfloat16, reduction: str = "mean"
) -> list[Any]:
    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") / 4).to(dtype).requires_grad_()

    target = torch.randint(V, (N,), device="cuda")
    target[::8] = -100
    return [random(N, D), random(V, D), target, random(V), -100, 0.1, 1e-4, 20.0, reduction]


def step(fn: Any, args: list[Any], dloss: torch.Tensor) -> list[torch.Tensor]:
    loss = fn(*args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, dloss)]


BLOCKS = "forward(rows=64,wide=0,block=2048,warps=4,each=1,classes=4096)"
BOUND = {
    "triton": kernels.bind("forward(rows=64,wide=1,block=8192,warps=16)"),
    "chunked": chunked.bind("forward(rows=64,wide=1)"),
    "triton blocks": kernels.bind(BLOCKS),
    "triton head": kernels.bind(BLOCKS[:-1] + ",head=128)"),
    "chunked blocks": chunked.bind("forward(rows=64,wide=0,classes=4096)"),
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_capture_without_waiting_for_the_device(reduction: str, name: str) -> None:
    args, fn = arguments(reduction=reduction), BOUND[name]
    dloss = torch.randn(300 if reduction == "none" else (), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(fn, args, dloss)
        with forbid_sync():
            step(fn, args, dloss)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(fn, args, dloss)
    with torch.no_grad():
        args[0].normal_()
        args[2].random_(20001)
        dloss.normal_()
    graph.replay()
    for mine, want in zip(captured, step(fn, args, dloss), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torch_compile_whole_with_any_length(reduction: str) -> None:
    torch._dynamo.reset()

    def model(x: Any, weight: Any, target: Any, bias: Any, *_: Any) -> Any:
        return linear_cross_entropy(
            x, weight, target, bias=bias, z_loss=1e-4, reduction=reduction, impl="triton"
        )

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for N in (64, 133, 300):
        args = arguments(N, reduction=reduction)
        dloss = torch.randn(N if reduction == "none" else (), device="cuda")
        for mine, want in zip(step(compiled, args, dloss), step(model, args, dloss), strict=True):
            assert torch.equal(mine, want)


def test_opcheck() -> None:
    args = [*arguments(33, 64, 1000), True, True, True]
    torch.library.opcheck(kernels.op.traced.forward, (*args, True, ""))


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("candidate", "most"), [(kernels, 1.5e9), (chunked, 2.1e9)], ids=["triton", "chunked"]
)
def test_memory_of_the_largest_case(candidate: Any, most: float) -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(131072, 4096, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_()
    target = torch.randint(131072, (8192,), device="cuda")
    rest = (None, -100, 0.0, 0.0, None, "mean")
    for _ in range(3):  # the third goes past the planner
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        candidate(x, weight, target, *rest).backward()
        assert torch.cuda.max_memory_allocated() - start < most


def test_what_is_no_class_gives_nan_in_its_row_alone() -> None:
    args = arguments(reduction="none")
    args[2][5], args[2][6] = 20001, -7
    with torch.no_grad():
        loss = kernels(*args)
    assert loss.isnan().nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("N", [37, 300])
def test_blocks_of_classes_give_what_chunks_give(N: int) -> None:
    """With logits that are all kept and that are made twice, an odd last block, a short tail and none."""
    args, dloss = arguments(N), torch.tensor(1.0, device="cuda")
    want = step(kernels.bind(f"forward(rows={N},wide=1,block=8192,warps=16)"), args, dloss)
    for classes in (1024, 4096, 20032):
        variant = f"forward(rows={N},wide=0,block=2048,warps=4,each=1,classes={classes})"
        for mine, other in zip(step(kernels.bind(variant), args, dloss), want, strict=True):
            assert ((mine.double() - other.double()).norm() / other.double().norm()).item() < 1e-2


@pytest.mark.parametrize("each", [1, 2, 8, 16])
@pytest.mark.parametrize("V", [13, 64, 200, 256])
def test_several_rows_a_program_give_what_one_gives(V: int, each: int) -> None:
    args, dloss = arguments(301, 64, V), torch.tensor(1.0, device="cuda")
    one, several = (
        step(kernels.bind(f"forward(rows=301,wide=0,block=256,warps={warps},each={rows})"), args, dloss)
        for rows, warps in ((1, 1), (each, 4))
    )
    for mine, other in zip(several, one, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("D", [64, 333])
@pytest.mark.parametrize(
    ("V", "block", "tile"), [(13, 64, 128), (200, 256, 64), (256, 256, 128), (500, 512, 32)]
)
def test_logits_in_registers_are_as_exact_as_logits_in_memory(V: int, block: int, tile: int, D: int) -> None:
    """Which are rounded; and so are losses, each and together."""
    for reduction in ("mean", "none"):
        args = arguments(301, D, V, reduction=reduction)
        dloss = torch.rand(args[2].shape if reduction == "none" else (), device="cuda")
        wide = [a.detach().double().requires_grad_() if i in (0, 1, 3) else a for i, a in enumerate(args)]
        exact = step(OP.reference, wide, dloss.double())
        joined, apart = (
            step(kernels.bind(f"forward(rows=301,wide=0,block={block},{how})"), args, dloss)
            for how in (f"warps=8,tile={tile}", "warps=4,each=2")
        )
        for mine, other, want in zip(joined, apart, exact, strict=True):
            error, allowed = (((t.double() - want).norm() / want.norm()).item() for t in (mine, other))
            if want.numel() < 100:  # so few that their rounding at the end is chance
                allowed = max(allowed, torch.finfo(mine.dtype).eps / 2)
            assert error <= 1.1 * allowed + 1e-6


def test_float32_sums_of_many_chunks_are_as_exact_as_one_product() -> None:
    """out_dtype of products over chunks, one after the other into one matrix."""
    args = arguments(4096, 128, 4096)
    exact = step(OP.reference, [a.detach().double().requires_grad_() if i in (0, 1, 3) else a
                                for i, a in enumerate(args)], torch.tensor(1.0, device="cuda"))  # fmt: skip
    errors = [
        ((step(kernels.bind(f"forward(rows={rows},wide=1,block=4096,warps=8)"), args,
               torch.tensor(1.0, device="cuda"))[2].double() - exact[2]).norm() / exact[2].norm()).item()
        for rows in (64, 4096)
    ]  # fmt: skip
    assert errors[0] < 1.1 * errors[1] + 1e-6
