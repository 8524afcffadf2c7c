"""dilated_attention on a CUDA device: the op's grid, every back end, odd head widths, graph capture."""

import pytest
import torch

from bakeoff.ops.dilated_attention import OP, dilated_attention
from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.select.contests.verify import verify, yardsticks

IMPLS = ["eager", "flash", "cudnn", "efficient", "flex", "fused", "cuda"]

SMALL = [case for case in OP.cases() if case.q.shape[1] <= 2048]
GRID = [(case, impl) for case in OP.cases() if case.q.shape[1] <= 10000 for impl in IMPLS[1:]]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernels_pass_the_contest_verification(case):
    _, deterministic = verify(OP, OP.candidate("fused"), yardsticks(OP, case))
    assert deterministic


SHORT = [case for case in SMALL if case.name in ("4x2048x8x64 causal", "odd", "rows unselected")]


@pytest.mark.parametrize("impl", ["efficient", "flex"])
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_attention_kernels_of_pytorch_pass_the_contest_verification(case, impl):
    candidate = OP.candidate(impl)
    if reasons := candidate.reasons(case):
        assert impl == "flex", reasons
        assert "rates divide" in reasons[0]
        return
    verify(OP, candidate, yardsticks(OP, case))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("D", "dtype"), [(64, torch.float16), (80, torch.float32), (256, torch.bfloat16)], ids=str
)
def test_cuda_kernels_are_exact(D, dtype, causal):
    """Those meant for older GPUs, on this one."""
    inputs = [torch.randn(2, 700, h, D, device="cuda", dtype=dtype).requires_grad_() for h in (4, 2, 2)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    args = ((128, 500), (1, 3), causal)
    want = reference(*wide, *args)
    dy = torch.randn_like(want).to(dtype)
    for _ in range(3):  # the last is replayed
        y = dilated_attention(*inputs, *args[:2], causal=causal, impl="cuda")
        found = [y, *torch.autograd.grad(y, inputs, dy)]
    exact = [want, *torch.autograd.grad(want, wide, dy.double())]
    for mine, right in zip(found, exact, strict=True):
        assert (mine.double() - right).norm() < max(torch.finfo(dtype).eps, 1e-6) * right.norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "impl"), GRID, ids=lambda x: getattr(x, "name", x))
def test_passes_the_contest_verification(case, impl):
    candidate = OP.candidate(impl)
    if candidate.reasons(case):
        pytest.skip(candidate.reasons(case)[0])
    _, deterministic = verify(OP, candidate, yardsticks(OP, case))
    assert deterministic or not candidate.deterministic


@pytest.mark.parametrize(("D", "causal"), [(16, False), (48, True), (96, False), (128, True), (256, True)])
def test_head_widths(D, causal):
    inputs = [torch.randn(1, 900, h, D, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    args = ((128, 512), (1, 3), causal)
    y = dilated_attention(*inputs, *args[:2], causal=causal, impl="fused")
    want, dy = reference(*wide, *args), torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, inputs, dy)]
    for mine, right in zip(found, [want, *torch.autograd.grad(want, wide, dy.double())], strict=True):
        assert (mine.double() - right).norm() < 2**-7 * right.norm()


@pytest.mark.parametrize("impl", ["eager", "cudnn", "fused"])
def test_graph_capture(impl):
    inputs = [torch.randn(1, 1024, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]

    def step():
        y = dilated_attention(*inputs, (256, 1024), (1, 4), causal=True, impl=impl)
        return (y, *torch.autograd.grad(y, inputs, torch.ones_like(y)))

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["flash", "cudnn", "efficient"])
def test_gradients_laid_out_in_any_way(impl):
    """After a dense one, whose plan is kept: expanded, transposed, beginning anywhere."""
    inputs = [torch.randn(1, 512, 4, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    shape = inputs[0].shape
    dense = torch.randn(shape, device="cuda").bfloat16()
    shifted = torch.empty(dense.numel() + 1, device="cuda", dtype=dense.dtype)[1:].view(shape).copy_(dense)
    one = torch.randn(128, device="cuda").bfloat16().expand(shape)
    for dy in (dense, dense.mT.contiguous().mT, shifted, one):
        y = dilated_attention(*inputs, (256, 512), (1, 4), causal=True, impl=impl)
        got = torch.autograd.grad(y, inputs, dy)
        y = dilated_attention(*inputs, (256, 512), (1, 4), causal=True, impl="eager")
        for mine, right in zip(got, torch.autograd.grad(y, inputs, dy.contiguous()), strict=True):
            torch.testing.assert_close(mine, right, rtol=2**-5, atol=2**-5)


def test_documents_ask_the_host_for_nothing():
    inputs = [torch.randn(1, 3000, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    cu = torch.tensor([0, 700, 700, 2500, 2900], device="cuda", dtype=torch.int32)
    for _ in range(3):
        y = dilated_attention(*inputs, (256, 1024), (1, 4), causal=True, cu_seqlens=cu, impl="fused")
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    parts = [dilated_attention(*[x[:, a:b] for x in inputs], (256, 1024), (1, 4), causal=True, impl="fused")
             for a, b in ((0, 700), (700, 2500), (2500, 2900))]  # fmt: skip
    torch.testing.assert_close(y[:, :2900], torch.cat(parts, 1), rtol=2**-7, atol=2**-7)
    assert (y[:, 2900:] == 0).all()


def test_inside_torch_compile():
    inputs = [torch.randn(2, 512, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]

    def model(q, k, v):
        return dilated_attention(q, k, v, (128, 512), (1, 4), causal=True, impl="fused") * 2

    want = model(*inputs)
    got = torch.compile(model, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
