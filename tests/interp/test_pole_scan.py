"""The Triton candidate of pole_scan, interpreted, against the float64 reference; the op's laws and checks."""

import dataclasses
import doctest
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels import variants
from bakeoff.kernels.counter import launches
from bakeoff.ops.pole_scan import OP, kernels, pole_scan
from bakeoff.ops.pole_scan.plain import eager, scan
from bakeoff.ops.pole_scan.reference import pole_scan as reference
from bakeoff.ops.pole_scan.triton import pole_scan as triton
from bakeoff.select import Case
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

# Relative to the largest element: roundings of the result, and of a float32 walk over a chunk.
BOUND = {torch.float32: 3e-6, torch.complex64: 3e-6, torch.float16: 6e-4}


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 8, so that few positions are many chunks."""
    monkeypatch.setattr(kernels, "CHUNK", 8)


def tensors(B, T, C, K, *, dtype=torch.float32, state=True, slow=-4.0, grad=True):
    """Leaves: u, poles that forget within 1 / 10^slow positions at most, coef and state."""
    u = torch.randn(B, T, C).to(dtype)
    log_radius = -(10 ** (slow + (-0.3 - slow) * torch.rand(C, K)))
    theta = math.pi * torch.rand(C, K)
    coef = torch.randn(C, K, dtype=torch.complex64)
    start = torch.randn(B, C, K, dtype=torch.complex64) if state else None
    args = [u, log_radius, theta, coef, start]
    return [a if a is None else a.requires_grad_(grad) for a in args]


def wide(t):
    if t is None:
        return None
    return (
        t.detach().to(torch.complex128 if t.is_complex() else torch.float64).requires_grad_(t.requires_grad)
    )


def step(fn, args, dys):
    outputs = fn(*args)
    leaves = [a for a in args if a is not None and a.requires_grad]
    return (*outputs, *torch.autograd.grad(outputs, leaves, dys))


def cotangents(args):
    u, coef = args[0], args[3]
    return torch.randn(u.shape).to(u.dtype), torch.randn(u.shape[0], *coef.shape, dtype=torch.complex64)


def exact(args, dys):
    double = [wide(a) for a in args]
    return step(reference, double, [dys[0].double(), dys[1].to(torch.complex128)])


def assert_equals(got, want):
    for mine, truth in zip(got, want, strict=True):
        assert mine.shape == truth.shape
        assert mine.is_complex() == truth.is_complex()
        scale = truth.abs().max().clamp(min=1e-30)
        assert ((mine.to(truth.dtype) - truth).abs().max() / scale) <= BOUND[mine.dtype]


def assert_native(args, dys=None, fn=triton):
    dys = dys or cotangents(args)
    everything = [a for a in (*args, *dys) if a is not None]
    before = [a.detach().clone() for a in everything]
    with Poison() as poison:
        got = step(fn, args, dys)
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, everything, strict=True))
    assert_equals(got, exact(args, dys))


def loop(u, log_radius, theta, coef, state):
    """The definition, one position after the other."""
    p = torch.exp(torch.complex(log_radius, theta))
    z = torch.zeros(u.shape[0], *coef.shape, dtype=coef.dtype) if state is None else state
    ys = []
    for t in range(u.shape[1]):
        z = p * z + u[:, t, :, None]
        ys.append((coef * z).real.sum(-1))
    return torch.stack(ys, 1), z


@pytest.mark.parametrize("fn", [reference, eager, scan])
@pytest.mark.parametrize("shape", [(2, 1, 3, 2), (1, 5, 2, 1), (2, 64, 2, 3), (1, 130, 2, 2)], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_plain_candidates_are_the_recurrence(fn, shape, state):
    args = [wide(a) for a in tensors(*shape, state=state)]
    dys = cotangents(args)[0], torch.randn(shape[0], *shape[2:], dtype=torch.complex128)
    for mine, truth in zip(step(fn, args, dys), step(loop, args, dys), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-9)


def test_gradcheck_of_the_reference():
    args = [wide(a) for a in tensors(2, 5, 2, 2)]
    assert torch.autograd.gradcheck(reference, args)


LONG = [((2, 40, 33, 3), True), ((1, 33, 5, 16), False)]
FORMS = [
    *itertools.product([(2, 1, 3, 1), (1, 7, 2, 5)], [False, True]),
    *LONG,
    *(pytest.param(shape, not state, marks=pytest.mark.exhaustive) for shape, state in LONG),
]


@pytest.mark.parametrize(("shape", "state"), FORMS, ids=str)
def test_forward_and_gradients(shape, state):
    for dtype in (torch.float32, torch.float16):
        assert_native(tensors(*shape, dtype=dtype, state=state))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("T", [7, 8, 9, 16, 41, 75])
def test_many_chunks(T):
    assert_native(tensors(2, T, 3, 2))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("K", [3, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_every_variant_is_as_exact_as_the_default(K):
    args = tensors(1, 12, 17, K)
    for axis, tilings in triton.variants(OP.case(args)).items():
        for tiling in tilings[1:]:
            assert_native(args, fn=triton.bind(variants.text({axis: tiling})))


def test_grid_passes_the_contest_verification():
    """Against eager's own error, on ordinary and hostile inputs; memory as long as 10,000 positions."""
    case = next(case for case in OP.cases() if case.name == "fp32").replace()
    small = {name: meta for name, meta in case.args.items() if name != "u"}
    args = tensors(1, 140, 6, 3)
    case = Case({**small, **OP.case(args).args}, "cpu")
    _, deterministic = verify(OP, OP.candidate("triton"), list(yardsticks(OP, case)))
    assert deterministic


@pytest.mark.parametrize(("T", "seed", "slowest", "fastest"), [(7, 4, -0.5, -6.0), (64, 0, -1e-6, -1e-4)])
def test_extreme_poles_pass_the_contest_verification(T, seed, slowest, fastest):
    """Heavily damped ones, and ones that hardly forget, whose states outgrow what is heard of them."""

    def draw(name, meta, generator):
        if name not in ("log_radius", "theta"):
            return None
        even = torch.rand(meta.shape, generator=generator)
        return even * math.pi if name == "theta" else -((-slowest) ** (1 - even) * (-fastest) ** even)

    op = dataclasses.replace(OP, draw=draw)
    case = Case(OP.case(tensors(1, T, 24, 4, state=False)).args, "cpu")
    verify(op, op.candidate("triton"), yardsticks(op, case, seed=seed))


def test_a_long_memory_and_a_constant_input_lose_no_precision():
    """Roundings of a plain recurrence would all go in one direction. On the scale of sum |h| |u|, 995."""
    u = torch.ones(1, 1000, 2)
    log_radius = torch.full((2, 1), -1e-5)
    theta = torch.tensor([[0.0], [2 * math.pi / 16]])
    args = [u, log_radius, theta, torch.ones(2, 1, dtype=torch.complex64), None]
    y, end = triton(*args)
    want, last = reference(*[wide(a) for a in args])
    assert (y - want).abs().max() < 1e-6 * 995
    assert (end - last).abs().max() < 1e-6 * 995


@pytest.mark.parametrize("form", ["strided", "channel-major", "expanded"])
def test_layouts(form):
    args = tensors(2, 20, 6, 2)
    dys = list(cotangents(args))
    if form == "strided":
        args[0] = torch.randn(2, 20, 12)[..., :6].requires_grad_()
    elif form == "channel-major":
        args[0] = torch.randn(2, 6, 20).mT.requires_grad_()
        dys[0] = torch.randn(20, 6, 2).permute(2, 0, 1)
    else:
        dys[0] = torch.randn(6).expand(2, 20, 6)
        dys[1] = torch.randn(2, dtype=torch.complex64).expand(2, 6, 2)
    assert_native(args, dys)
    conjugated = [*args[:3], args[3].detach().conj().requires_grad_(), args[4]]
    assert_native(conjugated, dys)


def test_only_what_is_wanted_is_computed():
    args = tensors(2, 20, 3, 2)
    dys = cotangents(args)
    want = exact(args, dys)[2:]
    for i in range(5):
        some = [a.detach().requires_grad_(i == j) for j, a in enumerate(args)]
        assert_equals(torch.autograd.grad(triton(*some), some[i], dys), [want[i]])
        for one in (0, 1) if i != 3 else (0,):  # a single output is used; the state depends on no coefficient
            got = torch.autograd.grad(triton(*some)[one], some[i], dys[one])
            truth = [wide(a) for a in some]
            assert_equals(got, torch.autograd.grad(reference(*truth)[one], truth[i], wide(dys[one]).detach()))
    some = [a.detach().requires_grad_(j == 3) for j, a in enumerate(args)]
    assert not torch.autograd.grad(triton(*some)[1], some[3], dys[1])[0].any()


@settings(max_examples=settings.default.max_examples // 16)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 30),
    C=st.integers(1, 40),
    K=st.integers(1, 16),
    state=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape(B, T, C, K, state, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", 8)
        assert_native(tensors(B, T, C, K, state=state, dtype=dtype))


# The op's laws.

IMPLEMENTATIONS = pytest.mark.parametrize("fn", [triton, eager, scan, reference])


@IMPLEMENTATIONS
def test_impulse_response(fn):
    """A click gives h[n] = Re sum coef p^n itself."""
    _, log_radius, theta, coef, _ = tensors(1, 1, 3, 4, grad=False)
    u = torch.zeros(1, 40, 3)
    u[0, 0] = 1
    n = torch.arange(40)[:, None, None]
    h = (coef * torch.exp(n * torch.complex(log_radius, theta).to(torch.complex128))).real.sum(-1)
    torch.testing.assert_close(fn(u, log_radius, theta, coef, None)[0][0].double(), h, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("short_chunks")
def test_the_past_does_not_depend_on_the_future_bit_for_bit():
    args = tensors(1, 30, 3, 2, grad=False)
    y, _ = triton(*args)
    for t in (0, 7, 8, 29):
        args[0] = args[0].clone()
        args[0][:, t:] = 100 * torch.randn(1, 30 - t, 3)
        assert torch.equal(triton(*args)[0][:, :t], y[:, :t])
        y = triton(*args)[0]


@IMPLEMENTATIONS
@pytest.mark.parametrize("cuts", [(13,), (1, 2, 3), (8, 16)])
def test_pieces_equal_the_whole(fn, cuts):
    u, *poles, state = tensors(2, 20, 3, 2, grad=False)
    y, end = fn(u, *poles, state)
    parts, z = [], state
    for piece in torch.tensor_split(u, cuts, dim=1):
        part, z = fn(piece, *poles, z)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(z, end, rtol=1e-4, atol=2e-5)


def test_decoding_does_not_drift():
    """200 single steps against one pass in float64, with a memory of 10,000 positions."""
    u, *poles, _ = tensors(2, 200, 3, 2, grad=False)
    poles[0].fill_(-1e-4)
    z, ys = None, []
    for t in range(200):
        y, z = triton(u[:, t : t + 1], *poles, z)
        ys.append(y)
    want, end = reference(*[wide(a) for a in (u, *poles, None)])
    assert (torch.cat(ys, 1) - want).abs().max() < 2e-6 * want.abs().max()
    assert (z - end).abs().max() < 2e-6 * end.abs().max()


@IMPLEMENTATIONS
def test_linear_in_input_and_state_together_and_conjugate_poles_agree(fn):
    a, b = tensors(2, 20, 3, 2, grad=False), tensors(2, 20, 3, 2, grad=False)
    poles = a[1:4]
    one, two = fn(a[0], *poles, a[4]), fn(b[0], *poles, b[4])
    both = fn(2 * a[0] + b[0], *poles, 2 * a[4] + b[4])
    for x, y, z in zip(one, two, both, strict=True):
        torch.testing.assert_close(2 * x + y, z, rtol=1e-4, atol=5e-5)
    turned = fn(a[0], poles[0], -poles[1], poles[2].conj(), a[4].conj())
    torch.testing.assert_close(turned[0], one[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(turned[1].conj().resolve_conj(), one[1], rtol=1e-4, atol=2e-5)


def test_growing_poles_give_the_past_and_then_overflow():
    """log_radius > 0: finite as long as float32 is, and what came before stays right."""
    u = torch.ones(1, 200, 1)
    args = [u, torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.complex64), None]
    y, _ = triton(*args)
    want = torch.exp(torch.arange(1, 61, dtype=torch.float64)).cumsum(0) / math.e + 0 * u[0, 0, 0]
    torch.testing.assert_close(y[0, :60, 0].double(), want, rtol=1e-5, atol=0)
    assert not y[0, 100:].isfinite().any()


# What surrounds the kernels.


@pytest.mark.parametrize("impl", ["eager", "scan"])
def test_nothing_to_do(impl):
    u, *poles, state = tensors(2, 4, 3, 2)
    y, end = pole_scan(u[:, :0], *poles, state=state, impl=impl)
    assert y.shape == (2, 0, 3)
    assert torch.equal(end, state)
    assert torch.autograd.grad(end.abs().sum(), state)[0].isfinite().all()
    y, end = pole_scan(u[:0], *poles, impl=impl)
    assert (y.shape, end.shape) == ((0, 4, 3), (0, 3, 2))
    y, end = pole_scan(u[:, :0], *poles, impl=impl)
    assert not end.any()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("B", "T", "C"), [(0, 4, 3), (0, 1, 3), (2, 0, 3), (2, 4, 0)])
def test_the_kernels_too_have_nothing_to_do(B, T, C, state):
    """A graph of torch.compile that leaves B open comes to them with B = 0."""
    args = tensors(B, T, C, 2, state=state)
    dys = cotangents(args)
    y, end, *gradients = step(triton, args, dys)
    assert y.shape == (B, T, C)
    assert torch.equal(end, args[4]) if state else not end.any()
    assert not any(gradient.any() for gradient in gradients[:4])
    assert not state or torch.equal(gradients[4], dys[1])


def test_a_state_of_no_sequences_has_a_gradient():
    u, *poles, state = tensors(0, 4, 3, 2)
    for impl in (None, "eager", "scan"):
        _, end = pole_scan(u, *poles, state=state, impl=impl)
        (gradient,) = torch.autograd.grad(end.abs().sum(), state)
        assert gradient.shape == state.shape


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"u": torch.zeros(4, 3)}, ValueError, r"expected \[B, T, C\]; one sequence is u\[None\]"),
        ({"u": torch.zeros(2, 4, 3, dtype=torch.int64)}, TypeError, "floating point"),
        ({"theta": torch.zeros(3, 2).half()}, TypeError, r"expected float32: theta.float\(\)"),
        ({"theta": torch.zeros(3, 3)}, ValueError, r"theta has shape \(3, 3\), expected coef's, \(3, 2\)"),
        ({"coef": torch.zeros(3, 2)}, TypeError, r"torch.view_as_complex\(coef\)"),
        (
            {"coef": torch.zeros(4, 2, dtype=torch.complex64)},
            ValueError,
            "with C = 3 as of u, K >= 1",
        ),
        ({"coef": torch.zeros(3, 0, dtype=torch.complex64)}, ValueError, "K >= 1"),
        (
            {"state": torch.zeros(1, 3, 2, dtype=torch.complex64)},
            ValueError,
            "C = 3 as of u, K = 2 as of coef",
        ),
        ({"state": torch.zeros(2, 3, 2)}, TypeError, "expected complex64"),
        ({"log_radius": 0.5}, TypeError, "log_radius must be a tensor, got 0.5"),
    ],
)
def test_bad_arguments_name_the_fix(change, error, text):
    names = ("u", "log_radius", "theta", "coef", "state")
    call = dict(zip(names, tensors(2, 4, 3, 2), strict=True)) | change
    with pytest.raises(error, match=text):
        pole_scan(**call)


def test_what_triton_leaves_to_plain_pytorch():
    args = tensors(1, 4, 2, 17)
    with pytest.raises(Unsupported, match="up to 16 poles a channel, not 17"):
        pole_scan(*args[:4], impl="triton")
    with pytest.raises(Unsupported, match="float64"):
        pole_scan(args[0].double(), *args[1:4], impl="triton")
    with pytest.raises(Unsupported, match="empty u"):
        pole_scan(args[0][:, :0], *args[1:4], impl="triton")
    y, _ = pole_scan(*args[:4])
    assert torch.autograd.grad(y.sum(), args[3])[0].abs().sum() > 0


def test_twice_differentiating_triton_says_what_to_do():
    args = tensors(1, 4, 2, 2)
    y, _ = pole_scan(*args[:4], impl="triton")
    (gradient,) = torch.autograd.grad(y.square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="impl='eager'"):
        gradient.sum().backward()


def test_public_call_and_registered_op_agree():
    args = tensors(2, 9, 3, 2)
    dys = cotangents(args)
    one = step(lambda *a: pole_scan(*a[:4], state=a[4], impl="triton"), args, dys)
    two = step(lambda *a: triton.traced.forward(*a, True, "")[:2], args, dys)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("state", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_registered_op_passes_opcheck(state):
    args = tensors(2, 9, 3, 2, state=state)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton.traced.forward, (*args, True, ""), test_utils=tests)
    u, _, _, coef, _ = plain = [a if a is None else a.detach() for a in args]
    saved = (u, coef, *triton.traced.forward(*plain, True, "")[2:])
    for dy, dend, wanted in (
        (*cotangents(args), [True] * 4 + [state]),
        (cotangents(args)[0], None, [False, True, False, False, False]),
        (None, cotangents(args)[1], [True, False, False, True, False]),
    ):
        torch.library.opcheck(
            triton.traced.backward, (dy, dend, *saved, *plain, wanted, ""), test_utils=tests
        )


def test_one_position_without_gradients_is_one_launch():
    args = tensors(5, 1, 3, 2, grad=False)
    before = launches()
    got = triton(*args)
    assert launches() - before == 1
    assert_equals(got, reference(*[wide(a) for a in args]))


@pytest.mark.parametrize(("some", "count"), [((0,), 3), ((4,), 2), ((0, 4), 3), ((1,), 4), ((0, 1, 2, 3), 5)])
def test_gradients_that_nobody_asks_for_launch_nothing(some, count):
    args = [a.requires_grad_(i in some) for i, a in enumerate(tensors(2, 20, 3, 2, grad=False))]
    outputs = triton(*args)
    before = launches()
    torch.autograd.grad(outputs, [args[i] for i in some], cotangents(args))
    assert launches() - before == count


def test_compiles_whole_with_any_length():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def model(u, log_radius, theta, coef):
        y, end = pole_scan(u, log_radius, theta, coef, impl="triton")
        return y.sum() + end.real.sum()

    for length in (4, 6, 9):
        args = tensors(2, length, 2, 2, state=False)[:4]
        got = torch.autograd.grad(model(*args), args)
        y, end = reference(*args)
        torch.testing.assert_close(
            got, torch.autograd.grad(y.sum() + end.real.sum(), args), rtol=1e-4, atol=1e-4
        )
    assert len(graphs) == 2


def test_autocast_leaves_it_alone():
    args = tensors(1, 40, 3, 2, grad=False)
    for fn in (eager, scan):
        with torch.autocast("cpu", torch.bfloat16):
            y, end = fn(*args)
        assert_equals((y, end), reference(*[wide(a) for a in args]))


def test_documented_example():
    (example,) = doctest.DocTestFinder().find(pole_scan, globs={"pole_scan": pole_scan})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
