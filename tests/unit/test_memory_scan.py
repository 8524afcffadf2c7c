"""memory_scan on plain PyTorch: its definition against double autograd, streaming, laws, refusals."""

import doctest
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.ops import memory_scan
from bakeoff.ops.memory_scan import OP, MemoryState, memory_stream
from bakeoff.ops.memory_scan.chunked import chunked
from bakeoff.ops.memory_scan.large.steps import moved_backward
from bakeoff.ops.memory_scan.op import READS, draw, large_supports, triton_supports
from bakeoff.ops.memory_scan.plain import at_the_end, coefficients, eager
from bakeoff.ops.memory_scan.reference import iterated, moved
from bakeoff.ops.memory_scan.reference import memory_scan as reference
from bakeoff.select import Case, TensorMeta

PLAIN = pytest.mark.parametrize("fn", [reference, eager, chunked])


def drawn(
    G: int, T: int, D: int, H: int, Dv: int, dtype: torch.dtype = torch.float64, grad: bool = True
) -> list[Tensor]:
    """q, k, v, memory, momentum and the gates."""
    generator = torch.Generator().manual_seed(G + T + D)
    state = {"w1": (G, H, D), "b1": (G, H), "w2": (G, Dv, H), "b2": (G, Dv)}
    shapes = {"q": (G, T, D), "k": (G, T, D), "v": (G, T, Dv)}
    shapes |= {f"{whole}_{part}": shape for whole in ("memory", "momentum") for part, shape in state.items()}
    shapes |= dict.fromkeys(("lr", "decay", "forget"), (G, T))
    args = []
    for name, shape in shapes.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kind = dtype if name in ("q", "k", "v") else wide
        tensor = draw(name, TensorMeta.dense(shape, kind), generator)
        assert tensor is not None
        # A few tokens a chunk learn fast without growing.
        args.append((50 * tensor if name == "lr" else tensor).requires_grad_(grad))
    return args


def step(fn: Any, args: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    outputs = fn(*args, *rest)
    generator = torch.Generator().manual_seed(7)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, args, dys, allow_unused=True)]


def by_autograd(*args: Any) -> tuple[Tensor, ...]:
    """The recurrence of the docstring, with gradients that autograd finds, and differentiates again."""
    q, k, v, *state, lr, decay, forget, chunk, read, orthogonalize = (*args, 0)[:17]
    memory, momentum = list(state[:4]), list(state[4:])

    def answer(parts: Sequence[Tensor], x: Tensor) -> Tensor:
        w1, b1, w2, b2 = parts
        z = torch.einsum("ghd,gd->gh", w1, x) + b1
        return torch.einsum("gvh,gh->gv", w2, z * torch.sigmoid(z)) + b2

    outs = []
    for t in range(q.shape[1]):
        if t % chunk == 0:
            start, step, kept = memory, [torch.zeros_like(m) for m in memory], torch.ones_like(lr[:, 0])
        loss = (answer(start, k[:, t]) - v[:, t]).square().sum()
        found = torch.autograd.grad(loss, start, create_graph=True)
        before = memory

        def rate(x: Tensor, like: Tensor, t: int = t) -> Tensor:
            return x[:, t].view(-1, *[1] * (like.dim() - 1))

        momentum = [rate(decay, s) * s - rate(lr, s) * u for s, u in zip(momentum, found, strict=True)]
        memory = [rate(1 - forget, m) * m + s for m, s in zip(memory, momentum, strict=True)]
        step = [rate(1 - forget, d) * d + s for d, s in zip(step, momentum, strict=True)]
        kept = kept * (1 - forget[:, t])
        if orthogonalize and t in (q.shape[1] - 1, t // chunk * chunk + chunk - 1):
            memory = list(memory)
            for i in (0, 2):
                memory[i] = torch.stack(
                    [flattened(*of, orthogonalize) for of in zip(start[i], kept, step[i], strict=True)]
                )
        outs.append(answer({"after": memory, "before": before, "chunk": start}[read], q[:, t]))
    return (torch.stack(outs, 1), *memory, *momentum)


def flattened(weight: Tensor, kept: Tensor, step: Tensor, count: int) -> Tensor:
    """One matrix after a chunk, by the iteration as a polynomial of X X' on the left."""
    x = step / (step.square().sum().sqrt() + 1e-7)
    for _ in range(count):
        gram = x @ x.mT
        x = (3.4445 * torch.eye(len(x), dtype=x.dtype) - 4.7750 * gram + 2.0315 * gram @ gram) @ x
    new = kept * weight + x
    return new * (weight.square().sum(1).sqrt() / (new.square().sum(1).sqrt() + 1e-7))[:, None]


@PLAIN
@pytest.mark.parametrize("steps", [1, 5])
def test_the_orthogonalised_update(fn: Any, steps: int) -> None:
    args = drawn(2, 8, 3, 5, 2)
    mine, truth = (step(f, args, 3, "chunk", steps) for f in (fn, by_autograd))
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(mine[1].norm(dim=2), args[3].norm(dim=2), rtol=1e-5, atol=0)
    one, plain = fn(*args, 8, "chunk", steps), fn(*args, 8, "chunk")
    assert not torch.allclose(one[1], plain[1], rtol=1e-2)
    for i in (0, 2, 4, 5, 6, 7, 8):  # answers, biases and the momentum of one chunk are as always
        torch.testing.assert_close(one[i], plain[i], rtol=1e-12, atol=1e-14)


def test_the_sizes_of_rates_do_not_matter_to_an_orthogonalised_update() -> None:
    args = drawn(2, 6, 3, 5, 2, grad=False)
    args[7:11] = [torch.zeros_like(s) for s in args[7:11]]
    other = [*args[:11], 3 * args[11], *args[12:]]
    one, three = (eager(*a, 6, "chunk", 5) for a in (args, other))
    torch.testing.assert_close(one[1], three[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one[5], three[5], rtol=1e-2)


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5), (1, 4, 4)])
def test_newton_schulz_and_its_derivative(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, step = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.linalg.svdvals(iterated(step, 8, torch.float64)[0])
    assert 0.6 < values.min() < values.max() < 1.3
    leaves = [x.requires_grad_() for x in (weight, torch.rand(shape[:1], dtype=torch.float64), step)]
    assert torch.autograd.gradcheck(lambda *a: moved(*a, 3, torch.float64), leaves)
    made = moved(*leaves, 5, torch.float64)
    arriving = torch.randn(shape, generator=generator, dtype=torch.float64)
    truth = torch.autograd.grad(made, leaves, arriving)
    mine = moved_backward(*(x.detach() for x in leaves), 5, torch.float64, arriving)
    torch.testing.assert_close(mine, truth, rtol=1e-11, atol=1e-12)
    nothing = moved_backward(*(torch.zeros_like(x) for x in leaves), 5, torch.float64, arriving)
    assert all(x.isfinite().all() for x in nothing)


@pytest.mark.parametrize("seed", range(3))
def test_an_orthogonalised_step_s_gradient_in_16_bits_is_as_long_as_autograd_s(seed: int) -> None:
    """What rounding adds to all of it alike, which stays where many gradients are added up."""
    draw = torch.Generator().manual_seed(seed)
    weight, step, arriving = (torch.randn(2, 192, 192, generator=draw) for _ in range(3))
    given, arriving = (weight / 14, torch.rand(2, generator=draw), step), arriving.abs()

    def gradient(wide: torch.dtype, narrow: torch.dtype) -> torch.Tensor:
        leaves = [x.to(wide).requires_grad_() for x in given]
        return torch.autograd.grad(moved(*leaves, 5, narrow), leaves, arriving.to(wide))[2].double()

    def gain(found: torch.Tensor) -> float:
        return ((found.double() * exact).sum() / exact.square().sum()).item() - 1

    exact = gradient(torch.float64, torch.float64)
    mine = moved_backward(*given, 5, torch.bfloat16, arriving)[2]
    assert abs(gain(mine) - gain(gradient(torch.float32, torch.bfloat16))) < 3e-4


def test_whole_chunks_of_orthogonalised_updates_go_on() -> None:
    args = drawn(2, 11, 3, 4, 2, grad=False)
    q, k, v, *parts, lr, decay, forget = args
    state = MemoryState(tuple(parts[:4]), tuple(parts[4:]), tuple(parts[:4]))
    how: dict[str, Any] = {"chunk": 4, "read": "chunk", "orthogonalize": 5}
    o, memory, momentum = memory_scan(q, k, v, parts[:4], parts[4:], lr, decay, forget, **how)
    outs = []
    for begin, end in ((0, 4), (4, 11)):
        out, state = memory_stream(*[x[:, begin:end] for x in (q, k, v, lr, decay, forget)], state, **how)
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 1), state.memory, state.momentum), (o, memory, momentum))
    for within in (state, state._replace(filled=torch.tensor(0))):
        with pytest.raises(ValueError, match=r"begins where a chunk does.*feed multiples of chunk=4 tokens"):
            memory_stream(*[x[:, :1] for x in (q, k, v, lr, decay, forget)], within, **how)


def test_a_stream_refuses_what_no_scan_looks_at() -> None:
    """The rest of an unfinished chunk goes on without memory_scan."""
    q, k, v, *parts, lr, decay, forget = drawn(2, 1, 3, 4, 2, grad=False)
    state = MemoryState(tuple(parts[:4]), tuple(parts[4:]), tuple(parts[:4]), 1)

    def fed(state: MemoryState = state, chunk: Any = 4, read: str = "after") -> Any:
        return memory_stream(q, k, v, lr, decay, forget, state, chunk=chunk, read=read)

    assert fed()[1].filled == 2
    for chunk in (0, -1, True, 2.5, "4"):
        with pytest.raises(ValueError, match=f"chunk is {chunk!r}, expected a whole number of tokens"):
            fed(chunk=chunk)
    with pytest.raises(ValueError, match="read is 'now', expected one of after, before, chunk"):
        fed(read="now")
    for filled in (-1, 4, 9, 1.0):
        with pytest.raises(ValueError, match=f"has {filled} tokens of chunk=4: go on with the chunk"):
            fed(state._replace(filled=filled))


@PLAIN
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("shape", "chunk"), [((2, 7, 3, 5, 2), 3), ((1, 4, 2, 2, 3), 1), ((2, 6, 4, 3, 4), 16)]
)
def test_the_definition_and_its_dual_are_the_recurrence(
    fn: Any, read: str, shape: tuple[int, ...], chunk: int
) -> None:
    args = drawn(*shape)
    for mine, truth in zip(step(fn, args, chunk, read), step(by_autograd, args, chunk, read), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("read", READS)
def test_gradcheck_of_the_definition(read: str) -> None:
    args = drawn(1, 5, 2, 3, 2)
    assert torch.autograd.gradcheck(lambda *a: reference(*a, 3, read), args)


def test_coefficients_are_their_recurrences() -> None:
    """Rates of exactly 0 and 1 among them, and their gradients."""
    lr, decay, forget = (torch.rand(2, 6, dtype=torch.float64) for _ in range(3))
    decay[0, 2], forget[1, 3], forget[0, 0], lr[1, 1] = 0, 1, 1, 0

    def loops(lr: Tensor, decay: Tensor, forget: Tensor) -> tuple[Tensor, ...]:
        ones, zeros = torch.ones_like(lr[:, 0]), torch.zeros_like(lr[:, 0])
        beta, f, m, n, G = [ones], [zeros], ones, [zeros] * 6, [zeros] * 6
        rows = [torch.stack(G, -1)]
        for t in range(6):
            m = decay[:, t] * m
            n = [decay[:, t] * x for x in n]
            n[t] = lr[:, t]
            beta.append((1 - forget[:, t]) * beta[-1])
            f.append((1 - forget[:, t]) * f[-1] + m)
            G = [(1 - forget[:, t]) * x + y for x, y in zip(G, n, strict=True)]
            rows.append(torch.stack(G, -1))
        return torch.stack(beta, -1), torch.stack(f, -1), torch.stack(rows, -2), m, torch.stack(n, -1)

    args = [x.requires_grad_() for x in (lr, decay, forget)]
    for mine, truth in zip(step(coefficients, args), step(loops, args), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


def test_the_end_of_a_chunk_alone() -> None:
    lr, decay, forget = (torch.rand(2, 13, dtype=torch.float64) for _ in range(3))
    decay[0, 2], forget[1, 3], forget[0, 0] = 0, 1, 1
    beta, f, G, m, n = coefficients(lr, decay, forget)
    memory, momentum = at_the_end(lr, decay, forget)
    torch.testing.assert_close(memory, (beta[:, -1], f[:, -1], G[:, -1]))
    torch.testing.assert_close(momentum, (torch.zeros_like(m), m, n))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("cuts", [[1] * 11, [3, 8], [4, 4, 3], [2, 1, 7, 1], [11]], ids=str)
def test_pieces_equal_the_whole(cuts: list[int], read: str) -> None:
    args = drawn(2, 11, 3, 4, 2)
    q, k, v, *parts, lr, decay, forget = args
    o, memory, momentum = memory_scan(q, k, v, parts[:4], parts[4:], lr, decay, forget, 4, read)
    state = MemoryState(tuple(parts[:4]), tuple(parts[4:]), tuple(parts[:4]))
    outs, begin = [], 0
    for size in cuts:
        piece = [x[:, begin : begin + size] for x in (q, k, v, lr, decay, forget)]
        out, state = memory_stream(*piece, state, chunk=4, read=read)
        outs.append(out)
        begin += size
    assert state.filled == 3
    whole, parted = (o, *memory, *momentum), (torch.cat(outs, 1), *state.memory, *state.momentum)
    torch.testing.assert_close(parted, whole, rtol=1e-10, atol=1e-12)
    dys = [torch.randn_like(y) for y in whole]
    pairs = zip(torch.autograd.grad(parted, args, dys), torch.autograd.grad(whole, args, dys), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_one_token_after_the_other_with_the_count_on_the_device() -> None:
    q, k, v, *parts, lr, decay, forget = drawn(2, 9, 3, 4, 2, grad=False)
    o, memory, momentum = memory_scan(q, k, v, parts[:4], parts[4:], lr, decay, forget, 4)
    state = MemoryState(tuple(parts[:4]), tuple(parts[4:]), tuple(parts[:4]), torch.tensor(0))
    outs = []
    for t in range(9):
        out, state = memory_stream(*[x[:, t : t + 1] for x in (q, k, v, lr, decay, forget)], state, chunk=4)
        outs.append(out)
    assert int(state.filled) == 1
    torch.testing.assert_close((torch.cat(outs, 1), state.memory, state.momentum), (o, memory, momentum))
    with pytest.raises(ValueError, match="one token a call, got 9"):
        memory_stream(q, k, v, lr, decay, forget, state)


@PLAIN
@pytest.mark.parametrize("read", READS)
def test_no_answer_depends_on_the_future(fn: Any, read: str) -> None:
    args = drawn(1, 10, 3, 4, 3, torch.float32, grad=False)
    before = fn(*args, 4, read)[0]
    for t in (3, 4, 6):
        later = [x.clone() if x.dim() and x.shape[1:2] == (10,) else x for x in args]
        for i in (0, 1, 2, 11, 12, 13):
            later[i][:, t:] += 1
        torch.testing.assert_close(fn(*later, 4, read)[0][:, :t], before[:, :t], rtol=1e-6, atol=1e-6)
        if read == "before":  # o_t itself sees nothing of token t but its query
            later[0] = args[0]
            torch.testing.assert_close(fn(*later, 4, read)[0][:, : t + 1], before[:, : t + 1])


@PLAIN
def test_nothing_stored_and_nothing_lost_is_a_plain_mlp(fn: Any) -> None:
    """lr = 0, forget = 0 and no momentum: every token asks the memory of the start."""
    q, k, v, *parts, lr, decay, _ = drawn(2, 6, 3, 4, 2, grad=False)
    zeros = torch.zeros_like(lr)
    memory, still = parts[:4], [torch.zeros_like(p) for p in parts[:4]]
    o, *state = fn(q, k, v, *memory, *still, zeros, decay, zeros, 4, "after")
    w1, b1, w2, b2 = memory
    hidden = torch.nn.functional.silu(q @ w1.mT + b1[:, None])
    torch.testing.assert_close(o, hidden @ w2.mT + b2[:, None])
    for mine, start in zip(state, [*memory, *still], strict=True):
        torch.testing.assert_close(mine, start)


def test_forgetting_all_leaves_the_momentum() -> None:
    q, k, v, *parts, lr, decay, forget = drawn(2, 6, 3, 4, 2, grad=False)
    _, memory, momentum = memory_scan(q, k, v, parts[:4], parts[4:], lr, decay, torch.ones_like(forget), 3)
    torch.testing.assert_close(memory, momentum, rtol=1e-12, atol=1e-14)


def test_it_learns_without_autograd() -> None:
    _, k, v, *parts, lr, _, _ = drawn(1, 64, 4, 8, 4, torch.float32, grad=False)
    key, value = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    rates = torch.full_like(lr, 0.05), torch.zeros_like(lr), torch.zeros_like(lr)
    still = [torch.zeros_like(p) for p in parts[:4]]
    with torch.inference_mode():
        o, memory, _ = memory_scan(key, key, value, parts[:4], still, *rates, 4)
    assert (o[:, -1] - value[:, -1]).norm() < 0.05 * (o[:, 0] - value[:, 0]).norm()
    assert not torch.equal(memory[0], parts[0])
    assert not any(part.requires_grad for part in memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v, *rest = drawn(2, 9, 8, 16, 8, dtype)
    parts, gates = rest[:8], rest[8:]
    o, memory, momentum = memory_scan(q, k, v, parts[:4], parts[4:], *gates, 4)
    assert o.dtype == dtype
    assert {p.dtype for p in (*memory, *momentum)} == {torch.float32}
    wide = [x.detach().double() for x in (q, k, v, *rest)]
    exact = reference(*wide, 4)
    for mine, truth in zip((o, *memory, *momentum), exact, strict=True):
        assert (mine - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()


def test_autocast_does_not_narrow_it() -> None:
    args = drawn(1, 9, 8, 16, 8, torch.float32, grad=False)
    outside = eager(*args, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = eager(*args, 4)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


@PLAIN
@pytest.mark.parametrize(("G", "T"), [(0, 4), (2, 0)])
def test_nothing_to_do(fn: Any, G: int, T: int) -> None:
    args = drawn(G, T, 3, 4, 2)
    o, *state = fn(*args, 4, "after")
    assert o.shape == (G, T, 2)
    assert all(torch.equal(mine, start) for mine, start in zip(state, args[3:11], strict=True))
    assert torch.autograd.grad(sum(p.sum() for p in state), args[3])[0].shape == args[3].shape


def test_refusals() -> None:
    q, k, v, *rest = drawn(2, 4, 3, 4, 2, grad=False)
    memory, momentum, gates = rest[:4], rest[4:8], rest[8:]
    with pytest.raises(ValueError, match="k has shape"):
        memory_scan(q, k[..., :2], v, memory, momentum, *gates)
    with pytest.raises(ValueError, match=r"lr has shape \(2,\), expected \[G, T\].*expand a constant one"):
        memory_scan(q, k, v, memory, momentum, gates[0][:, 0], *gates[1:])
    with pytest.raises(ValueError, match="chunk must be >= 1"):
        memory_scan(q, k, v, memory, momentum, *gates, chunk=0)
    with pytest.raises(TypeError, match="whole number of tokens"):
        memory_scan(q, k, v, memory, momentum, *gates, chunk=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read is 'now', expected one of after, before, chunk"):
        memory_scan(q, k, v, memory, momentum, *gates, read="now")
    with pytest.raises(ValueError, match=r"no sum over tokens.*pass read='chunk'"):
        memory_scan(q, k, v, memory, momentum, *gates, orthogonalize=5)
    with pytest.raises(TypeError, match="whole number of Newton-Schulz steps"):
        memory_scan(q, k, v, memory, momentum, *gates, read="chunk", orthogonalize=5.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="orthogonalize is True, expected a number"):
        memory_scan(q, k, v, memory, momentum, *gates, read="chunk", orthogonalize=True)
    with pytest.raises(ValueError, match="orthogonalize must be >= 0"):
        memory_scan(q, k, v, memory, momentum, *gates, read="chunk", orthogonalize=-1)
    with pytest.raises(TypeError, match=r"memory_w1 is torch.bfloat16; expected float32"):
        memory_scan(q, k, v, [p.bfloat16() for p in memory], momentum, *gates)  # type: ignore[arg-type]


def test_documented_example() -> None:
    (example,) = doctest.DocTestFinder().find(memory_scan, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_kernels_say_which_chunks_they_take() -> None:
    cases = {case.name: case for case in OP.cases()}
    large = cases["4x2048 512-512 chunk 2048"]
    assert large_supports(large) is None
    assert triton_supports(large) == "takes chunks of up to 64 tokens, not 2048"
    short = large.replace(chunk=64)
    assert large_supports(short) == "takes chunks of more than 64 tokens, not 64"
    assert triton_supports(short) is None
    assert triton_supports(short.replace(orthogonalize=5)) == "takes no orthogonalised updates"
    assert large_supports(large.replace(read="after")) == "takes read 'chunk', not 'after'"
    assert "runs on CUDA" in str(large_supports(Case(large.args, "cpu")))


def test_the_grid_is_valid() -> None:
    for case in OP.cases():
        OP.check(case)
        assert OP.cost(case).flops > OP.cost(case.without_grad()).flops or not case.needs_grad


def test_transforms_of_torch_func_agree_with_autograd() -> None:
    args = drawn(1, 5, 3, 4, 2)
    tangents = [torch.randn_like(x) for x in args]

    def loss(*args: Tensor) -> Tensor:
        o, *_ = memory_scan(*args[:3], args[3:7], args[7:11], *args[11:], 2)  # type: ignore[arg-type]
        return o.square().sum()

    expected = torch.autograd.grad(loss(*args), args)
    fixed = [x.detach() for x in args]
    places = tuple(range(len(args)))
    torch.testing.assert_close(torch.func.grad(loss, places)(*fixed), expected)
    rows = torch.func.vmap(torch.func.grad(loss, places))(*[x[None] for x in fixed])
    torch.testing.assert_close([row[0] for row in rows], list(expected))
    _, slope = torch.func.jvp(loss, tuple(fixed), tuple(tangents))
    torch.testing.assert_close(slope, sum((g * t).sum() for g, t in zip(expected, tangents, strict=True)))
