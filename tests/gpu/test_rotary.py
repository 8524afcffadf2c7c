"""Rotary on a CUDA device: the op's grid at full size, graphs, torch.compile, autocast, huge tensors."""

import pytest
import torch

from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops.rotary import OP, kernels, rotary, rotary_tables
from bakeoff.ops.rotary.reference import reference
from bakeoff.ops.rotary.triton import rotary as candidate
from bakeoff.ops.rotary.triton import rotate
from bakeoff.select.contests.verify import verify, yardsticks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensors(B, T, H, HK, D, dtype=torch.bfloat16, form="dense"):
    if form == "head-major":
        q, k = (torch.randn(B, n, T, D, device="cuda", dtype=dtype).transpose(1, 2) for n in (H, HK))
    elif form == "fused":
        qkv = torch.randn(B, T, H + 2 * HK, D, device="cuda", dtype=dtype)
        q, k = qkv[:, :, :H], qkv[:, :, H : H + HK]
    else:
        q, k = (torch.randn(B, T, n, D, device="cuda", dtype=dtype) for n in (H, HK))
    return q.requires_grad_(), k.requires_grad_()


def step(q, k, cos, sin, dq, dk, **how):
    outputs = rotary(q, k, cos, sin, **how)
    return (*outputs, *torch.autograd.grad(outputs, (q, k), (dq, dk)))


@pytest.mark.parametrize(
    "case", [case for case in OP.cases() if case.q_weight is None], ids=lambda case: case.name
)
def test_the_grid_passes_the_contest_verification(case):
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "fused", "head-major"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_shapes_in_every_dtype_and_layout(dtype, form, interleaved):
    for B, T, H, HK, D, R in ((2, 37, 5, 3, 20, 20), (1, 1, 12, 4, 96, 40), (3, 129, 8, 1, 256, 256)):
        q, k = tensors(B, T, H, HK, D, dtype, form)
        cos, sin = rotary_tables(T + 5, R, device="cuda")
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        for ids in (None, torch.randint(T + 5, (B, T), device="cuda")):
            got = step(q, k, cos, sin, dq, dk, interleaved=interleaved, position_ids=ids, impl="triton")
            wide = [x.detach().double().requires_grad_() for x in (q, k)]
            outputs = reference(*wide, cos.double(), sin.double(), interleaved, ids)
            want = (*outputs, *torch.autograd.grad(outputs, wide, (dq.double(), dk.double())))
            for mine, exact in zip(got, want, strict=True):
                error = (mine.double() - exact).abs().max() / exact.abs().max()
                assert error < torch.finfo(dtype).eps


def test_a_pointer_that_is_not_aligned():
    cos, sin = rotary_tables(33, 64, device="cuda")
    flat = torch.randn(2 * 33 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    q = flat[1:].view(2, 33, 4, 64)
    assert q.data_ptr() % 16
    turned, _ = rotary(q, q, cos, sin, impl="triton")
    assert torch.equal(turned, rotary(q.clone(), q.clone(), cos, sin, impl="triton")[0])


def test_ids_outside_the_table():
    q, k = tensors(1, 6, 4, 2, 64)
    cos, sin = rotary_tables(8, 64, device="cuda")
    ids = torch.tensor([0, 8, -1, 7, 1 << 60, -(1 << 60)], device="cuda")
    for impl in ("triton", "eager"):
        nan = rotary(q, k, cos, sin, position_ids=ids, impl=impl)[0].isnan()
        assert torch.equal(nan.all(-1).all(-1)[0], nan.any(-1).any(-1)[0])
        assert nan[0, :, 0, 0].tolist() == [False, True, True, False, True, True]


def test_graph_capture_forward_and_backward():
    q, k = tensors(4, 128, 8, 2, 64)
    cos, sin = rotary_tables(128, 64, device="cuda")
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    step(q, k, cos, sin, dq, dk, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, cos, sin, dq, dk, impl="triton")
    with torch.no_grad():
        for x in (q, k, dq, dk):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(q, k, cos, sin, dq, dk, impl="triton"), strict=True):
        assert torch.equal(a, b)


def test_one_launch_each_way():
    q, k = tensors(2, 16, 8, 2, 64)
    cos, sin = rotary_tables(16, 64, device="cuda")
    before = launches()
    outputs = rotary(q, k, cos, sin, impl="triton")
    assert launches() == before + 1
    torch.autograd.grad(outputs, (q, k), [torch.ones_like(x) for x in outputs])
    assert launches() == before + 2


@pytest.mark.parametrize("form", ["dense", "fused", "head-major"])
def test_torch_compile_whole_with_any_length(form):
    compiled = torch.compile(
        lambda q, k, cos, sin: [x * 2 for x in rotary(q, k, cos, sin, impl="triton")], fullgraph=True
    )
    torch._dynamo.reset()
    for T in (16, 33, 64, 100):
        q, k = tensors(2, T, 8, 2, 64, form=form)
        cos, sin = rotary_tables(T, 64, device="cuda")
        got, want = compiled(q, k, cos, sin), [x * 2 for x in rotary(q, k, cos, sin, impl="triton")]
        dys = [torch.randn_like(x) for x in want]
        for a, b in zip((*got, *torch.autograd.grad(got, (q, k), dys)),
                        (*want, *torch.autograd.grad(want, (q, k), dys)), strict=True):  # fmt: skip
            assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["dense", "fused", "head-major"])
def test_opcheck(form):
    q, k = tensors(2, 16, 8, 2, 64, form=form)
    head_major = form == "head-major"
    given = (*rotary_tables(16, 64, device="cuda"), False, None, False, head_major, head_major, True, "")
    torch.library.opcheck(rotate.traced.forward, (q, k, *given))


@pytest.mark.parametrize("form", ["dense", "head-major"])
@pytest.mark.parametrize("D", [48, 128])
def test_every_variant(form, D):
    """All launch configurations give the same bits, on the first call and replayed."""
    q, k = tensors(3, 100, 12, 4, D, form=form)
    cos, sin = rotary_tables(100, D, device="cuda")
    dq, dk = torch.randn_like(q), torch.randn_like(k)

    def run(fn):
        outputs = fn(q, k, cos, sin, False, None)
        return (*outputs, *torch.autograd.grad(outputs, (q, k), (dq, dk)))

    want = run(candidate)
    for tiling in kernels.tilings(None):
        bound = candidate.bind(text({"forward": tiling}))
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(bound), want, strict=True)), tiling


def test_autocast():
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    project = torch.nn.Linear(64, 3 * 64, device="cuda")
    cos, sin = rotary_tables(16, 16, device="cuda")
    results = {}
    for impl in ("triton", "eager"):
        with torch.autocast("cuda", torch.bfloat16):
            q, k, _ = project(x).view(2, 16, 3, 4, 16).unbind(2)
            turned = rotary(q, k, cos, sin, impl=impl)
        assert turned[0].dtype == torch.bfloat16
        results[impl] = (*turned, *torch.autograd.grad(sum(t.float().square().sum() for t in turned), x))
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    q, k = tensors(4, 128, 8, 2, 64)
    cos, sin = rotary_tables(128, 64, device="cuda")
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    runs = [step(q, k, cos, sin, dq, dk, impl="triton") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_more_than_two_to_the_31_elements():
    """Offsets past 2^31 elements within one tensor, also the stride between heads of a head-major one."""
    T, H, D = 9000, 32, 128
    B = (1 << 31) // (T * H * D) + 2
    cos, sin = rotary_tables(T, D, device="cuda")
    for form in ("dense", "head-major"):
        with torch.no_grad():
            q, k = tensors(B, T, H, 1, D, form=form)
            turned, _ = rotary(q, k, cos, sin, impl="triton")
            for b, rows in ((0, slice(0, 64)), (B - 1, slice(T - 64, T))):
                ids = torch.arange(T, device="cuda")[rows]
                part = q[b : b + 1, rows].contiguous()
                want, _ = rotary(part, part, cos, sin, position_ids=ids, impl="eager")
                torch.testing.assert_close(turned[b : b + 1, rows], want, rtol=1e-2, atol=1e-2)
        del q, k, turned
