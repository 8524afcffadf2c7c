"""memory_scan on a CUDA device: the op's grid, graphs, torch.compile, streaming without a synchronisation."""

import pytest
import torch

from bakeoff.apps.bench.memories import shortened
from bakeoff.graphs import forbid_sync
from bakeoff.ops.memory_scan import OP, MemoryState, memory_scan, memory_stream
from bakeoff.ops.memory_scan.large.scan import memory_scan as large
from bakeoff.ops.memory_scan.triton import memory_scan as candidate
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.verify import verify, yardsticks

SHORT = [shortened(case) for case in OP.cases()]


# Compiling the kernels for one more case takes ten seconds.
GRID = [
    pytest.param(
        case,
        marks=() if i == 0 or case.name == "odd" or case.read == "chunk" else pytest.mark.exhaustive,
        id=case.name,
    )
    for i, case in enumerate(SHORT)
]
LARGE = [case for case in SHORT if case.read == "chunk"]
"""One chunk, the same orthogonalised, one and a quarter."""


@pytest.mark.parametrize("name", ["chunked", "triton", "large"])
@pytest.mark.parametrize("case", GRID)
def test_the_grid_passes_the_contest_verification(case, name):
    candidate = OP.candidate(name)
    if candidate.supports is not None and candidate.supports(case):
        pytest.skip(candidate.supports(case))
    _, deterministic = verify(OP, candidate, yardsticks(OP, case))
    assert deterministic


def step(args, fn=candidate):
    outs = fn(*args)
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    return [*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs])]


def test_a_chunk_of_full_length_is_as_exact_as_eager():
    """Products in full tiles; the definition, token by token, would take minutes."""
    case = next(case for case in OP.cases() if case.name == "4x2048 512-512 chunk 2048")
    args = inputs(OP, case, 0)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
    exact = step(wide, OP.candidate("chunked").implementation)
    for mine, eager, truth in zip(
        step(args, large), step(args, OP.candidate("eager").implementation), exact, strict=True
    ):
        assert (mine - truth).abs().max() <= 2 * (eager - truth).abs().max() + 1e-6 * truth.abs().max()


@pytest.mark.parametrize(
    ("candidate", "case"),
    [(candidate, SHORT[0]), *((large, case) for case in LARGE)],
    ids=["triton", *(f"large {case.name}" for case in LARGE)],
)
def test_graph_capture_and_repetition(candidate, case):
    args, others = inputs(OP, case, 0), inputs(OP, case, 1)
    expected = step(others, candidate)
    assert all(x.isfinite().all() for x in expected)  # a comparison with NaN would say nothing
    step(args, candidate)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(args, candidate)
    graph.replay()
    assert not torch.equal(captured[0], expected[0])
    with torch.no_grad():
        for mine, other in zip(args[:-3], others[:-3], strict=True):
            mine.copy_(other)
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["eager", "chunked", "triton", "large"])
def test_nothing_waits_for_the_device(name):
    args = inputs(OP, LARGE[-1] if name == "large" else SHORT[0], 0)
    call = OP.candidate(name).implementation
    step(args, call)
    with forbid_sync():
        step(args, call)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("candidate", "case"), [(candidate, SHORT[0]), (large, LARGE[1])], ids=["triton", "large"]
)
def test_torch_compile_whole(candidate, case):
    args = inputs(OP, case, 0)
    tensors, how = args[:-3], args[-3:]
    compiled = torch.compile(lambda *t: candidate(*t, *how), fullgraph=True)
    for mine, plain in zip(step(tensors, compiled), step(args, candidate), strict=True):
        assert torch.equal(mine, plain)


def test_a_token_at_a_time_in_one_graph():
    q, k, v, *parts, lr, decay, forget = inputs(OP, SHORT[0].without_grad(), 0)[:-3]
    o, memory, _ = memory_scan(q, k, v, parts[:4], parts[4:], lr, decay, forget, 64)
    tokens = [x[:, :1].clone() for x in (q, k, v, lr, decay, forget)]
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    memories = tuple(p.clone() for p in parts[:4])
    state = MemoryState(
        memories, tuple(p.clone() for p in parts[4:]), tuple(p.clone() for p in memories), zero
    )

    def advance():
        out, new = memory_stream(*tokens, state, chunk=64)
        for old, fresh in zip(state[:3], new[:3], strict=True):
            for a, b in zip(old, fresh, strict=True):
                a.copy_(b)
        state.filled.copy_(new.filled)
        return out

    saved = [p.clone() for part in state[:3] for p in part]
    for _ in range(3):
        advance()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = advance()
    for old, start in zip([p for part in state[:3] for p in part], saved, strict=True):
        old.copy_(start)
    state.filled.zero_()
    outs = []
    for t in range(q.shape[1]):
        for place, x in zip(tokens, (q, k, v, lr, decay, forget), strict=True):
            place.copy_(x[:, t : t + 1])
        graph.replay()
        outs.append(out.clone())
    torch.testing.assert_close(torch.cat(outs, 1), o, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(state.memory, memory, rtol=5e-2, atol=5e-2)
