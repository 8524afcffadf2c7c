"""Rotary with QK-norm on a CUDA device: the op's grid at full size, graphs, torch.compile, autocast."""

import pytest
import torch

from bakeoff.graphs import forbid_sync
from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops.rotary import OP, rotary, rotary_tables
from bakeoff.ops.rotary.normed.triton import normalize_rotate
from bakeoff.ops.rotary.reference import reference
from bakeoff.ops.rotary.triton import rotary as candidate
from bakeoff.select.contests.verify import verify, yardsticks

CASES = [case for case in OP.cases() if case.q_weight is not None]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensors(B, T, H, HK, D, dtype=torch.bfloat16, form="dense", weight=torch.float32):
    """q, k and their weights."""
    if form == "head-major":
        q, k = (torch.randn(B, n, T, D, device="cuda", dtype=dtype).transpose(1, 2) for n in (H, HK))
    elif form == "fused":
        qkv = torch.randn(B, T, H + 2 * HK, D, device="cuda", dtype=dtype)
        q, k = qkv[:, :, :H], qkv[:, :, H : H + HK]
    else:
        q, k = (torch.randn(B, T, n, D, device="cuda", dtype=dtype) for n in (H, HK))
    weights = [(1 + 0.3 * torch.randn(D, device="cuda")).to(weight) for _ in "qk"]
    return [x.detach().requires_grad_() for x in (q, k, *weights)]


def step(given, cos, sin, dys, **how):
    q, k, q_weight, k_weight = given
    outputs = rotary(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, **how)
    return (*outputs, *torch.autograd.grad(outputs, given, dys))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
    assert deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "fused", "head-major"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_shapes_in_every_dtype_and_layout(dtype, form, interleaved):
    for B, T, H, HK, D, R in ((2, 37, 5, 3, 20, 20), (1, 1, 12, 4, 96, 40), (3, 1290, 8, 1, 256, 256)):
        given = tensors(B, T, H, HK, D, dtype, form)
        cos, sin = rotary_tables(T + 5, R, device="cuda")
        dys = [torch.randn_like(x) for x in given[:2]]
        for ids in (None, torch.randint(T + 5, (B, T), device="cuda")):
            got = step(
                given, cos, sin, dys, interleaved=interleaved, position_ids=ids, offset=1.0, impl="triton"
            )
            q, k, *weights = wide = [x.detach().double().requires_grad_() for x in given]
            outputs = reference(q, k, cos.double(), sin.double(), interleaved, ids, *weights, 1e-6, 1.0)
            want = (*outputs, *torch.autograd.grad(outputs, wide, [dy.double() for dy in dys]))
            for mine, exact in zip(got, want, strict=True):
                error = (mine.double() - exact).abs().max() / exact.abs().max()
                assert error < max(torch.finfo(mine.dtype).eps, 2e-6)


def test_a_pointer_that_is_not_aligned():
    cos, sin = rotary_tables(33, 64, device="cuda")
    flat = torch.randn(2 * 33 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    q, weight = flat[1:].view(2, 33, 4, 64), torch.rand(64, device="cuda")
    assert q.data_ptr() % 16
    pairs = (rotary(x, x, cos, sin, q_weight=weight, k_weight=weight, impl="triton") for x in (q, q.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_graph_capture_without_a_wait():
    given = tensors(4, 128, 8, 2, 64)
    cos, sin = rotary_tables(128, 64, device="cuda")
    dys = [torch.randn_like(x) for x in given[:2]]
    for _ in range(3):
        step(given, cos, sin, dys, impl="triton")
    with forbid_sync():
        step(given, cos, sin, dys, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, cos, sin, dys, impl="triton")
    with torch.no_grad():
        for x in (*given, *dys):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(given, cos, sin, dys, impl="triton"), strict=True):
        assert torch.equal(a, b)


def test_one_launch_forward_and_two_back():
    given = tensors(4, 512, 8, 2, 64)
    cos, sin = rotary_tables(512, 64, device="cuda")
    before = launches()
    outputs = rotary(*given[:2], cos, sin, q_weight=given[2], k_weight=given[3], impl="triton")
    assert launches() == before + 1
    torch.autograd.grad(outputs, given, [torch.ones_like(x) for x in outputs])
    assert launches() == before + 3


@pytest.mark.parametrize("form", ["dense", "head-major", "fused"])
def test_torch_compile_whole_with_any_length(form):
    compiled = torch.compile(
        lambda q, k, qw, kw, cos, sin: [
            x * 2 for x in rotary(q, k, cos, sin, q_weight=qw, k_weight=kw, impl="triton")
        ],
        fullgraph=True,
    )
    torch._dynamo.reset()
    for T in (16, 33, 64):
        given = tensors(2, T, 8, 2, 64, form=form)
        cos, sin = rotary_tables(T, 64, device="cuda")
        got = compiled(*given, cos, sin)
        want = [
            x * 2 for x in rotary(*given[:2], cos, sin, q_weight=given[2], k_weight=given[3], impl="triton")
        ]
        dys = [torch.randn_like(x) for x in want]
        for a, b in zip((*got, *torch.autograd.grad(got, given, dys)),
                        (*want, *torch.autograd.grad(want, given, dys)), strict=True):  # fmt: skip
            assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["dense", "head-major"])
def test_opcheck(form):
    q, k, qw, kw = tensors(2, 16, 8, 2, 64, form=form)
    orders = (form == "head-major",) * 2
    args = (q, k, *rotary_tables(16, 64, device="cuda"), False, None, qw, kw, 1e-6, 0.0, *orders, True, "")
    torch.library.opcheck(normalize_rotate.traced.forward, args)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("normed llm-med", "normed grouped")],
                         ids=lambda case: case.name)  # fmt: skip
def test_every_variant_is_right(case):
    """All launch configurations: equal to the default but for the order of sums, on the first call and
    replayed."""
    B, T, H, D = 2, 300, *case.q.shape[2:]
    given = tensors(B, T, H, case.k.shape[2], D)
    cos, sin = rotary_tables(T, D, device="cuda")
    dys = [torch.randn_like(x) for x in given[:2]]

    def run(fn):
        q, k, qw, kw = given
        outputs = fn(q, k, cos, sin, False, None, qw, kw, 1e-6, 0.0)
        return (*outputs, *torch.autograd.grad(outputs, given, dys))

    want = run(candidate)
    for axis, tilings in candidate.variants(case).items():
        for tiling in tilings:
            bound = candidate.bind(text({axis: tiling}))
            for _ in range(3):
                for mine, theirs in zip(run(bound), want, strict=True):
                    eps = torch.finfo(mine.dtype).eps
                    torch.testing.assert_close(
                        mine, theirs, rtol=2 * eps, atol=8 * eps * theirs.abs().max().item(), msg=str(tiling)
                    )


def test_autocast_and_weights_in_float32():
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    project = torch.nn.Linear(64, 3 * 64, device="cuda")
    weight = torch.rand(16, device="cuda").requires_grad_()
    cos, sin = rotary_tables(16, 16, device="cuda")
    results = {}
    for impl in ("triton", "eager"):
        with torch.autocast("cuda", torch.bfloat16):
            q, k, _ = project(x).view(2, 16, 3, 4, 16).unbind(2)
            turned = rotary(q, k, cos, sin, q_weight=weight, k_weight=weight, impl=impl)
        assert turned[0].dtype == torch.bfloat16
        total = sum((t.float() ** 3).sum() for t in turned)
        results[impl] = (*turned, *torch.autograd.grad(total, (x, weight)))
        assert results[impl][-1].dtype == torch.float32
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=5e-2)


def test_more_than_two_to_the_31_elements():
    """Offsets past 2^31 elements within one tensor, forward."""
    T, H, D = 9000, 32, 128
    B = (1 << 31) // (T * H * D) + 2
    cos, sin = rotary_tables(T, D, device="cuda")
    with torch.no_grad():
        q, k, qw, kw = tensors(B, T, H, 1, D)
        turned, _ = rotary(q, k, cos, sin, q_weight=qw, k_weight=kw, impl="triton")
        for b, rows in ((0, slice(0, 64)), (B - 1, slice(T - 64, T))):
            ids = torch.arange(T, device="cuda")[rows]
            part = q[b : b + 1, rows].contiguous()
            want, _ = rotary(part, part, cos, sin, position_ids=ids, q_weight=qw, k_weight=kw, impl="eager")
            torch.testing.assert_close(turned[b : b + 1, rows], want, rtol=2e-2, atol=2e-2)
