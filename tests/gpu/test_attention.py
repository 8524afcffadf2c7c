"""attention on a CUDA device: the op's grid, every back end, decoding, graph capture, torch.compile."""

import pytest
import torch

from bakeoff.kernels.counter import launches
from bakeoff.ops.attention import OP, attention
from bakeoff.ops.attention.reference import attention as reference
from bakeoff.ops.attention.triton import decode
from bakeoff.select import using
from bakeoff.select.contests.verify import verify, yardsticks

CASES = {case.name: case for case in OP.cases()}
DECODING = [name for name in CASES if name.startswith("decode")]
IMPLS = ["flash", "cudnn", "efficient", "math", "flex", "compiled"]
SMALL = ["llm-med small", "8x1024x8x64 causal", "8x1024x8x64 full", "fp32", "odd", "behind a prefix"]
GRID = [(name, impl) for name in CASES for impl in IMPLS]


@pytest.mark.parametrize("name", DECODING)
def test_decoding_kernels_pass_the_contest_verification(name):
    _, deterministic = verify(OP, OP.candidate("decode"), yardsticks(OP, CASES[name]))
    assert deterministic


@pytest.mark.parametrize("impl", ["eager", "flash", "cudnn", "efficient"])
@pytest.mark.parametrize("name", SMALL)
def test_kernels_of_pytorch_pass_the_contest_verification(name, impl):
    candidate = OP.candidate(impl)
    if reasons := candidate.reasons(CASES[name]):
        assert impl != "eager", reasons
        return
    verify(OP, candidate, yardsticks(OP, CASES[name]))


@pytest.mark.parametrize("name", ["window", "documents", "odd widths", "more queries than keys"])
def test_other_forms_pass_the_contest_verification(name):
    for impl in ("eager", "flash"):
        candidate = OP.candidate(impl)
        if not candidate.reasons(CASES[name]):
            verify(OP, candidate, yardsticks(OP, CASES[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "impl"), GRID)
def test_passes_the_contest_verification(name, impl):
    candidate = OP.candidate(impl)
    if candidate.reasons(CASES[name]):
        pytest.skip(candidate.reasons(CASES[name])[0])
    _, deterministic = verify(OP, candidate, yardsticks(OP, CASES[name]))
    assert deterministic or not candidate.deterministic


def drawn(B, T, S, H, K, D, dtype=torch.bfloat16, *, grad=False):
    shapes = [(B, T, H, D), (B, S, K, D), (B, S, K, D)]
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize("D", [16, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_decoding_head_widths(D, dtype):
    q, k, v = drawn(3, 5, 700, 8, 2, D, dtype)
    held = torch.tensor([700, 311, 3], device="cuda", dtype=torch.int32)
    want = reference(*(x.double() for x in (q, k, v)), True, 200, None, None, held)
    for _ in range(3):  # the last is replayed
        y = attention(q, k, v, causal=True, window=200, lengths=held, impl="decode")
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[dtype]
    assert (y.double() - want).norm() < bound * want.norm()


def test_decoding_does_not_read_behind_lengths():
    q, k, v = drawn(2, 1, 1000, 8, 8, 48)
    held = torch.tensor([500, 129], device="cuda")
    want = attention(q, k, v, lengths=held, impl="decode")
    for row, length in enumerate((500, 129)):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, lengths=held, impl="decode"), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_in_a_graph_follows_the_lengths(dtype):
    q, k, v = drawn(4, 1, 2048, 8, 4, 64, dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    held = torch.full((4,), 7, device="cuda")
    with using(regime="graph"):
        for _ in range(3):
            attention(q, k, v, causal=True, lengths=held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = launches()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v, causal=True, lengths=held)
        assert launches() > before
    for length in (1, 128, 129, 2000, 2048):
        held.fill_(length)
        graph.replay()
        assert torch.equal(captured, attention(q, k, v, causal=True, lengths=held, impl="decode"))
        torch.testing.assert_close(
            captured, attention(q, k, v, causal=True, lengths=held, impl="eager"), rtol=2**-6, atol=2**-6
        )


def test_decoding_asks_the_host_for_nothing():
    q, k, v = drawn(4, 1, 512, 8, 4, 64)
    held = torch.full((4,), 300, device="cuda")
    try:
        for _ in range(3):
            attention(q, k, v, lengths=held)
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    q, k, v = drawn(2, 2, 130, 4, 2, 64)
    held = torch.tensor([130, 60], device="cuda")
    torch.library.opcheck(decode.traced.forward, (q, k, v, True, None, None, None, held, False, ""))


def test_decoding_inside_torch_compile():
    torch._dynamo.reset()
    q, k, v = drawn(2, 1, 512, 4, 2, 64)

    def model(q, k, v, held):
        return attention(q, k, v, causal=True, lengths=held, impl="decode") * 2

    compiled = torch.compile(model, fullgraph=True)
    for length in (3, 500):
        held = torch.full((2,), length, device="cuda")
        torch.testing.assert_close(compiled(q, k, v, held), model(q, k, v, held))


@pytest.mark.parametrize("impl", ["eager", "flash", "cudnn", "efficient"])
def test_gradients_laid_out_in_any_way(impl):
    """After a dense one, whose plan is kept: expanded, transposed, beginning anywhere; and inputs in parts of
    a wider row."""
    for K in (4, 2):
        wide = torch.randn(2, 512, 4 + 2 * K, 64, device="cuda").bfloat16().requires_grad_()
        inputs = wide.split((4, K, K), 2)
        dense = torch.randn(2, 512, 4, 64, device="cuda").bfloat16()
        shifted = torch.empty(dense.numel() + 1, device="cuda", dtype=dense.dtype)[1:]
        shifted = shifted.view(dense.shape).copy_(dense)
        one = torch.randn(64, device="cuda").bfloat16().expand(dense.shape)
        for dy in (dense, dense.mT.contiguous().mT, shifted, one):
            exact = wide.detach().double().requires_grad_()
            y = reference(*exact.split((4, K, K), 2), True)
            (want,) = torch.autograd.grad(y, exact, dy.double())
            (got,) = torch.autograd.grad(attention(*inputs, causal=True, impl=impl), wide, dy)
            assert (got.double() - want).norm() < 2**-6 * want.norm()


@pytest.mark.parametrize("impl", ["eager", "flash", "efficient", "cudnn"])
def test_inputs_that_begin_anywhere(impl):
    q, k, v = (
        torch.randn(2 * 256 * 4 * 64 + 1, device="cuda").bfloat16()[1:].view(2, 256, 4, 64) for _ in range(3)
    )
    want = reference(q.double(), k.double(), v.double(), True)
    y = attention(q, k, v, causal=True, impl=impl)
    assert (y.double() - want).norm() < 2**-7 * want.norm()


def test_documents_ask_the_host_for_nothing():
    inputs = drawn(1, 3000, 3000, 4, 2, 64, grad=True)
    cu = torch.tensor([0, 700, 700, 2500, 2900], device="cuda", dtype=torch.int32)
    try:
        for _ in range(3):
            y = attention(*inputs, causal=True, cu_seqlens=cu, impl="flash")
            slopes = torch.autograd.grad(y, inputs, torch.ones_like(y))
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = [
        attention(*[x[:, a:b] for x in inputs], causal=True, impl="flash")
        for a, b in ((0, 700), (700, 2500), (2500, 2900))
    ]
    torch.testing.assert_close(y[:, :2900], torch.cat(parts, 1), rtol=2**-7, atol=2**-7)
    assert not y[:, 2900:].any()
    assert all(x.isfinite().all() and not x[:, 2900:].any() for x in slopes)


@pytest.mark.parametrize("impl", ["eager", "flash", "cudnn"])
def test_graph_capture(impl):
    inputs = drawn(2, 1024, 1024, 4, 4, 64, grad=True)

    def step():
        y = attention(*inputs, causal=True, impl=impl)
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


@pytest.mark.parametrize("impl", ["eager", "flash"])
def test_inside_torch_compile(impl):
    torch._dynamo.reset()
    inputs = drawn(2, 512, 512, 4, 2, 64, grad=True)

    def model(q, k, v):
        return attention(q, k, v, causal=True, impl=impl) * 2

    want, got = model(*inputs), torch.compile(model, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
    for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-5, atol=2**-5)


def test_deterministic_mode():
    """PyTorch's default then adds up in one order."""
    inputs = drawn(2, 1024, 1024, 4, 4, 64, grad=True)
    dy = torch.randn(2, 1024, 4, 64, device="cuda").bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(attention(*inputs, causal=True), inputs, dy) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_memory_of_decoding_is_the_result_and_its_parts():
    q, k, v = drawn(8, 1, 4096, 8, 8, 64)
    held = torch.full((8,), 4096, device="cuda")
    attention(q, k, v, lengths=held, impl="decode")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, lengths=held, impl="decode")
    assert torch.cuda.max_memory_allocated() - before < k.nbytes // 8
