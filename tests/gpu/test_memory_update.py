"""memory_update's Triton candidate on a CUDA device: the grid, odd shapes, graphs, compiled, in place."""

import pytest
import torch
from torch import Tensor

from bakeoff.graphs import forbid_sync
from bakeoff.kernels import variants
from bakeoff.kernels.counter import launches
from bakeoff.ops import memory_update_
from bakeoff.ops.memory_update import IN_PLACE, OP
from bakeoff.ops.memory_update.op import GATES, MEMORY, MOMENTUM
from bakeoff.ops.memory_update.reference import memory_update as reference
from bakeoff.ops.memory_update.triton import memory_update as candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.verify import verify, yardsticks

SHAPE = (2, 300, 64, 128, 64)
"""Of most tests, so that kernels are compiled once."""


def drawn(G, N, D, H, V, dtype=torch.bfloat16, max_norm=0.5, reduction="sum"):
    """The arguments of a candidate; row weights too."""
    shapes = {"k": (G, N, D), "v": (G, N, V), "row_weight": (G, N)} | dict.fromkeys(GATES, (G,))
    for names in (MEMORY, MOMENTUM):
        shapes |= dict(zip(names, ((G, H, D), (G, H), (G, V, H), (G, V)), strict=True))
    args = {
        name: TensorMeta.dense(shape, dtype if name in ("k", "v") else torch.float32, grad=True)
        for name, shape in shapes.items()
    }
    args |= {"max_norm": max_norm, "reduction": reduction}
    return inputs(OP, Case({name: args[name] for name in OP.params}, "cuda"), 0)


def step(args, fn=candidate):
    *made, ok = fn(*args)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    arriving = [torch.sin(torch.arange(t.numel(), device=t.device)).view(t.shape).to(t.dtype) for t in made]
    return [*made, ok, *torch.autograd.grad(made, leaves, arriving)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPE, torch.bfloat16),
        *[
            pytest.param(shape, dtype, marks=pytest.mark.exhaustive)
            for shape in [
                SHAPE,
                (1, 1, 1, 1, 1),
                (2, 37, 45, 33, 20),
                (3, 129, 100, 260, 16),
                (9, 64, 128, 64, 130),
            ]
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
    ],
    ids=str,
)
def test_results_and_gradients(shape, dtype):
    args = drawn(*shape, dtype)
    wide = [a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in args]
    bound = 1e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
    for i, (mine, exact) in enumerate(zip(step(args), step(wide, reference), strict=True)):
        if mine.dtype == torch.bool:
            assert torch.equal(mine, exact)
        else:
            assert (mine - exact).norm() <= bound * exact.norm().clamp(min=1e-3), i


@pytest.mark.exhaustive
def test_float32_keeps_its_precision_where_tf32_is_allowed(monkeypatch):
    args = drawn(*SHAPE, torch.float32)
    want = step(args)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(step(args), want, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_variant_is_as_exact_as_the_default(dtype):
    args = drawn(2, 300, 128, 256, 130, dtype)
    want = step(args)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for axis, tilings in candidate.variants(OP.case(args)).items():
        for tiling in tilings[1:]:
            got = step(args, candidate.bind(variants.text({axis: tiling})))
            for mine, default in zip(got, want, strict=True):
                assert (mine.float() - default.float()).norm() <= bound * default.float().norm(), tiling


def test_graph_capture_and_repetition():
    args = drawn(*SHAPE)
    for _ in range(3):
        step(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(args)
    with torch.no_grad():
        args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    for mine, again in zip(captured, step(args), strict=True):
        assert torch.equal(mine, again)


def test_no_waiting_for_the_device_and_few_launches():
    args = drawn(*SHAPE)
    with forbid_sync():
        for _ in range(3):
            before = launches()
            made = candidate(*args)
            forward = launches() - before
            torch.autograd.grad(made[0].sum(), args[0])
    assert forward == 6  # five in float32


def test_torch_compile_whole():
    compiled = torch.compile(lambda *args: candidate(*args)[:], fullgraph=True)
    for N in (16, 65, 300):
        args = drawn(2, N, *SHAPE[2:])
        for mine, theirs in zip(step(args, compiled), step(args), strict=True):
            assert torch.equal(mine, theirs)


def test_opcheck():
    args = drawn(*SHAPE)
    torch.library.opcheck(candidate.op.traced.forward, (*args, True, ""))


def test_in_place_is_the_same_step():
    args = drawn(*SHAPE)
    plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
    plain[0][1, 5, 5] = float("nan")
    want = candidate(*plain)
    written = [t.clone() for t in plain[2:10]]
    skipped = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(3):  # planned, recorded, replayed
        for target, source in zip(written, plain[2:10], strict=True):
            target.copy_(source)
        told = memory_update_(
            *plain[:2], written[:4], written[4:], *plain[10:13], max_norm=0.5, reduction="sum",
            row_weight=plain[15], skipped=skipped, impl="triton",
        )  # fmt: skip
        for mine, theirs in zip((*written, *told), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert skipped.tolist() == [0, 3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["manual", "triton"])
@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case, name):
    _, deterministic = verify(OP, OP.candidate(name), yardsticks(OP, case))
    assert deterministic


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", IN_PLACE.cases(), ids=lambda case: case.name)
def test_the_grid_in_place(case):
    verify(IN_PLACE, IN_PLACE.candidate("triton"), yardsticks(IN_PLACE, case))
