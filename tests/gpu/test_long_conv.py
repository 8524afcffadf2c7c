"""long_conv on a CUDA device: the op's grid at full size, graphs, torch.compile, autocast, huge tensors."""

import subprocess
import sys

import pytest
import torch

from bakeoff.kernels.variants import text
from bakeoff.ops.long_conv import OP, long_conv
from bakeoff.ops.long_conv.op import MOST_TAPS, MOST_TAPS_MAJOR
from bakeoff.ops.long_conv.reference import long_conv as reference
from bakeoff.select.contests.verify import verify, yardsticks

pytestmark = pytest.mark.parametrize("impl", ["direct", "toeplitz", "fft"])


def tensors(impl, B, T, C, L, dtype=torch.bfloat16, major=False, narrow=False):
    """u, h, skip and the gates; as many taps as `impl` can take."""
    L = min(L, MOST_TAPS_MAJOR if major else MOST_TAPS) if impl == "direct" else L

    def like_u():
        x = (
            torch.randn(B, C, T, device="cuda").transpose(1, 2)
            if major
            else torch.randn(B, T, C, device="cuda")
        )
        return x.to(dtype).requires_grad_()

    kind = dtype if narrow else torch.float32
    h = (torch.randn(C, L, device="cuda") / L**0.5).to(kind).requires_grad_()
    return [like_u(), h, torch.randn(C, device="cuda").to(kind).requires_grad_(), like_u(), like_u()]


def step(args, impl):
    out = long_conv(args[0], args[1], skip=args[2], gate_in=args[3], gate_out=args[4], impl=impl)
    return (out, *torch.autograd.grad(out, args, torch.ones_like(out)))


def check(found, args):
    """`found`, of `step`, against float64."""
    wide = [a.detach().double().requires_grad_() for a in args]
    out = reference(*wide, True)
    want = (out, *torch.autograd.grad(out, wide, torch.ones_like(out)))
    for mine, exact in zip(found, want, strict=True):
        error = (mine.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
        assert error < max(4 * torch.finfo(args[0].dtype).eps, 5e-6)


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case, impl):
    if impl == "toeplitz" and case.u.shape[1] > 8192:
        pytest.skip("products with whole matrices are for shorter rows")
    if reasons := OP.candidate(impl).reasons(case):
        pytest.skip(reasons[0])
    _, deterministic = verify(OP, OP.candidate(impl), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 37, 5, 9), (2, 129, 45, 200), (2, 640, 8, 640), (5, 4096, 33, 4)], ids=str
)
def test_odd_shapes(shape, dtype, major, impl):
    args = tensors(impl, *shape, dtype, major, narrow=dtype == torch.float16)
    check(step(args, impl), args)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [10_000, 16_384, 32_768, 65_536])
def test_rows_longer_than_the_chip_holds(T, B, impl):
    for L in (2000, T):
        args = tensors(impl, B, T, 5, L, torch.float32, major=True)
        check(step(args, impl), args)


def test_rows_of_any_alignment(impl):
    """Steps and starts that are no multiples of 16 bytes, and a gradient with channels side by side."""
    for T, row, first in ((4000, 4096, 0), (4096, 4104, 1), (4095, 4096, 8), (1001, 1001, 0)):
        args = tensors(impl, 2, T, 40, 4, major=True)
        for place in (0, 3, 4):
            whole = torch.randn(2 * 40 * row + first, device="cuda").bfloat16()
            args[place] = whole[first:].view(2, 40, row)[..., :T].mT.requires_grad_()
        wide = [a.detach().double().requires_grad_() for a in args]
        out = reference(*wide, True)
        dout = torch.randn(2, T, 40, device="cuda").bfloat16()
        want = torch.autograd.grad(out, wide, dout.double())
        mine = long_conv(args[0], args[1], skip=args[2], gate_in=args[3], gate_out=args[4], impl=impl)
        for got, exact in zip(torch.autograd.grad(mine, args, dout), want, strict=True):
            assert (got.double() - exact).abs().max() <= 2**-6 * exact.abs().max()


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
def test_graph_capture_and_repetition(impl, major):
    torch.use_deterministic_algorithms(True)
    args = tensors(impl, 4, 500, 64, 500, major=major)
    step(args, impl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(args, impl)
    with torch.no_grad():
        args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    for a, b in zip(captured, step(args, impl), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
def test_torch_compile_whole_with_any_length(impl, major):
    def call(u, h, skip, gate_in, gate_out):
        return long_conv(u, h, skip=skip, gate_in=gate_in, gate_out=gate_out, impl=impl)

    compiled = torch.compile(call, fullgraph=True)
    for T in (16, 65, 200, 301):
        args = tensors(impl, 2, T, 40, 150, major=major)
        out = compiled(*args)
        got = (out, *torch.autograd.grad(out, args, torch.ones_like(out)))
        for a, b in zip(got, step(args, impl), strict=True):
            assert torch.equal(a, b)


def test_torch_compile_with_a_length_that_is_too_long_for_the_chip(impl):
    """In the graph that shorter ones made, of a filter as long as the longest."""

    def call(u, h, skip, gate_in, gate_out):
        return long_conv(u, h, skip=skip, gate_in=gate_in, gate_out=gate_out, impl=impl)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for T in (100, 300_001):
        with torch.compiler.set_stance("fail_on_recompile" if T > 100 else "default"):
            args = tensors(impl, 2, T, 3, 300_001)
            out = compiled(*args)
            check((out, *torch.autograd.grad(out, args, torch.ones_like(out))), args)


def test_torch_compile_without_gates(impl):
    """Nothing is kept for a gate then."""
    u, h, *_ = tensors(impl, 2, 200, 40, 30)
    compiled = torch.compile(lambda u, h: long_conv(u, h, impl=impl), fullgraph=True)
    found = []
    for call in (compiled, lambda u, h: long_conv(u, h, impl=impl)):
        out = call(u, h)
        found.append((out, *torch.autograd.grad(out.square().sum(), (u, h))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_backward_comes_first_of_all_in_its_thread(impl):
    """Nothing else has run there then: a process of its own, whose inputs need no packing."""
    code = f"""
import torch
from bakeoff.ops import long_conv
u = torch.randn(2, 16, 256, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
h = torch.randn(16, 4, device="cuda").requires_grad_()
y, want = (long_conv(u, h, impl=impl) for impl in ({impl!r}, "eager"))
dy = torch.randn_like(y)
du, dh = torch.autograd.grad(y, (u, h), dy)
for mine, plain in zip((du, dh), torch.autograd.grad(want, (u, h), dy), strict=True):
    torch.testing.assert_close(mine, plain, rtol=1e-2, atol=5e-2)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_opcheck(impl):
    forward = OP.candidate(impl).implementation.traced.forward
    args = tensors(impl, 2, 70, 40, 30)
    torch.library.opcheck(forward, (*args, True, True, ""))
    torch.library.opcheck(forward, (*(a.detach() for a in args), True, False, ""))


def test_every_variant(impl):
    """Against float64, at a length of its own and at another."""
    major, channels = impl != "direct", 64
    for T in (4096, 1000):
        L = 4 if impl == "direct" else 500
        args = tensors(impl, 3, T, channels, L, major=major)
        op = OP.candidate(impl).implementation
        variants = op.variants(OP.case((*tensors(impl, 3, 4096, channels, L, major=major), True)))
        for axis, tilings in variants.items():
            for tiling in tilings:
                call = op.bind(text({axis: tiling}))
                out = call(*args, True)
                check((out, *torch.autograd.grad(out, args, torch.ones_like(out))), args)


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
def test_repeated_calls_side_streams_and_other_threads(impl, major):
    """From the third call of a kind on launches are replayed: on the current stream, in whatever thread, and
    by the planner where an address isn't aligned."""
    args = tensors(impl, 2, 1024, 64, 4, major=major)
    want = step(args, impl)
    for _ in range(3):
        for a, b in zip(step(args, impl), want, strict=True):
            assert torch.equal(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(args, impl)
    stream.synchronize()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    moved = [torch.empty(a.numel() + 1, device="cuda", dtype=a.dtype)[1:] for a in args]
    moved = [m.as_strided(a.shape, a.stride()).copy_(a.detach()) for m, a in zip(moved, args, strict=True)]
    check(step([a.detach().requires_grad_() for a in moved], impl), args)


def test_autocast_does_not_narrow_it(impl):
    args = tensors(impl, 2, 100, 40, 100, torch.float32)
    outside = step(args, impl)
    with torch.autocast("cuda", torch.bfloat16):
        inside = step(args, impl)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_more_than_two_to_the_31_elements(impl):
    with torch.no_grad():
        T, C = 2048, 1024
        B = (1 << 31) // (T * C) + 2
        h = torch.randn(C, MOST_TAPS_MAJOR if impl == "direct" else 64, device="cuda", dtype=torch.bfloat16)
        for shape in ((B, T, C), (B, C, T)):
            u = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            u = u if shape[2] == C else u.transpose(1, 2)
            y = long_conv(u, h, impl=impl)
            for b in (0, B - 1):  # alone a sequence is rounded otherwise than as one of a pair
                torch.testing.assert_close(
                    y[b : b + 1], long_conv(u[b : b + 1], h, impl=impl), rtol=2**-7, atol=1e-4
                )
            del u, y
