"""qkv_rotary on a CUDA device: the op's grid at full size, layouts, graphs, torch.compile."""

import pytest
import torch

from bakeoff.graphs import forbid_sync
from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops.qkv_rotary import OP, qkv_rotary
from bakeoff.ops.qkv_rotary.triton import qkv_rotary as candidate
from bakeoff.ops.rotary import rotary, rotary_tables
from bakeoff.select.contests.verify import verify, yardsticks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
    assert deterministic


def made(B, T, H, HK, D, dtype=torch.bfloat16, normed=False):
    qkv = torch.randn(B, T, H + 2 * HK, D, device="cuda", dtype=dtype, requires_grad=True)
    weights = [(1 + 0.3 * torch.randn(D, device="cuda")).requires_grad_() for _ in "qk"] if normed else []
    return qkv, weights


def step(qkv, weights, cos, sin, dys, **how):
    names = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    outputs = qkv_rotary(qkv, cos, sin, **names, **how)
    return (*outputs, *torch.autograd.grad(outputs, (qkv, *weights), dys))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_major", [False, True])
def test_it_equals_rotary_of_two_parts(dtype, normed, head_major):
    """Results to the bit, the joint gradient to rounding, whatever layout gradients have."""
    for B, T, H, HK, D, R in ((2, 37, 5, 3, 20, 20), (1, 1, 12, 4, 96, 40), (3, 1290, 8, 1, 256, 256)):
        qkv, weights = made(B, T, H, HK, D, dtype, normed)
        cos, sin = rotary_tables(T + 5, R, device="cuda")
        sizes = ((B, T, H, D), (B, T, HK, D), (B, T, HK, D))
        if head_major:
            dys = [
                torch.randn(b, h, t, d, device="cuda", dtype=dtype).transpose(1, 2) for b, t, h, d in sizes
            ]
        else:
            dys = [torch.randn(*size, device="cuda", dtype=dtype) for size in sizes]
        got = step(qkv, weights, cos, sin, dys, kv_heads=HK, impl="triton")
        q, k, v = qkv.split((H, HK, HK), dim=2)
        names = dict(zip(("q_weight", "k_weight"), weights, strict=False))
        apart = (*rotary(q, k, cos, sin, impl="triton", **names), v)
        want = (*apart, *torch.autograd.grad(apart, (qkv, *weights), dys))
        for mine, other in zip(got[:3], want[:3], strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(got[3:], want[3:], strict=True):
            error = (mine.double() - other.double()).abs().max() / other.double().abs().max()
            assert error < max(torch.finfo(mine.dtype).eps, 2e-6)
        assert got[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("normed", [False, True])
def test_every_tiling_gives_the_same_gradient(normed):
    qkv, weights = made(2, 515, 6, 2, 48, normed=normed)
    cos, sin = rotary_tables(515, 48, device="cuda")
    case = next(c for c in OP.cases() if (c.q_weight is not None) == normed)
    given = (cos, sin, 2, False, None, *(weights or (None, None)), 1e-6, 0.0)
    results = []
    for direction, tilings in candidate.variants(case).items():
        for tiling in tilings:
            outputs = candidate.bind(text({direction: tiling}))(qkv, *given)
            results.append((*outputs, *torch.autograd.grad(outputs, qkv, [x.detach() for x in outputs])))
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, again)


@pytest.mark.parametrize("normed", [False, True])
def test_a_step_is_captured_without_a_wait(normed):
    qkv, weights = made(4, 257, 8, 8, 64, normed=normed)
    cos, sin = rotary_tables(257, 64, device="cuda")
    dys = [torch.randn(4, 257, 8, 64, device="cuda", dtype=qkv.dtype) for _ in "qkv"]
    want = step(qkv, weights, cos, sin, dys, impl="triton")
    before = launches()
    with forbid_sync():
        step(qkv, weights, cos, sin, dys, impl="triton")
    assert launches() - before == (3 if normed else 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(qkv, weights, cos, sin, dys, impl="triton")
    graph.replay()
    for mine, other in zip(captured, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("normed", [False, True])
def test_torch_compile_keeps_one_graph(normed):
    qkv, weights = made(2, 130, 4, 4, 64, normed=normed)
    cos, sin = rotary_tables(130, 64, device="cuda")
    dys = [torch.randn(2, 130, 4, 64, device="cuda", dtype=qkv.dtype) for _ in "qkv"]
    names = dict(zip(("q_weight", "k_weight"), weights, strict=False))

    def outputs(x):
        return qkv_rotary(x * 1, cos, sin, impl="triton", **names)

    compiled = torch.compile(outputs, fullgraph=True)
    found = [(*y, *torch.autograd.grad(y, (qkv, *weights), dys)) for y in (outputs(qkv), compiled(qkv))]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
