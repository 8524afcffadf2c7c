"""pole_scan on a CUDA device: the op's grid at full size, graphs, torch.compile, autocast, huge tensors."""

import math

import pytest
import torch

from bakeoff.kernels import variants
from bakeoff.kernels.counter import launches
from bakeoff.ops.pole_scan import OP, pole_scan
from bakeoff.ops.pole_scan.reference import pole_scan as reference
from bakeoff.ops.pole_scan.triton import pole_scan as candidate
from bakeoff.select.contests.verify import verify, yardsticks

TAKEN = [case for case in OP.cases() if case.coef.shape[1] <= 16]


def tensors(B, T, C, K, dtype=torch.bfloat16):
    u = torch.randn(B, T, C, device="cuda").to(dtype)
    log_radius = -(10 ** (3.5 * torch.rand(C, K, device="cuda") - 4))
    theta = math.pi * torch.rand(C, K, device="cuda")
    coef = torch.randn(C, K, device="cuda", dtype=torch.complex64)
    state = torch.randn(B, C, K, device="cuda", dtype=torch.complex64)
    return [a.requires_grad_() for a in (u, log_radius, theta, coef, state)]


def step(args, impl="triton"):
    y, end = pole_scan(*args[:4], state=args[4], impl=impl)
    return (y, end, *torch.autograd.grad((y, end), args, (torch.ones_like(y), torch.ones_like(end))))


@pytest.mark.parametrize("name", ["triton", "scan"])
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case, name):
    _, deterministic = verify(OP, OP.candidate(name), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 37, 45, 3), (3, 129, 100, 16), (2, 64, 128, 8)], ids=str)
def test_odd_shapes(shape, dtype):
    args = tensors(*shape, dtype)
    wide = [
        a.detach().to(torch.complex128 if a.is_complex() else torch.float64).requires_grad_() for a in args
    ]
    y, end = reference(*wide)
    want = (y, end, *torch.autograd.grad((y, end), wide, (torch.ones_like(y), torch.ones_like(end))))
    for mine, exact in zip(step(args), want, strict=True):
        error = (mine.to(exact.dtype) - exact).abs().max() / exact.abs().max()
        assert error < max(torch.finfo(mine.dtype).eps, 5e-6)


def test_decoding_is_one_pass():
    with torch.no_grad():
        u, *poles, _ = tensors(4, 300, 64, 8, torch.float32)
        y, end = pole_scan(u, *poles, impl="triton")
        first, z = pole_scan(u[:, :200], *poles, impl="triton")
        parts = [first]
        for t in range(200, 300):
            part, z = pole_scan(u[:, t : t + 1], *poles, state=z, impl="triton")
            parts.append(part)
    assert (torch.cat(parts, 1) - y).abs().max() < 5e-6 * y.abs().max()
    assert (z - end).abs().max() < 5e-6 * end.abs().max()


def test_graph_capture_and_repetition():
    torch.use_deterministic_algorithms(True)
    args = tensors(4, 500, 64, 8)
    step(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(args)
    with torch.no_grad():
        args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    for a, b in zip(captured, step(args), strict=True):
        assert torch.equal(a, b)


def test_torch_compile_whole_with_any_length():
    compiled = torch.compile(lambda *a: pole_scan(*a[:4], state=a[4], impl="triton"), fullgraph=True)
    for T in (16, 65, 200, 301):
        args = tensors(2, T, 40, 8)
        got = compiled(*args)
        dys = [torch.ones_like(x) for x in got]
        for a, b in zip((*got, *torch.autograd.grad(got, args, dys)), step(args), strict=True):
            assert torch.equal(a, b)


def test_opcheck():
    args = tensors(2, 70, 40, 8)
    torch.library.opcheck(candidate.traced.forward, (*args, True, ""))
    plain = [a.detach() for a in args]
    y, end, *kept = candidate.traced.forward(*plain, True, "")
    for wanted in ([True] * 5, [False, True, False, False, True]):
        torch.library.opcheck(
            candidate.traced.backward, (y, end, plain[0], plain[3], *kept, *plain, wanted, "")
        )


@pytest.mark.parametrize("K", [3, 16])
def test_every_variant_is_as_exact_as_the_default(K):
    args = tensors(3, 300, 200, K, torch.float32)
    want = step(args)
    dys = [torch.ones_like(x) for x in want[:2]]
    for axis, tilings in candidate.variants(OP.case(args)).items():
        for tiling in tilings[1:]:
            got = candidate.bind(variants.text({axis: tiling}))(*args)
            for mine, default in zip((*got, *torch.autograd.grad(got, args, dys)), want, strict=True):
                assert (mine - default).abs().max() <= 5e-6 * default.abs().max(), (axis, tiling)


def test_one_position_is_one_launch():
    with torch.no_grad():
        u, *poles, state = tensors(4, 1, 64, 8)
        for _ in range(3):  # planned, recorded, replayed
            before = launches()
            y, end = candidate(u, *poles, state)
            assert launches() - before == 1
        want, last = pole_scan(u, *poles, state=state, impl="scan")
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(end, last, rtol=1e-5, atol=1e-5)


def test_autocast_does_not_narrow_it():
    args = tensors(2, 100, 40, 8, torch.float32)
    outside = step(args)
    with torch.autocast("cuda", torch.bfloat16):
        inside = step(args)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_more_than_two_to_the_31_elements():
    with torch.no_grad():
        T, C = 4096, 1024
        B = (1 << 31) // (T * C) + 2
        _, *poles, _ = tensors(1, 1, C, 1)
        u = torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16)
        y, end = pole_scan(u, *poles, impl="triton")
        for b in (0, B - 1):
            part, last = pole_scan(u[b : b + 1], *poles, impl="triton")
            assert torch.equal(y[b : b + 1], part)
            assert torch.equal(end[b : b + 1], last)
