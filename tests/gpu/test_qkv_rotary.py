"""qkv_rotary on a CUDA device: the op's grid at full size, graphs, torch.compile, autocast, huge tensors."""

import pytest
import torch

from bakeoff.graphs import forbid_sync
from bakeoff.kernels.counter import launches
from bakeoff.kernels.variants import text
from bakeoff.ops.qkv_rotary import OP, qkv_rotary
from bakeoff.ops.qkv_rotary.reference import reference
from bakeoff.ops.qkv_rotary.triton import qkv_rotary as candidate
from bakeoff.ops.rotary import rotary_tables
from bakeoff.select.contests.verify import verify, yardsticks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NORMED = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def tensors(B, T, H, HK, D, dtype=torch.bfloat16, form="dense", normed=False, weight=torch.float32):
    """Leaves: qkv, and weights where heads are normalised."""
    N = H + 2 * HK
    if form == "part":
        qkv = torch.randn(B, T, N + 3, D, device="cuda", dtype=dtype)[:, :, 2:-1]
    elif form == "head-major":
        qkv = torch.randn(B, N, T, D, device="cuda", dtype=dtype).transpose(1, 2)
    else:
        qkv = torch.randn(B, T, N, D, device="cuda", dtype=dtype)
    weights = [(1 + 0.3 * torch.randn(D, device="cuda")).to(weight) for _ in "qk"] if normed else []
    return [x.detach().requires_grad_() for x in (qkv, *weights)]


def named(weights):
    return dict(zip(("q_weight", "k_weight"), weights, strict=False))


def step(given, cos, sin, kv_heads, dys, **how):
    qkv, *weights = given
    outputs = qkv_rotary(qkv, cos, sin, kv_heads=kv_heads, **named(weights), **how)
    return (*outputs, *torch.autograd.grad(outputs, given, dys))


def arriving(B, T, H, HK, D, dtype=torch.bfloat16, form="dense"):
    """Gradients for q', k' and v; "head-major" as of attention that works on [B, H, T, D]."""
    if form == "head-major":
        return [torch.randn(B, n, T, D, device="cuda", dtype=dtype).transpose(1, 2) for n in (H, HK, HK)]
    if form == "expanded":
        return [torch.randn(1, T, 1, D, device="cuda", dtype=dtype).expand(B, T, n, D) for n in (H, HK, HK)]
    return [torch.randn(B, T, n, D, device="cuda", dtype=dtype) for n in (H, HK, HK)]


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.name)
def test_the_grid_passes_the_contest_verification(case):
    """Forward, every gradient, poisoned memory, fences, hostile inputs, bitwise repetition, at full size."""
    _, deterministic = verify(OP, OP.candidate("triton"), yardsticks(OP, case))
    assert deterministic


@NORMED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "part", "head-major"])
@pytest.mark.parametrize("back", ["dense", "head-major", "expanded"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_shapes_in_every_dtype_and_layout(dtype, form, back, interleaved, normed):
    shapes = ((2, 37, 5, 3, 20, 20), (1, 1, 12, 4, 96, 40), (3, 1290, 8, 1, 256, 256), (2, 300, 8, 8, 48, 48))
    for B, T, H, HK, D, R in shapes:
        given = tensors(B, T, H, HK, D, dtype, form, normed)
        cos, sin = rotary_tables(T + 5, R, device="cuda")
        dys = arriving(B, T, H, HK, D, dtype, back)
        more = {"offset": 1.0} if normed else {}
        for ids in (None, torch.randint(T + 5, (B, T), device="cuda")):
            got = step(
                given, cos, sin, HK, dys, interleaved=interleaved, position_ids=ids, impl="triton", **more
            )
            qkv, *weights = wide = [x.detach().double().requires_grad_() for x in given]
            last = (*(weights or (None, None)), 1e-6, 1.0 if normed else 0.0)
            outputs = reference(qkv, cos.double(), sin.double(), HK, interleaved, ids, *last)
            want = (*outputs, *torch.autograd.grad(outputs, wide, [dy.double() for dy in dys]))
            for mine, exact in zip(got, want, strict=True):
                error = (mine.double() - exact).abs().max() / exact.abs().max()
                assert error < max(torch.finfo(mine.dtype).eps, 2e-6)


@NORMED
def test_what_does_not_arrive_is_zeros(normed):
    given, tables = tensors(2, 130, 8, 2, 64, normed=normed), rotary_tables(130, 64, device="cuda")
    dys = arriving(2, 130, 8, 2, 64)
    parts = (slice(0, 8), slice(8, 10), slice(10, 12))
    whole = step(given, *tables, 2, dys, impl="triton")[3]
    for i, part in enumerate(parts):
        outputs = qkv_rotary(given[0], *tables, kv_heads=2, **named(given[1:]), impl="triton")
        (found,) = torch.autograd.grad(outputs[i], given[0], dys[i])
        assert torch.equal(found[:, :, part], whole[:, :, part])
        for other in parts:
            assert other is part or found[:, :, other].count_nonzero() == 0


@NORMED
def test_a_pointer_that_is_not_aligned(normed):
    cos, sin = rotary_tables(33, 64, device="cuda")
    flat = torch.randn(2 * 33 * 8 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    aligned, *weights = tensors(2, 33, 4, 2, 64, normed=normed)
    qkv = flat[1:].view(2, 33, 8, 64).requires_grad_()
    assert qkv.data_ptr() % 16
    with torch.no_grad():
        aligned.copy_(qkv)
    dys = arriving(2, 33, 4, 2, 64)
    for _ in range(3):
        runs = [step([x, *weights], cos, sin, 2, dys, impl="triton") for x in (qkv, aligned)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@NORMED
def test_graph_capture_without_a_wait(normed):
    given = tensors(4, 128, 8, 2, 64, normed=normed)
    cos, sin = rotary_tables(128, 64, device="cuda")
    dys = arriving(4, 128, 8, 2, 64)
    for _ in range(3):
        step(given, cos, sin, 2, dys, impl="triton")
    with forbid_sync():
        step(given, cos, sin, 2, dys, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, cos, sin, 2, dys, impl="triton")
    with torch.no_grad():
        for x in (*given, *dys):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(given, cos, sin, 2, dys, impl="triton"), strict=True):
        assert torch.equal(a, b)


@NORMED
def test_launches_and_memory(normed):
    """One launch forward, which allocates q' and k' alone; one back, two with weights, which allocates dqkv
    and partial sums."""
    given = tensors(4, 512, 8, 2, 64, normed=normed)
    cos, sin = rotary_tables(512, 64, device="cuda")
    dys = arriving(4, 512, 8, 2, 64)
    step(given, cos, sin, 2, dys, impl="triton")
    torch.cuda.synchronize()
    before, held = launches(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = qkv_rotary(given[0], cos, sin, kv_heads=2, **named(given[1:]), impl="triton")
    assert launches() == before + 1
    size = given[0].nbytes
    assert torch.cuda.max_memory_allocated() - held == size * 10 // 12
    assert outputs[2].data_ptr() == given[0][:, :, 10:].data_ptr()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(outputs, given, dys)
    assert launches() == before + 2 + normed
    assert torch.cuda.max_memory_allocated() - held <= size + (2 << 20) * normed


@NORMED
@pytest.mark.parametrize("form", ["dense", "part"])
def test_torch_compile_whole_with_any_length(form, normed):
    def call(qkv, cos, sin, *weights):
        q, k, v = qkv_rotary(qkv * 1.5, cos, sin, kv_heads=2, **named(weights), impl="triton")
        return q * 2, k * 2, v * 2

    compiled = torch.compile(call, fullgraph=True)
    torch._dynamo.reset()
    for T in (16, 33, 64):
        given = tensors(2, T, 8, 2, 64, form=form, normed=normed)
        cos, sin = rotary_tables(T, 64, device="cuda")
        got, want = (fn(given[0], cos, sin, *given[1:]) for fn in (compiled, call))
        dys = arriving(2, T, 8, 2, 64)
        runs = [(*ys, *torch.autograd.grad(ys, given, dys)) for ys in (got, want)]
        for a, b in zip(*runs, strict=True):
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=2 * eps, atol=4 * eps * b.abs().max().item())


@NORMED
@pytest.mark.parametrize("form", ["dense", "part"])
def test_opcheck(form, normed):
    qkv, *weights = tensors(2, 16, 8, 2, 64, form=form, normed=normed)
    args = (qkv, *rotary_tables(16, 64, device="cuda"), 2, False, None, *(weights or (None, None)), 1e-6, 0.0)
    torch.library.opcheck(candidate.traced.forward, (*args, True, ""))


@NORMED
@pytest.mark.parametrize("name", ["llm-med", "grouped"])
def test_every_variant_is_right(name, normed):
    """All launch configurations: equal to the default but for the order of sums, on the first call and
    replayed."""
    case = next(case for case in OP.cases() if case.name == ("normed " if normed else "") + name)
    B, T, HK, D = 2, 300, case.kv_heads, case.qkv.shape[3]
    H = case.qkv.shape[2] - 2 * HK
    given = tensors(B, T, H, HK, D, normed=normed)
    cos, sin = rotary_tables(T, D, device="cuda")
    dys = arriving(B, T, H, HK, D)

    def run(fn):
        qkv, *weights = given
        outputs = fn(qkv, cos, sin, HK, False, None, *(weights or (None, None)), 1e-6, 0.0)
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


def test_autocast():
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    project = torch.nn.Linear(64, 3 * 64, device="cuda")
    weight = torch.rand(16, device="cuda").requires_grad_()
    cos, sin = rotary_tables(16, 16, device="cuda")
    results = {}
    for impl in ("triton", "eager"):
        with torch.autocast("cuda", torch.bfloat16):
            qkv = torch.unflatten(project(x), -1, (-1, 16))
            parts = qkv_rotary(qkv, cos, sin, q_weight=weight, k_weight=weight, impl=impl)
        assert all(part.dtype == torch.bfloat16 for part in parts)
        total = sum((t.float() ** 3).sum() for t in parts)
        results[impl] = (*parts, *torch.autograd.grad(total, (x, weight, project.weight)))
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@NORMED
def test_more_than_two_to_the_31_elements(normed):
    """Offsets past 2^31 elements within one tensor, both ways."""
    T, H, D = 9000, 32, 128
    B = (1 << 31) // (T * (H + 2) * D) + 2
    cos, sin = rotary_tables(T, D, device="cuda")
    given = tensors(B, T, H, 1, D, normed=normed)
    outputs = qkv_rotary(given[0], cos, sin, kv_heads=1, **named(given[1:]), impl="triton")
    (dqkv,) = torch.autograd.grad(outputs, given[0], outputs)
    for b, rows in ((0, slice(0, 64)), (B - 1, slice(T - 64, T))):
        ids = torch.arange(T, device="cuda")[rows]
        part = given[0].detach()[b : b + 1, rows].contiguous().requires_grad_()
        weights = named([w.detach() for w in given[1:]])
        want = qkv_rotary(part, cos, sin, kv_heads=1, position_ids=ids, **weights, impl="eager")
        for mine, exact in zip(outputs, want, strict=True):
            torch.testing.assert_close(mine[b : b + 1, rows], exact, rtol=2e-2, atol=2e-2)
        (exact,) = torch.autograd.grad(want, part, want)
        torch.testing.assert_close(
            dqkv[b : b + 1, rows], exact, rtol=2e-2, atol=2e-2 * exact.abs().max().item()
        )
